"""lars-table-5: more epochs bring back the accuracy that a large batch has cost.

The runs of 100 epochs are runs of tables 3 and 4, and so are their rates, warm-up and augmentation. The paper does not
print the warm-up of its longer runs; at full size it has as many epochs in them as in the runs of 100.
"""

from __future__ import annotations

import math

from experiments.core.claims import falling, within
from experiments.core.story import NAN, Numbers, Size, Telling, experiment
from experiments.papers.lars.cells import (
    NORMED,
    PLAIN,
    RESIDUAL,
    SHOWN,
    Cell,
    accuracies,
    cell_jobs,
    make_cell,
    paper_rows,
)
from experiments.papers.lars.run import WITH_LARS
from experiments.papers.lars.shown import FULL_AUGMENTATION, TRUST, batch_text, points, remarks_for
from experiments.papers.published import LARS_TABLE_4, LARS_TABLE_5
from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable

COLUMN = {PLAIN: "alexnet, 16K", NORMED: "alexnet-bn, 32K", RESIDUAL: "resnet50, 16K"}
PAPER_LARGE_BATCH = {PLAIN: 16_384, NORMED: 32_768, RESIDUAL: 16_384}


def paper_runs_of_100_epochs(network: str) -> dict[int, tuple[float, float]]:
    """Return the paper's rate and accuracy by batch, the smallest first: LARS in tables 3 and 4.

    Those of ResNet-50 are with extended augmentation, which table 5 has too.

    >>> paper_runs_of_100_epochs("residual")[16_384]
    (33, 74.4)
    """
    if network == RESIDUAL:
        return {batch: (rate, extended) for batch, rate, _, _, extended in LARS_TABLE_4}
    return {batch: (rate, accuracy) for batch, rate, accuracy in paper_rows(network, WITH_LARS)}


def table_5_cells(size: Size) -> dict[str, list[Cell]]:
    """Return for each network the small batch first, then the large one with 1 to 2 times the epochs.

    >>> [(cell.batch, cell.rate) for cell in table_5_cells(Size("full"))["plain"][:2]]
    [(512, 2), (16384, 14)]
    """
    epochs = size.pick((1, 2), (32, 40, 48, 56, 64), LARS_TABLE_5["epochs"])
    cells = {}
    for network in COLUMN if size.name == "full" else (PLAIN, NORMED):  # the laboratory has no ResNet-50
        paper, paper_large = paper_runs_of_100_epochs(network), PAPER_LARGE_BATCH[network]
        paper_small = min(paper)
        (small, low), (large, high) = size.pick(
            ((32, 0.05), (128, 0.4)),
            ((128, 0.0125), (8192, 0.4)),
            ((paper_small, paper[paper_small][0]), (paper_large, paper[paper_large][0])),
        )
        cells[network] = [
            make_cell(size, network, WITH_LARS, small, low, epochs=epochs[0]),
            *(make_cell(size, network, WITH_LARS, large, high, epochs=count) for count in epochs),
        ]
    return cells


@experiment(
    "lars-table-5",
    source="LARS, table 5",
    question="more epochs at a large batch",
    minutes=1.6,
    full_hours=820,
    data=("fashion-mnist",),
)
def table_5(size: Size) -> Telling:
    cells = table_5_cells(size)
    runs = yield cell_jobs(size, (cell for each in cells.values() for cell in each))
    every = accuracies(runs)
    rows, lines, numbers = [], [], {}
    for network, (small, *longer) in cells.items():
        name, base = SHOWN[network], every[small]
        found = {cell.epochs: every[cell] for cell in longer}
        first, *_, last = found.values()
        yield falling(
            f"{name}: the accuracy of the large batch rises with the epochs",
            list(found.values()),
            rising=True,
            slack=0.5,
            write=points,
        )
        lost = base - first
        yield within(
            f"{name}: twice the epochs bring back at least half of the {lost:.1f} points that were lost",
            (last - first) / lost if lost > 0 else NAN,
            least=0.5,
            kind="shape",
            write=lambda share: "nothing was lost" if math.isnan(share) else f"{share:.0%}",
        )
        _, paper_base = next(iter(paper_runs_of_100_epochs(network).values()))
        rows.append((name, "-", f"{paper_base:g}", f"{small.epochs}, {batch_text(small.batch)}", f"{base:.1f}"))
        paper = list(zip(LARS_TABLE_5["epochs"], LARS_TABLE_5[COLUMN[network]], strict=True))
        beside = paper if len(paper) == len(found) else [paper[0], paper[-1]]  # a toy has two runs
        paper_batch, batch = COLUMN[network].split()[-1], batch_text(longer[0].batch)
        for (count, value), (paper_count, theirs) in zip(found.items(), beside, strict=True):
            shown = (f"{paper_count:g}, {paper_batch}", f"{theirs:g}", f"{count}, {batch}", f"{value:.1f}")
            rows.append((name, *shown))
        lines.append(Series(name=name, points=[(count, value / 100) for count, value in found.items()]))
        numbers[name] = {"small batch": base, **{str(count): value for count, value in found.items()}}
    yield PlainTable(
        title="LARS: accuracy by epochs; first the small batch",
        headings=("network", "epochs, batch:\npaper", "paper %", "epochs, batch:\nours", "ours %"),
        rows=rows,
        left=True,
    )
    caption = "Each point is a run of so many epochs."
    yield line_chart("epochs", "Accuracy at a large batch", caption, lines, x="epochs", y="test accuracy", percent=True)
    yield from remarks_for(
        size,
        TRUST,
        "All runs of a network at the large batch have one rate. 32 epochs stand for the paper's 100, so that "
        "there is something to bring back. ResNet-50 is left out.",
        full=(
            FULL_AUGMENTATION,
            "The paper does not print the warm-up of its longer runs; it has as many epochs here as in those of "
            "100. ResNet-50 has the extended augmentation: its accuracy in 100 epochs is the one of table 4.",
        ),
        smaller=(
            "A small CNN stands for AlexNet, 16,384 images of Fashion-MNIST at 14x14 stand for ImageNet, and a "
            "batch of 8192 stands for 16K and 32K.",
            "The warm-up is a tenth of the steps for all.",
        ),
    )
    yield Numbers(numbers)
