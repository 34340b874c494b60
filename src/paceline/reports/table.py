"""The table a race ends in: one line per strategy, in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.quantities import UNKNOWN, count_text, percent_text, seconds_text
from paceline.reports.conditions import conditions
from paceline.reports.groups import group_traces
from paceline.reports.numbers import final_loss_text, target_text
from paceline.reports.results import Result, baseline_name, results
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
    "to\ntarget",
    "final\nloss",
    "test\nacc.",
    "grads\nused",
    "\nlate",
    "\ndropped",
)


CAPTION_WIDTH = 64  # rich wraps at the width of the table


def results_table(traces: Sequence[Trace]) -> Table:
    """Time, loss, accuracy and the fate of the gradients, for each strategy; means where there are seeds.

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
    caption = "\n".join(textwrap.wrap(", ".join(conditions(groups)), CAPTION_WIDTH))
    headings = [heading.format(baseline=baseline_name(group.strategy for group in groups)) for heading in HEADINGS]
    rows = results(groups)
    return rich_table(
        headings,
        [[row.label, *cells(row)] for row in rows],
        caption=caption,
        least_name=9,
        warned=[index for index, row in enumerate(rows) if row.diverged],
    )


def cells(row: Result) -> list[str]:
    """The cells after the name, in the order of the headings; the page shows the same.

    >>> row = Result(label="lgc", strategy="lgc", rounds=10, seconds=6.5, saved=0.35, seconds_to_target=4.0,
    ...              loss=0.2, accuracy=0.9, used=70, late=30)
    >>> cells(row)
    ['10', '6.50', '35 %', '4.00', '0.2000', '90.0 %', '70', '30', '0']
    """
    return [
        count_text(row.rounds),
        seconds_text(row.seconds),
        UNKNOWN if row.saved is None else percent_text(row.saved),
        target_text(row),
        final_loss_text(row),
        percent_text(row.accuracy, 1),
        count_text(row.used),
        count_text(row.late),
        count_text(row.dropped),
    ]
