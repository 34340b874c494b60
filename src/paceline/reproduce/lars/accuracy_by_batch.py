"""Accuracies by batch become a table, with the paper's beside ours, and a chart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.reports.chart import Chart
from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.experiment import ExperimentPlan, Outcome
from paceline.reproduce.lars.grid import batches, cells_at, paper_batches, paper_rows
from paceline.reproduce.lars.networks import NORMED, PLAIN, SHOWN
from paceline.reproduce.lars.outcomes import accuracy_of, best_of
from paceline.reproduce.lars.wording import batch_text


def batch_table(plan: ExperimentPlan, outcomes: Mapping[str, Outcome], optimizer: str, title: str) -> PlainTable:
    """Return table 1 or 3: accuracies with their rates, the paper's beside ours; the chosen rates are marked."""
    rows = []
    for network in (PLAIN, NORMED):
        for place, batch in enumerate(batches(plan, optimizer)):
            cells = cells_at(plan, network, optimizer, batch)
            chosen, _ = best_of(plan, outcomes, cells)
            ours = two_a_line(
                f"{accuracy_of(plan, outcomes, cell):.1f}{'*' if cell == chosen and len(cells) > 1 else ''} "
                f"({cell.rate:g})"
                for cell in cells
            )
            rows.append((SHOWN[network], *paper_columns(plan, network, optimizer, place), batch_text(batch), ours))
    return PlainTable(
        title=title,
        headings=("network", "batch,\npaper", "paper: accuracy %\n(rate)", "batch,\nours", "ours: accuracy %\n(rate)"),
        rows=rows,
        caption="* the rate that is best on images held out, where there are several.",
        left=True,
    )


def paper_columns(plan: ExperimentPlan, network: str, optimizer: str, place: int) -> tuple[str, str]:
    """Return the paper's batches that our batch number `place` stands for, and its accuracies there with their rates.

    >>> paper_columns(ExperimentPlan(), "plain", "LARS", 3)
    ('16K, 32K', '55 (14), 46.9 (14)')
    """
    every = paper_batches(network, optimizer)
    wanted = (every[place],) if plan.size == "full" or place < 3 else every[3:]
    shown = [f"{accuracy:g} ({rate:g})" for batch, rate, accuracy in paper_rows(network, optimizer) if batch in wanted]
    return ", ".join(map(batch_text, wanted)), two_a_line(shown)


def two_a_line(figures: Iterable[str]) -> str:
    """Return figures with commas between, two in a line, so that a table of them fits a terminal.

    >>> two_a_line(["1", "2", "3"])
    '1, 2,\\n3'
    """
    found = list(figures)
    return ",\n".join(", ".join(found[place : place + 2]) for place in range(0, len(found), 2))


def batch_chart(name: str, title: str, caption: str, found: Mapping[str, Mapping[int, float]]) -> Chart:
    """Return a chart of accuracies over the batch, with a line for each name."""
    lines = [
        Series(name=key, points=[(float(batch), value / 100) for batch, value in each.items()])
        for key, each in found.items()
    ]
    return line_chart(name, title, caption, lines, x="batch", y="test accuracy", log_x=True, percent=True)
