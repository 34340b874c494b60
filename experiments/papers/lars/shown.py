"""What the experiments on LARS show alike: accuracies, batches, a table and a chart by batch, remarks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from experiments.core.story import Runs, Size
from experiments.papers.lars.cells import (
    NORMED,
    PLAIN,
    SHOWN,
    accuracies,
    batches,
    best_of,
    cells_at,
    paper_batches,
    paper_rows,
)
from paceline.reports.chart import Chart
from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable

SMALLER = (
    "A small CNN stands for AlexNet, and 16,384 images of Fashion-MNIST at 14x14 stand for ImageNet. Runs have 64 "
    "epochs, not 100. Batches of 128, 2048, 8192 and 16384 stand for 512, 4096, 8192 and 16384 or more.",
    "The warm-up is a tenth of the steps for all; the paper's is 0 to 5 of 100 epochs.",
)
IN_PLACE_OF_RESNET = (
    "A small CNN with batch normalisation stands for ResNet-50, which two cores cannot train, and 16,384 images of "
    "Fashion-MNIST at 14x14 stand for ImageNet. Batches of 128, 2048 and 8192 stand for 256, 8K and 32K.",
    "The warm-up is a tenth of the steps for all; the paper's is 0 to 12 of 100 epochs.",
)
TRUST = (
    "LARS has trust 0.1 and leaves biases out, so its rates are a hundredth of the paper's, which has trust 0.001: a "
    "layer moves by rate times trust of its length."
)
CHOSEN = "Rates are chosen on training images held out; the paper shows the images that it chooses on."
FULL_SIZE = (
    "The paper's networks at CIFAR size are trained on 49,152 images of Fashion-MNIST, 28x28, in place of ImageNet, "
    "with the paper's batches, epochs, rates, warm-up, augmentation and trust."
)
FULL_AUGMENTATION = (
    "The paper does not print the augmentation of AlexNet and of GoogLeNet with SGD. It is minimal here, as in the "
    "files of Caffe that the paper names, which crop and mirror the images."
)
FULL_START = "The warm-up of SGD begins at a rate of 0.001 in the paper, and near zero here."


def remarks_for(
    size: Size,
    *laboratory: str,
    smaller: tuple[str, ...] = SMALLER,
    full: tuple[str, ...] = (FULL_AUGMENTATION,),
) -> tuple[str, ...]:
    """Return the remarks on what is not as in the paper: `smaller`, then `laboratory`; or those of the full size."""
    return (FULL_SIZE, *full) if size.name == "full" else (*smaller, *laboratory)


def points(value: float) -> str:
    """Write an accuracy in per cent, or a difference of two.

    >>> points(86.04), points(math.nan)
    ('86.0 %', 'none')
    """
    return "none" if math.isnan(value) else f"{value:.1f} %"


def batch_text(batch: float) -> str:
    """Write a batch size as the paper does.

    >>> batch_text(512), batch_text(8192)
    ('512', '8K')
    """
    return f"{batch:g}" if batch < 1024 or batch % 1024 else f"{batch / 1024:g}K"


def batch_table(size: Size, runs: Runs, optimizer: str, title: str) -> PlainTable:
    """Return table 1 or 3: accuracies with their rates, the paper's beside ours; the chosen rates are marked."""
    rows, found = [], accuracies(runs)
    for network in (PLAIN, NORMED):
        for place, batch in enumerate(batches(size, optimizer)):
            cells = cells_at(size, network, optimizer, batch)
            chosen, _ = best_of(runs, cells)
            ours = two_a_line(
                f"{found[cell]:.1f}{'*' if cell == chosen and len(cells) > 1 else ''} ({cell.rate:g})" for cell in cells
            )
            rows.append((SHOWN[network], *paper_columns(size, network, optimizer, place), batch_text(batch), ours))
    return PlainTable(
        title=title,
        headings=("network", "batch,\npaper", "paper: accuracy %\n(rate)", "batch,\nours", "ours: accuracy %\n(rate)"),
        rows=rows,
        caption="* the rate that is best on images held out, where there are several.",
        left=True,
    )


def paper_columns(size: Size, network: str, optimizer: str, place: int) -> tuple[str, str]:
    """Return the paper's batches that our batch number `place` stands for, and its accuracies there with their rates.

    >>> paper_columns(Size(), "plain", "LARS", 3)
    ('16K, 32K', '55 (14), 46.9 (14)')
    """
    every = paper_batches(network, optimizer)
    wanted = (every[place],) if size.name == "full" or place < 3 else every[3:]
    shown = [f"{accuracy:g} ({rate:g})" for batch, rate, accuracy in paper_rows(network, optimizer) if batch in wanted]
    return ", ".join(map(batch_text, wanted)), two_a_line(shown)


def two_a_line(figures: Iterable[str]) -> str:
    """Return figures with commas between, two in a line, so that a table of them fits a terminal.

    >>> two_a_line(["1", "2", "3"])
    '1, 2,\\n3'
    """
    found = list(figures)
    return ",\n".join(", ".join(found[place : place + 2]) for place in range(0, len(found), 2))


def batch_chart(name: str, title: str, found: Mapping[str, Mapping[int, float]]) -> Chart:
    """Return a chart of accuracies over the batch, with a line for each name."""
    lines = [
        Series(name=key, points=[(float(batch), value / 100) for batch, value in each.items()])
        for key, each in found.items()
    ]
    caption = "The epochs stay the same."
    return line_chart(name, title, caption, lines, x="batch", y="test accuracy", log_x=True, percent=True)
