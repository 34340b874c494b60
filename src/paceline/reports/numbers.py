"""The cells of a row of results whose text depends on more than one number."""

from __future__ import annotations

from paceline.quantities import loss_text, seconds_text
from paceline.reports.results import Result
from paceline.terminal import shortened as cut

MOST_CHARACTERS = 160


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
    """Return a text of a journal in at most 160 characters: a reason can come from a stranger.

    >>> len(shortened("no sign of life " * 100))
    160
    """
    return cut(text, MOST_CHARACTERS, dots="...", cut="end")
