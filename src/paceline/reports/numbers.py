"""How numbers are written, in the table and on the page alike: short, and with the digits that matter."""

from __future__ import annotations

import math

from paceline.reports.results import Result

UNKNOWN = "-"
MOST_CHARACTERS = 160


def seconds_text(seconds: float | None) -> str:
    """Seconds with about three digits.

    >>> [seconds_text(value) for value in (0.01234, 1.2345, 123.45, 12345.6, 2.5e7, None)]
    ['0.012', '1.23', '123.5', '12,346', '2.5e+07', '-']
    """
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds >= 1e6:
        return f"{seconds:.1e}"
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.2f}" if seconds < 10 else _from_ten(seconds)


def loss_text(loss: float | None) -> str:
    """A loss with three or four digits.

    >>> [loss_text(value) for value in (0.12345, 2.3026, 0.00001, 54321.0, None)]
    ['0.1235', '2.303', '1.0e-05', '5.4e+04', '-']
    """
    if loss is None or not math.isfinite(loss):
        return UNKNOWN
    if loss >= 1000 or 0 < loss < 0.001:
        return f"{loss:.1e}"
    return f"{loss:.3f}" if loss >= 1 else f"{loss:.4f}"


def percent_text(share: float | None, digits: int = 0) -> str:
    """A share as a percentage.

    >>> percent_text(0.345), percent_text(-0.0001), percent_text(0.9123, 1), percent_text(None)
    ('34 %', '0 %', '91.2 %', '-')
    """
    if share is None or not math.isfinite(share):
        return UNKNOWN
    rounded = round(100 * share, digits) + 0.0  # adding 0.0 turns -0.0 into 0.0
    return f"{rounded:.{digits}f} %"


def count_text(count: float) -> str:
    """A count in at most six characters.

    >>> [count_text(value) for value in (7, 12345, 123456, 12345678)]
    ['7', '12,345', '123k', '12.3M']
    """
    if count < 99_999.5:
        return f"{count:,.0f}"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return f"{count / 1e3:.0f}k"


def final_loss_text(row: Result) -> str:
    """The final loss, or how many runs diverged.

    >>> from dataclasses import replace
    >>> row = Result(label="lgc", strategy="lgc", runs=3, loss=0.5)
    >>> [final_loss_text(replace(row, diverged=runs)) for runs in (0, 1, 3)]
    ['0.5000', '1/3 div.', 'diverged']
    """
    if not row.diverged:
        return loss_text(row.loss)
    return "diverged" if row.diverged == row.runs else f"{row.diverged}/{row.runs} div."


def target_text(row: Result) -> str:
    """Seconds to the target loss, or how many runs reached it where not all did.

    >>> target_text(Result(label="lgc", strategy="lgc", runs=3, reached=2))
    '2/3'
    """
    if row.seconds_to_target is None and row.reached:
        return f"{row.reached}/{row.runs}"
    return seconds_text(row.seconds_to_target)


def shortened(text: str) -> str:
    """Words of a journal in at most 160 characters: a reason can come from a stranger.

    >>> len(shortened("no sign of life " * 100))
    160
    """
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}..."


def _from_ten(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 1000 else f"{seconds:,.0f}"
