"""lars-table-4 and lars-figure-4: LARS with a residual network as the batch grows.

Table 4 compares minimal with extended augmentation: from the smallest to the largest batch little is lost with either,
and extended augmentation is ahead at the smallest batch, which it brings more than the largest. Figure 4 has the curves
of the cells with minimal augmentation; the paper's caption calls it none.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.core.claims import ahead, falling, within
from experiments.core.story import NAN, Numbers, Size, Telling, experiment
from experiments.papers.lars.cells import (
    BEHIND_BASELINE,
    RESIDUAL,
    Cell,
    accuracies,
    cell_jobs,
    curve_of,
    make_cell,
    usual_epochs,
)
from experiments.papers.lars.run import WITH_LARS
from experiments.papers.lars.shown import IN_PLACE_OF_RESNET, TRUST, batch_chart, batch_text, points, remarks_for
from experiments.papers.published import LARS_TABLE_4
from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable

AUGMENTED = "Minimal augmentation crops and flips images; extended augmentation also varies scale, shape and colours."
MOST_LOST = {"minimal": 1.5, "extended": 3.5}  # table 4 loses 1.3 and 3.3 points


def cells_with(size: Size, augment: str) -> dict[int, Cell]:
    """Return the cells of table 4 with an augmentation, by batch."""
    rows = size.pick(
        ((32, 0.05), (128, 0.4)),
        ((128, 0.0125), (2048, 0.1), (8192, 0.4)),
        [row[:2] for row in LARS_TABLE_4],
    )
    return {batch: make_cell(size, RESIDUAL, WITH_LARS, batch, rate, augment=augment) for batch, rate in rows}


def paper_rows_beside(size: Size, cells: Sequence[object]) -> list[tuple[float, float, float]]:
    """Return the paper's batch and its two accuracies that stand for each of our batches."""
    places = range(5) if size.name == "full" else (0, 2, 4) if len(cells) == 3 else (0, 4)
    return [(row[0], row[3], row[4]) for row in (LARS_TABLE_4[place] for place in places)]


@experiment(
    "lars-table-4",
    source="LARS, table 4",
    question="minimal and extended augmentation",
    minutes=1.8,
    full_hours=760,
    data=("fashion-mnist",),
)
def table_4(size: Size) -> Telling:
    cells = {augment: cells_with(size, augment) for augment in MOST_LOST}
    runs = yield cell_jobs(size, (cell for by_batch in cells.values() for cell in by_batch.values()))
    every = accuracies(runs)
    found = {augment: {batch: every[cell] for batch, cell in each.items()} for augment, each in cells.items()}
    minimal, extended = found.values()
    small, *_, large = minimal
    for augment, most in MOST_LOST.items():
        text = f"from the smallest to the largest batch at most {most} points are lost, {augment} augmentation"
        yield within(text, found[augment][small] - found[augment][large], most=most, kind="shape", write=points)
    yield ahead(
        f"extended augmentation ahead of minimal at the smallest batch, {batch_text(small)}",
        {"extended": extended[small], "minimal": minimal[small]},
        best="high",
        write=points,
    )
    yield ahead(
        "extended augmentation brings the smallest batch more than the largest",
        {f"batch {batch_text(batch)}": extended[batch] - minimal[batch] for batch in (small, large)},
        best="high",
        write=points,
    )
    yield PlainTable(
        title="LARS by batch and augmentation: test accuracy",
        headings=(
            "batch,\npaper",
            "paper %:\nminimal",
            "paper %:\nextended",
            "batch,\nours",
            "ours %:\nminimal",
            "ours %:\nextended",
        ),
        rows=[
            (batch_text(paper), f"{one:g}", f"{other:g}", batch_text(batch),
             f"{minimal[batch]:.1f}", f"{extended[batch]:.1f}")
            for (paper, one, other), batch in zip(paper_rows_beside(size, list(minimal)), minimal, strict=True)
        ],
    )  # fmt: skip
    yield batch_chart("batch", "LARS over the batch, by augmentation", found)
    yield from remarks_for(
        size,
        TRUST,
        "The network is small, and may not fit images that vary much.",
        "Rates are those that the small CNN did best with, without augmentation, on another seed.",
        AUGMENTED,
        smaller=IN_PLACE_OF_RESNET,
        full=(AUGMENTED,),
    )
    yield Numbers({f"{batch} {augment}": found[augment][batch] for batch in minimal for augment in found})


@experiment(
    "lars-figure-4",
    source="LARS, figure 4",
    question="accuracy over the epochs as the batch grows",
    minutes=0.9,
    full_hours=380,
    data=("fashion-mnist",),
)
def figure_4(size: Size) -> Telling:
    cells = list(cells_with(size, "minimal").values())
    runs = yield cell_jobs(size, cells)
    ends = [accuracies(runs)[cell] for cell in cells]
    names = [f"batch {batch_text(cell.batch)}" for cell in cells]
    rows, lines = [], []
    for (paper_batch, paper_end, _), cell, end, name in zip(
        paper_rows_beside(size, cells), cells, ends, names, strict=True
    ):
        curve = curve_of(runs, cell)
        early = next((point["accuracy"] for point in curve if point["epoch"] >= usual_epochs(size) / 4), NAN)
        rows.append((batch_text(paper_batch), f"{paper_end:g}", batch_text(cell.batch), points(early), f"{end:.1f}"))
        lines.append(Series(name=name, points=[(point["epoch"], point["accuracy"] / 100) for point in curve]))
    yield within(
        f"the largest batch ends at most {BEHIND_BASELINE} points behind the smallest",
        ends[0] - ends[-1],
        most=BEHIND_BASELINE,
        kind="shape",
        write=points,
    )
    yield falling("the larger the batch, the lower it ends", ends, slack=0.3, write=points)
    yield PlainTable(
        title="LARS, minimal augmentation: accuracy over the epochs",
        headings=("batch,\npaper", "paper %:\nend", "batch,\nours", "ours %:\na quarter through", "ours %:\nend"),
        rows=rows,
        caption="Ends are those of table 4; the paper's curves are not readable.",
    )
    caption = "LARS, minimal augmentation."
    yield line_chart("accuracy", "Test accuracy", caption, lines, x="epoch", y="accuracy", percent=True)
    yield from remarks_for(size, TRUST, smaller=IN_PLACE_OF_RESNET, full=())
    yield Numbers(dict(zip(names, ends, strict=True)))
