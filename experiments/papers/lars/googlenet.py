"""lars-table-6: GoogLeNet without normalisation needs more epochs and a longer warm-up as the batch grows.

The paper prints one run for each batch. We also try few epochs and a short warm-up at the large batch, each alone and
both together, because the claim is that it needs both.
"""

from __future__ import annotations

from functools import partial

from experiments.core.claims import ahead, within
from experiments.core.story import Numbers, Size, Telling, experiment
from experiments.papers.lars.cells import INCEPTION, Cell, accuracies, cell_jobs, make_cell
from experiments.papers.lars.run import WITH_LARS, WITH_SGD
from experiments.papers.lars.shown import FULL_AUGMENTATION, TRUST, batch_text, points, remarks_for
from experiments.papers.published import LARS_TABLE_6
from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable

PRINTED = {"small SGD": LARS_TABLE_6[0], "small LARS": LARS_TABLE_6[1], "many, long": LARS_TABLE_6[-1]}
PRINTED_BETWEEN = {f"batch {batch_text(row[0])}": row for row in LARS_TABLE_6[2:-1]}  # only the full size has them


def warmup_shares(size: Size) -> tuple[float, float]:
    """Return the short and the long warm-up as shares of a run: the paper's at its smallest and its largest batch.

    >>> [f"{share:.3f}" for share in warmup_shares(Size("full"))]
    ['0.050', '0.314']
    """
    if size.name != "full":
        return 0.05, 0.3
    short, long = ((row[3] or 0) / row[2] for row in (PRINTED["small LARS"], PRINTED["many, long"]))
    return short, long


def table_6_cells(size: Size) -> dict[str, Cell]:
    """Return SGD and LARS at the small batch, and LARS at the large one by epochs and warm-up.

    The full size also has the paper's rows between the two batches, and in all rows the paper's warm-up.
    """
    full = size.name == "full"
    (small, sgd), (_, low), (large, high) = size.pick(
        ((32, 0.05), (32, 0.05), (128, 0.2)),
        ((128, 0.025), (128, 0.05), (8192, 0.2)),
        [row[:2] for row in PRINTED.values()],
    )
    few, many = size.pick((1, 2), (24, 64), (PRINTED["small LARS"][2], PRINTED["many, long"][2]))
    short, long = warmup_shares(size)
    lars = partial(make_cell, size, INCEPTION, WITH_LARS)
    between = {name: lars(batch, rate, epochs=epochs) for name, (batch, rate, epochs, *_) in PRINTED_BETWEEN.items()}
    return {
        "small SGD": make_cell(size, INCEPTION, WITH_SGD, small, sgd, epochs=few, warmup=None if full else short),
        "small LARS": lars(small, low, epochs=few, warmup=short),
        **(between if full else {}),
        "few, short": lars(large, high, epochs=few, warmup=short),
        "few, long": lars(large, high, epochs=few, warmup=long),
        "many, short": lars(large, high, epochs=many, warmup=short),
        "many, long": lars(large, high, epochs=many, warmup=long),
    }


@experiment(
    "lars-table-6",
    source="LARS, table 6",
    question="GoogLeNet without normalisation",
    minutes=5,
    full_hours=1230,
    data=("fashion-mnist",),
)
def table_6(size: Size) -> Telling:
    cells = table_6_cells(size)
    runs = yield cell_jobs(size, cells.values())
    every = accuracies(runs)
    found = {name: every[cell] for name, cell in cells.items()}
    yield ahead(
        "the large batch is better with more epochs, with a long warm-up",
        {"more": found["many, long"], "fewer": found["few, long"]},
        best="high",
        write=points,
    )
    yield ahead(
        "the large batch is better with a longer warm-up, in many epochs",
        {"longer": found["many, long"], "shorter": found["many, short"]},
        best="high",
        write=points,
    )
    yield ahead(
        "both are needed: with few epochs and a short warm-up the large batch is behind the small one",
        {"small batch": found["small LARS"], "large batch": found["few, short"]},
        best="high",
        by=1.0,
        write=points,
    )
    yield within(
        "with both, the large batch is at most 3.1 points behind the small one, as in the paper",
        found["small LARS"] - found["many, long"],
        most=3.1,
        kind="shape",
        write=points,
    )
    yield ahead(
        "LARS ahead of SGD at the small batch",
        {"LARS": found["small LARS"], "SGD": found["small SGD"]},
        best="high",
        write=points,
    )
    rows = []
    for name, cell in cells.items():
        paper = ("-", "not printed")
        if name in PRINTED or name in PRINTED_BETWEEN:
            batch, _, epochs, warmup, accuracy = (PRINTED | PRINTED_BETWEEN)[name]
            paper = (f"{batch_text(batch)}, {epochs:g}, {'-' if warmup is None else warmup}", f"{accuracy:g}")
        ours = f"{batch_text(cell.batch)}, {cell.epochs}, {round(cell.warmup * cell.epochs, 1):g}"
        rows.append((cell.optimizer, *paper, ours, f"{found[name]:.1f}"))
    other_rows = ", ".join(f"{batch_text(row[0])}: {row[4]:g} in {row[2]:g}" for row in PRINTED_BETWEEN.values())
    yield PlainTable(
        title="GoogLeNet without normalisation: test accuracy",
        headings=(
            "optimiser",
            "batch, epochs,\nwarm-up: paper",
            "paper %",
            "batch, epochs,\nwarm-up: ours",
            "ours %",
        ),
        rows=rows,
        caption="" if size.name == "full" else f"The paper's other rows, batch: accuracy in epochs: {other_rows}.",
        left=True,
    )
    yield bar_chart(
        "epochs",
        "The large batch by epochs and warm-up",
        "LARS, without normalisation.",
        [f"{cells[name].epochs} epochs" for name in ("few, short", "many, short")],
        {f"{word} warm-up": [found[f"{much}, {word}"] / 100 for much in ("few", "many")] for word in ("short", "long")},
        y="test accuracy",
        percent=True,
    )
    yield from remarks_for(
        size,
        TRUST,
        full=(
            FULL_AUGMENTATION,
            "The paper does not print the runs of 100 epochs and those with a short warm-up at its largest batch. "
            "A short warm-up has the share of the run that the paper's has at a batch of 256, a long one the "
            "share at 16K.",
        ),
        smaller=(
            "Three small inception modules without normalisation stand for GoogLeNet's nine, 16,384 images of "
            "Fashion-MNIST at 14x14 for ImageNet, and batches of 128 and 8192 for 256 and 16K. Runs have 24 or 64 "
            "epochs, no augmentation, and one rate for each batch and optimiser.",
            "The rate of the large batch, 0.2, and 64 epochs were chosen on seed 100. There, at 0.4, the longer "
            "warm-up was the worse one, so the choice of the rate favours the paper's claim.",
        ),
    )
    yield Numbers(found)
