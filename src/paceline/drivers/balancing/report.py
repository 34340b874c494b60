"""The table of shares: who computes how much, how long that takes, and what equal shares would have taken."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from paceline.quantities import counted, duration_text, percent_text
from paceline.terminal import WIDTH, text_table


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareTable:
    """The shares of all ranks, and the seconds that each is predicted to be busy with its own and with an equal one.

    `step_seconds` is how long a step was measured to take, with the waits for other ranks in it.

    >>> print(ShareTable(shares=(30, 10), predicted_seconds=(0.3, 0.3), equal_seconds=(0.2, 0.6), step_seconds=0.31,
    ...                  changes=1))
    rank  samples  of a batch  predicted  with equal shares
       0       30        75 %     300 ms             200 ms
       1       10        25 %     300 ms             600 ms
    <BLANKLINE>
    a step takes 310 ms (predicted 300 ms); with equal shares the slowest rank would
    take 600 ms. Shares have changed once.
    """

    shares: tuple[int, ...]
    predicted_seconds: tuple[float, ...] = ()
    equal_seconds: tuple[float, ...] = ()
    step_seconds: float | None = None
    changes: int = 0

    @property
    def speedup(self) -> float | None:
        """How many times as long the slowest rank would take with equal shares; None as long as nothing is known."""
        return max(self.equal_seconds) / max(self.predicted_seconds) if self.predicted_seconds else None

    @property
    def sentence(self) -> str:
        """The line that goes with the table."""
        changed = {0: "not changed", 1: "changed once"}.get(self.changes, f"changed {self.changes} times")
        if not self.predicted_seconds:
            return f"{counted(len(self.shares), 'rank')}; nothing is known of their speeds yet."
        measured = "" if self.step_seconds is None else f"a step takes {duration_text(self.step_seconds)} "
        predicted = duration_text(max(self.predicted_seconds))
        begins = f"{measured}(predicted {predicted})" if measured else f"a step is predicted to take {predicted}"
        return (
            f"{begins}; with equal shares the slowest rank would take {duration_text(max(self.equal_seconds))}. "
            f"Shares have {changed}."
        )

    def __str__(self) -> str:
        total = sum(self.shares)
        heading = ("rank", "samples", "of a batch", "predicted", "with equal shares")
        rows = [
            (
                str(rank),
                str(share),
                percent_text(share / total),
                duration_text(self.predicted_seconds[rank]) if self.predicted_seconds else "-",
                duration_text(self.equal_seconds[rank]) if self.equal_seconds else "-",
            )
            for rank, share in enumerate(self.shares)
        ]
        lines = text_table([heading, *rows], align=">>>>>")
        return "\n".join([*lines, "", *textwrap.wrap(self.sentence, WIDTH)])
