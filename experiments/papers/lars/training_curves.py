"""lars-figure-1 and lars-figure-2: a small and a large batch over the epochs, with batch normalisation.

Figure 1 shows the gap between test and training loss with SGD at both batches: it is practically the same. Figure 2
shows the accuracy of LARS at the large batch beside that of SGD at the small one, and the layers' ratios
|w| / |gradient|, which fall after few epochs. All cells are cells of tables 1 and 3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from experiments.core.claims import figure, within
from experiments.core.story import NAN, Numbers, Size, Telling, experiment
from experiments.papers.lars.cells import (
    BEHIND_BASELINE,
    NORMED,
    batches,
    best_of,
    cell_jobs,
    cells_at,
    curve_of,
    paper_best,
    usual_epochs,
)
from experiments.papers.lars.run import WITH_LARS, WITH_SGD
from experiments.papers.lars.shown import FULL_AUGMENTATION, TRUST, batch_text, points, remarks_for
from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable

SMALL_BATCH = "The paper's caption of figure 1 has a small batch of 256, its text one of 512."
NOTHING = {"train_loss": NAN, "test_loss": NAN}


@experiment(
    "lars-figure-1",
    source="LARS, figure 1",
    question="gap between test and training loss",
    minutes=1.3,
    full_hours=43,
    data=("fashion-mnist",),
)
def figure_1(size: Size) -> Telling:
    small, *_, large = batches(size, WITH_SGD)
    rates = [cells_at(size, NORMED, WITH_SGD, batch) for batch in (small, large)]
    runs = yield cell_jobs(size, itertools.chain(*rates))
    cells = [best_of(runs, each)[0] for each in rates]
    curves = [curve_of(runs, cell) for cell in cells]
    ends = [curve[-1] if curve else NOTHING for curve in curves]
    gaps = [end["test_loss"] - end["train_loss"] for end in ends]
    at_equal = gap_at_loss(curves[0], ends[1]["train_loss"])
    text = "the gap is not larger at the large batch, within a tenth of it"
    yield within(text, gaps[1] - 1.1 * gaps[0], most=0.0, kind="shape")
    text = "the gap is practically the same where the training loss is the same: 0.03 apart at the most"
    yield within(text, abs(gaps[1] - at_equal), most=0.03, kind="shape")
    text = "the gap is practically the same at the end: that of the large batch over that of the small one"
    yield within(text, gaps[1] / gaps[0] if gaps[0] else NAN, least=0.8, most=1.2, kind="shape")

    rows, lines = [], []
    for cell, curve, end, gap, paper in zip(
        cells, curves, ends, gaps, ("not readable", "gap practically the same"), strict=True
    ):
        name = f"batch {batch_text(cell.batch)}"
        losses = (figure(end["train_loss"]), figure(end["test_loss"]))
        rows.append((f"{name}, rate {cell.rate:g}", *losses, figure(gap), paper))
        for word, key in (("training", "train_loss"), ("test", "test_loss")):
            course = [(point["epoch"], point[key]) for point in curve]
            lines.append(Series(name=f"{name}, {word}", points=course, dashed=word == "training"))
    yield PlainTable(
        title="Losses at the end, SGD, batch normalisation",
        headings=("run", "ours:\ntraining loss", "ours:\ntest loss", "ours:\ngap", "paper"),
        rows=rows,
        caption="The paper's curves are not readable.",
    )
    yield line_chart("gap", "Test and training loss", "SGD, batch normalisation.", lines, x="epoch", y="loss")
    yield from remarks_for(
        size,
        "Losses are those of the model as it is evaluated, on the first 5,000 training images and all test images. "
        "In as many epochs the small batch comes to a lower training loss here, and so to a larger gap; hence the "
        "comparison where the training losses are the same.",
        SMALL_BATCH,
        full=(FULL_AUGMENTATION, SMALL_BATCH),
    )
    yield Numbers({"gaps": gaps, "gap of the small batch at equal training loss": at_equal})


def gap_at_loss(curve: Sequence[Mapping[str, float]], loss: float) -> float:
    """Return the gap where a curve's training loss first comes down to `loss`; between its points the gap is a line.

    >>> curve = [{"train_loss": 1.0, "test_loss": 1.0}, {"train_loss": 0.5, "test_loss": 0.7}]
    >>> round(gap_at_loss(curve, 0.75), 6), gap_at_loss(curve, 0.1)
    (0.1, nan)
    """
    gaps = [(point["train_loss"], point["test_loss"] - point["train_loss"]) for point in curve]
    if gaps and gaps[0][0] <= loss:
        return gaps[0][1]
    for (above, before), (below, after) in itertools.pairwise(gaps):
        if below <= loss <= above:
            share = (above - loss) / (above - below) if above > below else 1.0
            return before + share * (after - before)
    return NAN


@experiment(
    "lars-figure-2",
    source="LARS, figure 2",
    question="LARS at a large batch, over the epochs",
    minutes=1.3,
    full_hours=17,
    data=("fashion-mnist",),
)
def figure_2(size: Size) -> Telling:
    small, *_, large = batches(size, WITH_SGD)
    rates = [cells_at(size, NORMED, WITH_SGD, small), cells_at(size, NORMED, WITH_LARS, large)]
    runs = yield cell_jobs(size, itertools.chain(*rates))
    (base, base_value), (lars, value) = (best_of(runs, each) for each in rates)
    names = [f"{cell.optimizer}, batch {batch_text(cell.batch)}" for cell in (base, lars)]
    yield within(
        f"LARS at the large batch matches the small one: at most {BEHIND_BASELINE} points behind",
        base_value - value,
        most=BEHIND_BASELINE,
        kind="shape",
        write=points,
    )
    first, curve = runs[lars][0]["first_ratios"] or {}, runs[lars][0]["curve"]
    later = next((point["ratios"] for point in curve if point["epoch"] >= usual_epochs(size) / 10), None)
    fell = [later.get(layer, math.inf) < ratio for layer, ratio in first.items()] if later is not None else []
    share = sum(fell) / len(fell) if fell else NAN
    yield within(
        "the ratios of most layers are lower after a tenth of the run",
        share,
        least=0.51,
        kind="shape",
        write=lambda share: "none" if math.isnan(share) else f"{share:.0%} of the layers",
    )
    yield PlainTable(
        title="Accuracy at the end, batch normalisation",
        headings=("run", "paper %", "ours %"),
        rows=[
            (names[0], f"{paper_best(NORMED, WITH_SGD, 0):g}", f"{base_value:.1f}"),
            (names[1], f"{paper_best(NORMED, WITH_LARS, 2):g}", f"{value:.1f}"),
        ],
    )
    yield PlainTable(
        title=f"|w| / |gradient| of the weights, {names[1]}",
        headings=("layer", "ours:\nfirst step", "ours: after a\ntenth of the run", "paper"),
        rows=[
            (layer, figure(ratio), figure((later or {}).get(layer, NAN)), "falls after few epochs")
            for layer, ratio in first.items()
        ],
        caption="The paper's curves are not readable.",
    )
    yield line_chart(
        "accuracy",
        "Test accuracy",
        "LARS beside the baseline.",
        [
            Series(name=name, points=[(point["epoch"], point["accuracy"] / 100) for point in curve_of(runs, cell)])
            for name, cell in zip(names, (base, lars), strict=True)
        ],
        x="epoch",
        y="accuracy",
        percent=True,
    )
    yield line_chart(
        "ratios",
        "Ratio of weights to gradient",
        "By the last gradient of an epoch.",
        [
            Series(
                name=f"layer {layer}",
                points=[(0.0, ratio), *((float(point["epoch"]), point["ratios"].get(layer)) for point in curve)],
            )
            for layer, ratio in first.items()
        ],
        x="epoch",
        y="ratio",
        log_y=True,
    )
    yield from remarks_for(size, TRUST)
    yield Numbers({"accuracy": dict(zip(names, (base_value, value), strict=True)), "share of layers": share})
