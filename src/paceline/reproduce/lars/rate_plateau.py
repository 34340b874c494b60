"""Figure 3 shows the accuracy of LARS over the rate at the two largest batches: many rates are about as good."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, figure, within
from paceline.reproduce.experiment import ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.large_batch_training import WITH_LARS
from paceline.reproduce.lars.cells import LarsCell, cell_jobs
from paceline.reproduce.lars.grid import batches
from paceline.reproduce.lars.networks import NORMED
from paceline.reproduce.lars.outcomes import CHANCE, accuracy_of
from paceline.reproduce.lars.wording import FULL_AUGMENTATION, TRUST, batch_text, points, remarks_for
from paceline.reproduce.published import LARS_FIGURE_3_ACCURACY, LARS_FIGURE_3_BATCH, LARS_FIGURE_3_RATES


def figure_3_rates(plan: ExperimentPlan) -> tuple[float, ...]:
    """Return the rates; in the laboratory they are the root of two apart, and every other one is a rate of table 3.

    >>> figure_3_rates(ExperimentPlan())
    (0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8, 1.1)
    """
    return tuple(
        plan.choose(
            toy=(0.1, 0.2, 0.4),
            laboratory=(0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8, 1.1),
            full=(6.5, 9, 13, 16, 19, 22, 31, 44),
        )
    )


def figure_3_cells(plan: ExperimentPlan) -> dict[int, list[LarsCell]]:
    """Return the normalised network with LARS at the two largest batches, by batch."""
    wanted = batches(plan, WITH_LARS)[-2:]
    return {
        batch: [LarsCell(network=NORMED, optimizer=WITH_LARS, batch=batch, rate=rate) for rate in figure_3_rates(plan)]
        for batch in wanted
    }


def jobs_of_figure_3(plan: ExperimentPlan) -> list[Job]:
    return cell_jobs(plan, [cell for cells in figure_3_cells(plan).values() for cell in cells])


def plateau(by_rate: Mapping[float, float], within_points: float) -> float:
    """Return the highest over the lowest rate of the plateau about the best rate.

    The plateau ends on each side before the first rate that loses more than `within_points`.

    >>> plateau({0.1: 80.0, 0.2: 85.2, 0.4: 85.5, 0.8: 84.9, 1.6: 10.0}, 1.0)
    4.0
    """
    rates_in_order = sorted(by_rate)
    best = max(rates_in_order, key=lambda rate: by_rate[rate])
    if by_rate[best] <= CHANCE:  # nothing was learned at any rate: that is no plateau
        return 1.0
    good = [rate for rate in rates_in_order if by_rate[best] - by_rate[rate] <= within_points]
    low = high = rates_in_order.index(best)
    while low > 0 and rates_in_order[low - 1] in good:
        low -= 1
    while high + 1 < len(rates_in_order) and rates_in_order[high + 1] in good:
        high += 1
    return rates_in_order[high] / rates_in_order[low]


def conclude_figure_3(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    found = {
        batch: {cell.rate: accuracy_of(plan, outcomes, cell) for cell in cells}
        for batch, cells in figure_3_cells(plan).items()
    }
    low, high = LARS_FIGURE_3_RATES
    wide = high / low
    first = next(iter(found))
    lines = [
        Series(name=f"batch {batch_text(batch)}", points=[(rate, value / 100) for rate, value in each.items()])
        for batch, each in found.items()
    ]
    said = f"{LARS_FIGURE_3_ACCURACY} for all of {low} to {high}"
    return Findings(
        tables=(
            PlainTable(
                title="Test accuracy by rate, LARS, batch normalisation",
                headings=(
                    f"rate,\nours (LARS, {batch_text(first)} and more)",
                    *(f"ours %:\nbatch {batch_text(batch)}" for batch in found),
                    f"paper %: batch\n{batch_text(LARS_FIGURE_3_BATCH)}",
                ),
                rows=[
                    (f"{rate:g}", *(f"{each[rate]:.1f}" for each in found.values()), said if index == 0 else "")
                    for index, rate in enumerate(figure_3_rates(plan))
                ],
                caption="Of the paper's curves only what its text says is readable.",
            ),
        ),
        claims=(
            within(
                f"rates {figure(wide)} times apart are about as good: within a point, batch {batch_text(first)}",
                plateau(found[first], 1.0),
                least=wide,
                kind="shape",
            ),
            ahead(
                "the larger batch is behind at its best rate",
                {line.name: max(each.values()) for line, each in zip(lines, found.values(), strict=True)},
                best="high",
                write=points,
            ),
        ),
        charts=(
            line_chart(
                "rate",
                "Accuracy over the rate",
                "LARS, batch normalisation.",
                lines,
                x="rate",
                y="test accuracy",
                log_x=True,
                percent=True,
            ),
        ),
        series=tuple(line.name for line in lines),
        remarks=remarks_for(
            plan,
            TRUST,
            "Rates are the root of two apart, and each is one run.",
            full=(
                FULL_AUGMENTATION,
                "Of the paper's rates only the interval from 13 to 22 is readable; ours surround it.",
            ),
        ),
        numbers={str(batch): {f"{rate:g}": value for rate, value in each.items()} for batch, each in found.items()},
    )
