"""lars-table-1 and lars-table-3: the accuracy as the batch grows, with SGD and with LARS.

Both tables have the same form. Every batch has one or more rates, and each rate is one run. The rate that is best on
images held out is marked, and most claims are about the accuracies at these rates:

    table 1    SGD's accuracy falls with the batch; normalisation bears the highest rate, likes more rates, loses less
    table 3    LARS at 8K is about as good as SGD at the smallest batch, and ahead of SGD at 8K; beyond 8K it loses too
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from experiments.core.claims import ahead, falling, within
from experiments.core.story import Numbers, Runs, Size, Telling, experiment
from experiments.papers.lars.cells import (
    BEHIND_BASELINE,
    CHANCE,
    NORMED,
    PLAIN,
    SHOWN,
    Cell,
    accuracies,
    batches,
    best_of,
    cell_jobs,
    cells_at,
    paper_best,
)
from experiments.papers.lars.run import WITH_LARS, WITH_SGD
from experiments.papers.lars.shown import (
    CHOSEN,
    FULL_AUGMENTATION,
    FULL_START,
    TRUST,
    batch_chart,
    batch_table,
    batch_text,
    points,
    remarks_for,
)
from paceline.reports.table import PlainTable

NETWORKS = (PLAIN, NORMED)


@experiment(
    "lars-table-1",
    source="LARS, table 1",
    question="SGD as the batch grows, with and without normalisation",
    minutes=3.9,
    full_hours=190,
    data=("fashion-mnist",),
)
def table_1(size: Size) -> Telling:
    small, *_, large = batches(size, WITH_SGD)
    runs = yield cell_jobs(size, cells_of(size, WITH_SGD, batches(size, WITH_SGD)))
    every, found = accuracies(runs), chosen_accuracies(size, runs, WITH_SGD, batches(size, WITH_SGD))
    for network, by_batch in found.items():
        text = f"{SHOWN[network]}: the best accuracy falls as the batch grows"
        yield falling(text, list(by_batch.values()), slack=0.5, write=points)

    at_large = {network: cells_at(size, network, WITH_SGD, large) for network in NETWORKS}
    highest = {network: cells[-1] for network, cells in at_large.items()}
    where = f"at a batch of {batch_text(large)}"
    yield within(
        f"without normalisation SGD diverges at the highest rate, {highest[PLAIN].rate:g}, {where}",
        every[highest[PLAIN]],
        most=CHANCE,
        kind="shape",
        write=points,
    )
    yield ahead(
        f"batch normalisation bears the highest rate, {highest[NORMED].rate:g}, {where}",
        {"normalised": every[highest[NORMED]], "without": every[highest[PLAIN]]},
        best="high",
        by=5.0,
        write=points,
    )
    over_rates = {network: fmean(every[cell] for cell in cells) for network, cells in at_large.items()}
    yield ahead(
        f"batch normalisation widens the range of good rates: mean over rates, batch {batch_text(large)}",
        {"normalised": over_rates[NORMED], "without": over_rates[PLAIN]},
        best="high",
        write=points,
    )
    lost = {network: by_batch[small] - by_batch[large] for network, by_batch in found.items()}
    yield ahead(
        f"with batch normalisation less is lost from {batch_text(small)} to {batch_text(large)}",
        {"normalised": lost[NORMED], "without": lost[PLAIN]},
        best="low",
        write=points,
    )
    lines = {SHOWN[network]: by_batch for network, by_batch in found.items()}
    yield batch_table(size, runs, WITH_SGD, "SGD: test accuracy by batch and rate")
    yield batch_chart("batch", "SGD at its best rate, over the batch", lines)
    yield from remarks_for(
        size,
        CHOSEN,
        "Batch normalisation follows the two convolutions; the three linear layers after them have none.",
        "The claim on the mean over rates was added after a pilot on seed 200 had shown that normalisation does "
        "not bear the highest rate here.",
        full=(
            FULL_AUGMENTATION,
            FULL_START,
            "The paper's text has 128 epochs for AlexNet-BN; its table has 100, which are taken here.",
        ),
    )
    yield Numbers(lines)


@experiment(
    "lars-table-3",
    source="LARS, table 3",
    question="LARS as the batch grows, beside SGD",
    minutes=7.8,
    full_hours=210,
    data=("fashion-mnist",),
)
def table_3(size: Size) -> Telling:
    small, *_, large = batches(size, WITH_SGD)
    cells = [*cells_of(size, WITH_LARS, batches(size, WITH_LARS)), *cells_of(size, WITH_SGD, (small, large))]
    runs = yield cell_jobs(size, cells)
    lars = chosen_accuracies(size, runs, WITH_LARS, batches(size, WITH_LARS))
    sgd = chosen_accuracies(size, runs, WITH_SGD, (small, large))
    rows = []
    for network in NETWORKS:
        name, ours = SHOWN[network], lars[network]
        yield within(
            f"{name}: LARS at {batch_text(large)} at most {BEHIND_BASELINE} points behind SGD at {batch_text(small)}",
            sgd[network][small] - ours[large],
            most=BEHIND_BASELINE,
            kind="shape",
            write=points,
        )
        both = {"LARS": ours[large], "SGD": sgd[network][large]}
        yield ahead(f"{name}: LARS ahead of SGD at {batch_text(large)}", both, best="high", write=points)
        beyond = [value for batch, value in ours.items() if batch >= large]
        yield falling(f"{name}: beyond {batch_text(large)} LARS loses too", beyond, write=points)
        for place, batch in ((0, small), (2, large)):
            found = (f"{sgd[network][batch]:.1f}", f"{ours[batch]:.1f}")
            paper = (f"{paper_best(network, optimizer, place):g}" for optimizer in (WITH_SGD, WITH_LARS))
            rows.append((name, batch_text(batch), *found, *paper))

    lines = {f"{SHOWN[network]}, LARS": by_batch for network, by_batch in lars.items()}
    lines |= {f"{SHOWN[network]}, SGD": by_batch for network, by_batch in sgd.items()}
    yield batch_table(size, runs, WITH_LARS, "LARS: test accuracy by batch and rate")
    yield PlainTable(
        title="SGD beside it, each at its best rate",
        headings=("network", "batch,\nours", "ours:\nSGD %", "ours:\nLARS %", "paper:\nSGD %", "paper:\nLARS %"),
        rows=rows,
    )
    yield batch_chart("batch", "LARS and SGD at their best rates, over the batch", lines)
    yield from remarks_for(size, TRUST, CHOSEN, full=(FULL_AUGMENTATION, FULL_START))
    yield Numbers(lines)


def cells_of(size: Size, optimizer: str, wanted: Iterable[int]) -> list[Cell]:
    """Return the cells of both networks at these batches, at all rates."""
    return [cell for network in NETWORKS for batch in wanted for cell in cells_at(size, network, optimizer, batch)]


def chosen_accuracies(size: Size, runs: Runs, optimizer: str, wanted: Iterable[int]) -> dict[str, dict[int, float]]:
    """Return each network's accuracy by batch, at the rate that was chosen."""
    return {
        network: {batch: best_of(runs, cells_at(size, network, optimizer, batch))[1] for batch in wanted}
        for network in NETWORKS
    }
