"""Tables for the terminal: the results of a race in 80 columns, and tables of text that a page shows as well."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.reports.results import ResultRow, accuracy_text, baseline_name, cells, goal_of, group_traces, results
from paceline.reports.sentences import conditions, dropped_sentences
from paceline.terminal import rich_table
from paceline.traces import Trace

if TYPE_CHECKING:
    from rich.table import Table

# Two lines each, so that ten columns fit a terminal of 80.
HEADINGS = (
    "\nstrategy",
    "\nrounds",
    "time\n(s)",
    "saved\nvs {baseline}",
    "to\n{goal}",
    "final\nloss",
    "test\nacc.",
    "grads\nused",
    "\nlate",
    "\ndropped",
)
CAPTION_WIDTH = 64  # rich wraps at the width of the table


def results_table(traces: Sequence[Trace]) -> Table:
    """Return time, loss, accuracy and the fate of the gradients for each strategy, with means over seeds.

    There is room for one target: a target accuracy, which somebody must have asked for, takes the place of the loss.

    >>> from rich.console import Console
    >>> full = Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=5, seconds=4.0, used=10)
    >>> lgc = Trace(strategy="lgc", seed=0, workers=2, recipe={}, rounds_done=5, seconds=3.0, used=5, late=5)
    >>> Console(width=80).print(results_table([full, lgc]))
    <BLANKLINE>
                       time   saved     to final  test grads
     strategy  rounds   (s) vs full target  loss  acc.  used  late dropped
    ...
     full           5  4.00       -       -     -     -    10     0       0
     lgc            5  3.00    25 %       -     -     -     5     5       0
    <BLANKLINE>
    2 workers, virtual seconds, late work partial, timing only,
    nothing was trained, 1 seed
    """
    groups = group_traces(traces)
    paragraphs = [", ".join(conditions(groups)), *dropped_sentences(groups)]
    caption = "\n".join(line for paragraph in paragraphs for line in textwrap.wrap(paragraph, CAPTION_WIDTH))
    against = baseline_name(group.strategy for group in groups)
    against = against.removesuffix("@ranks").removesuffix("+speed")  # a column of 80 is short
    rows = results(groups)
    headings = [heading.format(baseline=against, goal=_goal_name(rows)) for heading in HEADINGS]
    goal = goal_of(rows)
    return rich_table(
        headings,
        [[row.label, *cells(row, goal)] for row in rows],
        caption=caption,
        least_name=9,
        warned=[index for index, row in enumerate(rows) if row.diverged],
    )


def _goal_name(rows: Sequence[ResultRow]) -> str:
    if goal_of(rows) == "loss":
        return "target"
    targets = {row.target_accuracy for row in rows if row.target_accuracy is not None}
    return accuracy_text(targets.pop()) if len(targets) == 1 else "acc."


@dataclass(frozen=True, kw_only=True)
class PlainTable:
    """A table of text for the terminal and for a page.

    A newline in a heading breaks it in the terminal. `marked` are (row, column) of the cells to stress, `warned` the
    rows to mark. On a page there may be headings `over` groups of columns (a text, a number of columns) and `dots` with
    the colour of each row; a table of words is aligned to the `left`.

    >>> PlainTable(title="Sizes", headings=("codec", "bits per\\nelement"), rows=[("half", "16")], caption="").left
    False
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    marked: frozenset[tuple[int, int]] = frozenset()
    warned: frozenset[int] = frozenset()
    over: Sequence[tuple[str, int]] = ()
    dots: Sequence[str] = ()
    left: bool = False

    def rich(self) -> Table:
        return rich_table(
            self.headings,
            self.rows,
            title=self.title,
            caption=self.caption,
            marked=self.marked,
            warned=sorted(self.warned),
        )
