"""Sizes and rates as people write them: 2GB, 500 MB, 1Gbit/s, 125MB/s."""

from __future__ import annotations

import math
import re

from paceline.cli.options import UsageError

PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2.0**10,
    "mi": 2.0**20,
    "gi": 2.0**30,
    "ti": 2.0**40,
}
NUMBER = r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*"
PREFIX = r"((?:[kKmMgGtT]i?)?)"
SIZE = re.compile(NUMBER + PREFIX + r"B\s*")
RATE = re.compile(NUMBER + PREFIX + r"(bit/s|bps|B/s)\s*")


def size_in_bytes(option: str, text: str) -> float:
    """The bytes that were meant.

    >>> size_in_bytes("--memory", "2GB"), size_in_bytes("--memory", "1.5 MiB")
    (2000000000.0, 1572864.0)
    >>> size_in_bytes("--memory", "2")
    Traceback (most recent call last):
    paceline.cli.options.UsageError: --memory must be a size above 0 such as 500MB, 2GB or 2GiB (found '2')
    """
    found = SIZE.fullmatch(text)
    value = _times(found[1], found[2]) if found else 0.0
    if not 0 < value < math.inf:
        raise UsageError(f"{option} must be a size above 0 such as 500MB, 2GB or 2GiB (found {text!r})")
    return value


def rate_in_bytes(option: str, text: str) -> float:
    """The bytes per second that were meant.

    >>> rate_in_bytes("--bandwidth", "1Gbit/s"), rate_in_bytes("--bandwidth", "125 MB/s")
    (125000000.0, 125000000.0)
    >>> rate_in_bytes("--bandwidth", "fast")
    Traceback (most recent call last):
    paceline.cli.options.UsageError: --bandwidth must be a rate above 0 such as 1Gbit/s or 125MB/s (found 'fast')
    """
    found = RATE.fullmatch(text)
    value = _times(found[1], found[2]) / (1 if found[3] == "B/s" else 8) if found else 0.0
    if not 0 < value < math.inf:
        raise UsageError(f"{option} must be a rate above 0 such as 1Gbit/s or 125MB/s (found {text!r})")
    return value


def _times(number: str, prefix: str) -> float:
    try:
        return float(number) * PREFIXES[prefix.lower()]
    except ValueError:  # 1.2.3
        return 0.0
