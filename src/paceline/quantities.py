"""Durations, sizes, counts, rates and shares: how they are written for people, and read from what people typed.

    seconds_text      0.012 | 1.23 | 12,346      seconds in a column of seconds
    duration_text     12 us | 12.3 ms | 1.23 s   a duration with its unit
    calendar_text     59.50 s | 1 h 01 min       a duration of hours or days
    size_text         512 B | 2.5 MB             bytes, in powers of 1000
    count_text        12,345 | 123k | 12.3M      a count in at most six characters
    number_text       5.76 | 0.000577 | 2.5e+09  any number in at most eight characters
    percent_text      34 % | 91.2 %              a share
    loss_text         0.1235 | 1.0e-05           a loss

Reports, terminal tables, error messages and logs all write numbers with these functions, so that one value looks the
same everywhere. A value that is missing or not finite is written as "-" where a table may hold one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError

UNKNOWN = "-"
DAY, HOUR, MINUTE = 86_400, 3_600, 60
TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
SIZE_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
COUNT_UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6))

# -- durations ---------------------------------------------------------------------------------------------------------


def seconds_text(seconds: float | None) -> str:
    """Return seconds with about three digits and without a unit.

    >>> [seconds_text(value) for value in (0.01234, 1.2345, 123.45, 12345.6, 2.5e7, None)]
    ['0.012', '1.23', '123.5', '12,346', '2.5e+07', '-']
    """
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds >= 1e6:
        return f"{seconds:.1e}"
    if seconds >= 10:
        return f"{seconds:.1f}" if seconds < 999.95 else f"{seconds:,.0f}"
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3f}"


def duration_text(seconds: float, *, trim: bool = False) -> str:
    """Return a duration with about three digits and its unit; with `trim`, three digits without trailing zeros.

    >>> duration_text(0.0000123), duration_text(0.0123), duration_text(1.2), duration_text(200)
    ('12 us', '12.3 ms', '1.20 s', '200 s')
    >>> duration_text(0.0000123, trim=True), duration_text(1.2, trim=True)
    ('12.3 us', '1.2 s')
    """
    unit, scale = time_unit(float(f"{seconds:.2e}"))  # as it will be written: 999.96 ms are a second
    value = seconds / scale
    if trim:
        return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    digits = 0 if unit == "us" or value >= 100 else 2 if value < 10 else 1
    return f"{value:.{digits}f} {unit}"


def calendar_text(seconds: float) -> str:
    """Return a duration in seconds, minutes, hours or days, whichever suits it.

    >>> calendar_text(59.5), calendar_text(3700), calendar_text(200_000), calendar_text(-3)
    ('59.50 s', '1 h 01 min', '2 d 07 h', '-3.00 s')
    """
    sign, rest = ("-" if seconds < 0 else ""), abs(seconds)
    if round(rest, 2) < MINUTE:
        return f"{sign}{rest:.2f} s"
    rest = round(rest)
    if rest < HOUR:
        return f"{sign}{rest // MINUTE:.0f} min {rest % MINUTE:02.0f} s"
    if rest < DAY:
        return f"{sign}{rest // HOUR:.0f} h {rest % HOUR // MINUTE:02.0f} min"
    return f"{sign}{rest // DAY:,.0f} d {rest % DAY // HOUR:02.0f} h"


def time_unit(longest_seconds: float) -> tuple[str, float]:
    """Return the unit for an axis of time up to `longest_seconds`, and that unit's length in seconds.

    >>> time_unit(2.5), time_unit(0.02), time_unit(0.0)
    (('s', 1.0), ('ms', 0.001), ('us', 1e-06))
    """
    return next((unit for unit in TIME_UNITS if longest_seconds >= unit[1]), TIME_UNITS[-1])


# -- sizes -------------------------------------------------------------------------------------------------------------


def size_text(number_of_bytes: float) -> str:
    """Return a number of bytes with one decimal and its unit.

    >>> size_text(512), size_text(2_500_000), size_text(3_000_000_000)
    ('512 B', '2.5 MB', '3.0 GB')
    """
    for unit, scale in reversed(SIZE_UNITS):
        text = f"{number_of_bytes / scale:.{0 if unit == 'B' else 1}f}"
        if abs(float(text)) < 1000:
            break
    return f"{text} {unit}"


def size_unit(most_bytes: float) -> tuple[str, float]:
    """Return the unit for an axis of bytes up to `most_bytes`, and how many bytes that unit has.

    >>> size_unit(2_500_000), size_unit(10)
    (('MB', 1000000.0), ('B', 1.0))
    """
    return next((unit for unit in SIZE_UNITS if most_bytes >= unit[1]), SIZE_UNITS[-1])


# -- counts and other numbers ------------------------------------------------------------------------------------------


def count_text(count: float) -> str:
    """Return a count in at most six characters.

    >>> [count_text(value) for value in (7, 12345, 123456, 12345678)]
    ['7', '12,345', '123k', '12.3M']
    """
    if count < 99_999.5:
        return f"{count:,.0f}"
    for unit, size in (("k", 1e3), *reversed(COUNT_UNITS)):
        text = f"{count / size:.{0 if unit == 'k' else 1}f}"
        if float(text) < 1000:
            break
    return f"{text}{unit}"


def exact_count_text(count: float) -> str:
    """Return a count with all its digits, up to twelve of them.

    >>> exact_count_text(8_935_000), exact_count_text(2_000_000_000_000_000)
    ('8,935,000', '2.000e+15')
    """
    return f"{count:,.0f}" if abs(count) < 1e12 else f"{count:.3e}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun in the singular or the plural.

    >>> counted(1, "device"), counted(2_000, "sample"), counted(4, "micro-batch")
    ('1 device', '2,000 samples', '4 micro-batches')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("ch") else "s")


def number_text(value: float | None) -> str:
    """Return any number in at most eight characters, with the digits that matter.

    >>> [number_text(value) for value in (5.7634, 0.000577, 1345.4, 2.5e9, 3e-12, 0.0, math.inf, math.nan, None)]
    ['5.76', '0.000577', '1345', '2.5e+09', '3.0e-12', '0', 'inf', 'nan', '-']
    """
    if value is None:
        return UNKNOWN
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-4 <= abs(value) < 1000:
        return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    return f"{value:.0f}" if 1 <= abs(value) < 1e5 else f"{value:.1e}"


def percent_text(share: float | None, digits: int = 0) -> str:
    """Return a share as a percentage.

    >>> percent_text(0.345), percent_text(-0.0001), percent_text(0.9123, 1), percent_text(None)
    ('34 %', '0 %', '91.2 %', '-')
    """
    if share is None or not math.isfinite(share):
        return UNKNOWN
    rounded = round(100 * share, digits) + 0.0  # adding 0.0 turns -0.0 into 0.0
    return f"{rounded:.{digits}f} %"


def loss_text(loss: float | None) -> str:
    """Return a loss with three or four digits.

    >>> [loss_text(value) for value in (0.12345, 2.3026, 0.00001, 54321.0, None)]
    ['0.1235', '2.303', '1.0e-05', '5.4e+04', '-']
    """
    if loss is None or not math.isfinite(loss):
        return UNKNOWN
    if loss >= 1000 or 0 < loss < 0.001:
        return f"{loss:.1e}"
    return f"{loss:.3f}" if loss >= 1 else f"{loss:.4f}"


# -- what people type --------------------------------------------------------------------------------------------------

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
TIME = re.compile(NUMBER + r"(us|ms|s|min|h|d)\s*")
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}


class QuantityError(PacelineError, ValueError):
    """A size or a rate that cannot be understood."""


def size_in_bytes(name: str, text: str) -> float:
    """Return the bytes that `text` stands for; an error calls the value by its `name`.

    >>> size_in_bytes("--memory", "2GB"), size_in_bytes("--memory", "1.5 MiB")
    (2000000000.0, 1572864.0)
    >>> size_in_bytes("--memory", "2")
    Traceback (most recent call last):
    paceline.quantities.QuantityError: --memory must be a size above 0 such as 500MB, 2GB or 2GiB (found '2')
    """
    value = _scaled(SIZE.fullmatch(text))
    if not 0 < value < math.inf:
        raise QuantityError(f"{name} must be a size above 0 such as 500MB, 2GB or 2GiB (found {text!r})")
    return value


def rate_in_bytes(name: str, text: str) -> float:
    """Return the bytes per second that `text` stands for; an error calls the value by its `name`.

    >>> rate_in_bytes("--bandwidth", "1Gbit/s"), rate_in_bytes("--bandwidth", "125 MB/s")
    (125000000.0, 125000000.0)
    >>> rate_in_bytes("--bandwidth", "fast")
    Traceback (most recent call last):
    paceline.quantities.QuantityError: --bandwidth must be a rate above 0 such as 1Gbit/s or 125MB/s (found 'fast')
    """
    found = RATE.fullmatch(text)
    value = _scaled(found) / (1 if found and found[3] == "B/s" else 8)
    if not 0 < value < math.inf:
        raise QuantityError(f"{name} must be a rate above 0 such as 1Gbit/s or 125MB/s (found {text!r})")
    return value


def with_unit(name: str, value: Any) -> Any:
    """Return a text with a unit as a number in the unit that `name` ends with; any other value as it is.

    >>> with_unit("shift_seconds", "5ms"), with_unit("server_bits_per_second", "1Gbit/s"), with_unit("memory_mb", "2GB")
    (0.005, 1000000000.0, 2000.0)
    >>> with_unit("shift_seconds", "2GB"), with_unit("shift_seconds", "0.5"), with_unit("shape", "5ms")
    ('2GB', '0.5', '5ms')
    """
    kind = next((kind for kind in NAMED_UNITS if name.endswith(kind)), None)
    if kind is None or not isinstance(value, str):
        return value
    unit = NAMED_UNITS[kind]
    found = unit.pattern.fullmatch(value)
    try:
        return value if found is None else unit.base(found) / unit.size
    except ValueError:  # 1.2.3s
        return value


def unit_examples(name: str) -> str:
    """Return what a value may be besides a plain number, if its name ends with a unit; else nothing.

    >>> unit_examples("shift_seconds"), unit_examples("shape")
    (' of seconds, or a time such as 5ms, 2s or 1min', '')
    """
    return next((unit.words for kind, unit in NAMED_UNITS.items() if name.endswith(kind)), "")


@dataclass(frozen=True)
class _NamedUnit:
    """A unit that names of settings end with: `size` is what it has of the base unit that texts are read in."""

    size: float
    pattern: re.Pattern[str]
    base: Callable[[re.Match[str]], float]
    words: str


def _seconds(found: re.Match[str]) -> float:
    return float(found[1]) * SECONDS[found[2]]


def _bytes(found: re.Match[str]) -> float:
    return float(found[1]) * PREFIXES[found[2].lower()]


def _bits(found: re.Match[str]) -> float:
    return _bytes(found) * (8 if found[3] == "B/s" else 1)


_TIMES, _SIZES, _RATES = "a time such as 5ms, 2s or 1min", "a size such as 500MB or 2GB", "a rate such as 1Gbit/s"
NAMED_UNITS = {
    "_bits_per_second": _NamedUnit(1.0, RATE, _bits, f" of bits per second, or {_RATES}"),
    "_mbit": _NamedUnit(1e6, RATE, _bits, f" of Mbit/s, or {_RATES}"),
    "_seconds": _NamedUnit(1.0, TIME, _seconds, f" of seconds, or {_TIMES}"),
    "_ms": _NamedUnit(1e-3, TIME, _seconds, f" of milliseconds, or {_TIMES}"),
    "_bytes": _NamedUnit(1.0, SIZE, _bytes, f" of bytes, or {_SIZES}"),
    "_mb": _NamedUnit(1e6, SIZE, _bytes, f" of MB, or {_SIZES}"),
}
"""The end of a setting's name -> the unit of its number."""


def _scaled(found: re.Match[str] | None) -> float:
    """Return a matched number times its prefix; 0 where nothing matched or the number is none (1.2.3)."""
    try:
        return _bytes(found) if found else 0.0
    except ValueError:
        return 0.0
