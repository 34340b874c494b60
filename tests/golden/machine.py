"""Which kind of machine this is: on one kind the same program gives the same bits."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import numpy as np
import torch


def kind_of_machine():
    """Return what decides about the last bit of a float: processor, its vector instructions, numpy and torch."""
    found = Path("/proc/cpuinfo")
    text = found.read_text() if found.is_file() else ""
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*: (.*)$", text, re.MULTILINE)
    vectors = [flag for flag in (flags[1].split() if flags else []) if re.match(r"avx|fma|sse|amx", flag)]
    return {
        "machine": platform.machine(),
        "processor": model[1] if model else platform.processor(),
        "instructions": " ".join(sorted(vectors)),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


class AnyFingerprint(str):
    """Equal to every fingerprint, so that a replay goes on where another machine's weights differ in the last bit."""

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    __hash__ = str.__hash__
