"""lars-figure-3: the accuracy of LARS over the rate at the two largest batches: many rates are about as good."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.core.claims import ahead, figure, within
from experiments.core.story import Numbers, Size, Telling, experiment
from experiments.papers.lars.cells import CHANCE, NORMED, accuracies, batches, cell_jobs, make_cell
from experiments.papers.lars.run import WITH_LARS
from experiments.papers.lars.shown import FULL_AUGMENTATION, TRUST, batch_text, points, remarks_for
from experiments.papers.published import LARS_FIGURE_3_ACCURACY, LARS_FIGURE_3_BATCH, LARS_FIGURE_3_RATES
from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable

RATES = (0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8, 1.1)  # the root of two apart; every other one is a rate of table 3
FULL_RATES = (6.5, 9, 13, 16, 19, 22, 31, 44)


@experiment(
    "lars-figure-3",
    source="LARS, figure 3",
    question="accuracy over the rate",
    minutes=2.7,
    full_hours=140,
    data=("fashion-mnist",),
)
def figure_3(size: Size) -> Telling:
    rates = size.pick((0.1, 0.2, 0.4), RATES, FULL_RATES)
    cells = {
        batch: {rate: make_cell(size, NORMED, WITH_LARS, batch, rate) for rate in rates}
        for batch in batches(size, WITH_LARS)[-2:]
    }
    runs = yield cell_jobs(size, (cell for each in cells.values() for cell in each.values()))
    every = accuracies(runs)
    found = {batch: {rate: every[cell] for rate, cell in each.items()} for batch, each in cells.items()}
    low, high = LARS_FIGURE_3_RATES
    first = min(found)
    yield within(
        f"rates {figure(high / low)} times apart are about as good: within a point, batch {batch_text(first)}",
        plateau(found[first], 1.0),
        least=high / low,
        kind="shape",
    )
    yield ahead(
        "the larger batch is behind at its best rate",
        {f"batch {batch_text(batch)}": max(each.values()) for batch, each in found.items()},
        best="high",
        write=points,
    )
    said = f"{LARS_FIGURE_3_ACCURACY} for all of {low} to {high}"
    yield PlainTable(
        title="Test accuracy by rate, LARS, batch normalisation",
        headings=(
            f"rate,\nours (LARS, {batch_text(first)} and more)",
            *(f"ours %:\nbatch {batch_text(batch)}" for batch in found),
            f"paper %: batch\n{batch_text(LARS_FIGURE_3_BATCH)}",
        ),
        rows=[
            (f"{rate:g}", *(f"{each[rate]:.1f}" for each in found.values()), said if rate == rates[0] else "")
            for rate in rates
        ],
        caption="Of the paper's curves only what its text says is readable.",
    )
    yield line_chart(
        "rate",
        "Accuracy over the rate",
        "LARS, batch normalisation.",
        [
            Series(name=f"batch {batch_text(batch)}", points=[(rate, value / 100) for rate, value in each.items()])
            for batch, each in found.items()
        ],
        x="rate",
        y="test accuracy",
        log_x=True,
        percent=True,
    )
    yield from remarks_for(
        size,
        TRUST,
        "Rates are the root of two apart, and each is one run.",
        full=(
            FULL_AUGMENTATION,
            "Of the paper's rates only the interval from 13 to 22 is readable; ours surround it.",
        ),
    )
    yield Numbers({batch: {f"{rate:g}": value for rate, value in each.items()} for batch, each in found.items()})


def plateau(by_rate: Mapping[float, float], within_points: float) -> float:
    """Return the highest over the lowest rate of the plateau about the best rate.

    The plateau ends on each side before the first rate that loses more than `within_points`.

    >>> plateau({0.1: 80.0, 0.2: 85.2, 0.4: 85.5, 0.8: 84.9, 1.6: 10.0}, 1.0)
    4.0
    """
    rates = sorted(by_rate)
    best = max(rates, key=lambda rate: by_rate[rate])
    if by_rate[best] <= CHANCE:  # nothing was learned at any rate: that is no plateau
        return 1.0
    good = [rate for rate in rates if by_rate[best] - by_rate[rate] <= within_points]
    low = high = rates.index(best)
    while low > 0 and rates[low - 1] in good:
        low -= 1
    while high + 1 < len(rates) and rates[high + 1] in good:
        high += 1
    return rates[high] / rates[low]
