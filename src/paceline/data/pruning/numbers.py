"""Numbers as they are given: whole where they must be, and of any kind that is one (numpy's too)."""

from __future__ import annotations

import math
import operator
from typing import Any


def whole(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """The value as an int, if it is a whole number in its range.

    >>> whole("batch_size", 2.5, least=1)
    Traceback (most recent call last):
    ValueError: batch_size must be a whole number of at least 1 (batch_size=2.5)
    """
    limits = f"of at least {least:,}" if most is None else f"between {least:,} and {most:,}"
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least or (most is not None and number > most):
        raise ValueError(f"{name} must be a whole number {limits} ({name}={value!r})")
    return number


def real(name: str, value: Any) -> float:
    """The value as a float, if it is a number and finite.

    >>> real("tolerance", "much")
    Traceback (most recent call last):
    ValueError: tolerance must be a finite number (tolerance='much')
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool | str) or not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number ({name}={value!r})")
    return number
