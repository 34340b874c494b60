"""Bits against error in letters, for a terminal: both axes logarithmic, as on the page."""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDTH, HEIGHT = 66, 9
MARGIN = 8  # for the numbers of the vertical axis


def picture(points: Sequence[tuple[str, float, float]], *, width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """Lines with a letter for each (letter, bits, error); an error of 0 lies on the bottom line.

    >>> print("\\n".join(picture([("a", 32, 0.0), ("b", 4, 0.1), ("c", 1, 1.0)], width=20, height=3)))
      error
          1 |c
            |        b
      exact |                   a
            +--------------------
             1                 32
             bits per element
    """
    floor, top = _errors(points)
    bits = [math.log10(point[1]) for point in points]
    left, right = min(bits), max(bits)
    rows = [[" "] * width for _ in range(height)]
    for letter, wide, error in points:
        column = round((width - 1) * (math.log10(wide) - left) / (right - left or 1.0))
        high = 0.0 if error <= 0 else (math.log10(error) - floor) / (top - floor or 1.0)
        _put(rows[height - 1 - round((height - 1) * high)], column, letter)
    exact = any(error <= 0 for _, _, error in points)
    names = [f"{10**top:.2g}", *[""] * (height - 2), "exact" if exact else f"{10**floor:.2g}"]
    low, high_text = f"{10**left:.2g}", f"{10**right:.3g}"
    return [
        f"{'error':>{MARGIN - 1}}",
        *(f"{name:>{MARGIN - 1}} |{''.join(row)}".rstrip() for name, row in zip(names, rows, strict=True)),
        f"{'':>{MARGIN}}+{'-' * width}",
        f"{'':>{MARGIN}} {low}{high_text:>{width - len(low)}}",
        f"{'':>{MARGIN}} bits per element",
    ]


def _errors(points: Sequence[tuple[str, float, float]]) -> tuple[float, float]:
    """The powers of ten of the bottom line and of the top one; an exact 0 wants a decade more below."""
    errors = [math.log10(error) for _, _, error in points if error > 0] or [0.0]
    return min(errors) - (1.0 if len(errors) < len(points) else 0.0), max(errors)


def _put(row: list[str], column: int, letter: str) -> None:
    """In its column, or the nearest that is free."""
    free = [index for index, there in enumerate(row) if there == " "]
    if free:
        row[min(free, key=lambda index: abs(index - column))] = letter
