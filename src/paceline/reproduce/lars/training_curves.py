"""Figures 1 and 2 compare a small and a large batch over the epochs, with batch normalisation.

Figure 1 shows the gap between test and training loss with SGD at both batches. Figure 2 shows the accuracy of LARS at
the large batch beside that of SGD at the small one, and the layers' ratios |w| / |gradient|. All cells are cells of
tables 1 and 3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import figure, within
from paceline.reproduce.experiment import ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.large_batch_training import WITH_LARS, WITH_SGD
from paceline.reproduce.lars.cells import LarsCell, cell_jobs, usual_epochs
from paceline.reproduce.lars.grid import batches, cells_at, large_batch, paper_best
from paceline.reproduce.lars.networks import NORMED
from paceline.reproduce.lars.outcomes import BEHIND_BASELINE, accuracy_of, best_of, curve_of
from paceline.reproduce.lars.wording import FULL_AUGMENTATION, TRUST, batch_text, points, remarks_for

LOSSES = ("train_loss", "test_loss")
SMALL_BATCH = "The paper's caption of figure 1 has a small batch of 256, its text one of 512."


def figure_1_cells(plan: ExperimentPlan) -> tuple[list[LarsCell], list[LarsCell]]:
    """Return the normalised network with SGD at the small and the large batch, at all rates of table 1."""
    small, large = batches(plan, WITH_SGD)[0], large_batch(plan)
    return cells_at(plan, NORMED, WITH_SGD, small), cells_at(plan, NORMED, WITH_SGD, large)


def jobs_of_figure_1(plan: ExperimentPlan) -> list[Job]:
    return cell_jobs(plan, itertools.chain(*figure_1_cells(plan)))


def gap_at_loss(curve: Sequence[Mapping[str, float]], loss: float) -> float | None:
    """Return the gap where a curve's training loss first comes down to `loss`; between its points the gap is a line.

    >>> curve = [{"train_loss": 1.0, "test_loss": 1.0}, {"train_loss": 0.5, "test_loss": 0.7}]
    >>> round(gap_at_loss(curve, 0.75), 6), gap_at_loss(curve, 0.1)
    (0.1, None)
    """
    gaps = [(point["train_loss"], point["test_loss"] - point["train_loss"]) for point in curve]
    if gaps and gaps[0][0] <= loss:
        return gaps[0][1]
    for (above, before), (below, after) in itertools.pairwise(gaps):
        if below <= loss <= above:
            share = (above - loss) / (above - below) if above > below else 1.0
            return before + share * (after - before)
    return None


def conclude_figure_1(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    cells = [best_of(plan, outcomes, each)[0] for each in figure_1_cells(plan)]
    curves = [curve_of(plan, outcomes, cell) for cell in cells]
    names = [f"batch {batch_text(cell.batch)}" for cell in cells]
    ends = [curve[-1] if curve else None for curve in curves]
    gaps = [None if end is None else end["test_loss"] - end["train_loss"] for end in ends]
    at_equal = None if ends[1] is None else gap_at_loss(curves[0], ends[1]["train_loss"])
    more = None if gaps[0] is None or gaps[1] is None else gaps[1] - 1.1 * gaps[0]
    apart = None if gaps[1] is None or at_equal is None else abs(gaps[1] - at_equal)
    rows = [
        (f"{name}, rate {cell.rate:g}", *(figure(None if end is None else end[key]) for key in LOSSES), figure(gap))
        for name, cell, end, gap in zip(names, cells, ends, gaps, strict=True)
    ]
    lines = [
        Series(
            name=f"{name}, {word}", points=[(point["epoch"], point[key]) for point in curve], dashed=key == "train_loss"
        )
        for name, curve in zip(names, curves, strict=True)
        for word, key in zip(("training", "test"), LOSSES, strict=True)
    ]
    return Findings(
        tables=(
            PlainTable(
                title="Losses at the end, SGD, batch normalisation",
                headings=("run", "ours:\ntraining loss", "ours:\ntest loss", "ours:\ngap", "paper"),
                rows=[
                    (*row, word) for row, word in zip(rows, ("not readable", "gap practically the same"), strict=True)
                ],
                caption="The paper's curves are not readable.",
            ),
        ),
        claims=(
            within(
                "the gap is not larger at the large batch, within a tenth of it",
                more,
                most=0.0,
                kind="shape",
            ),
            within(
                "the gap is practically the same where the training loss is the same: 0.03 apart at the most",
                apart,
                most=0.03,
                kind="shape",
            ),
            within(
                "the gap is practically the same at the end: that of the large batch over that of the small one",
                None if gaps[0] is None or gaps[1] is None or not gaps[0] else gaps[1] / gaps[0],
                least=0.8,
                most=1.2,
                kind="shape",
            ),
        ),
        charts=(line_chart("gap", "Test and training loss", "SGD, batch normalisation.", lines, x="epoch", y="loss"),),
        series=tuple(line.name for line in lines),
        remarks=remarks_for(
            plan,
            "Losses are those of the model as it is evaluated, on the first 5,000 training images and all test images. "
            "In as many epochs the small batch comes to a lower training loss here, and so to a larger gap; hence the "
            "comparison where the training losses are the same.",
            SMALL_BATCH,
            full=(FULL_AUGMENTATION, SMALL_BATCH),
        ),
        numbers={"gaps": gaps, "gap of the small batch at equal training loss": at_equal},
    )


def figure_2_cells(plan: ExperimentPlan) -> tuple[list[LarsCell], list[LarsCell]]:
    """Return the normalised network with SGD at the small batch, and with LARS at the large one, at all rates."""
    return figure_1_cells(plan)[0], cells_at(plan, NORMED, WITH_LARS, large_batch(plan))


def jobs_of_figure_2(plan: ExperimentPlan) -> list[Job]:
    return cell_jobs(plan, itertools.chain(*figure_2_cells(plan)))


def conclude_figure_2(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    base, lars = (best_of(plan, outcomes, each)[0] for each in figure_2_cells(plan))
    names = [f"{cell.optimizer}, batch {batch_text(cell.batch)}" for cell in (base, lars)]
    values = [accuracy_of(plan, outcomes, cell) for cell in (base, lars)]
    curves = [curve_of(plan, outcomes, cell) for cell in (base, lars)]
    first, points_of_run = outcomes[lars.job(plan.seeds[0])]["first_ratios"], outcomes[lars.job(plan.seeds[0])]["curve"]
    epochs = usual_epochs(plan)
    later = next((point for point in points_of_run if point["epoch"] >= epochs / 10), None)
    fell = [later["ratios"].get(name, math.inf) < ratio for name, ratio in first.items()] if first and later else []
    accuracy_lines = [
        Series(name=name, points=[(point["epoch"], point["accuracy"] / 100) for point in curve])
        for name, curve in zip(names, curves, strict=True)
    ]
    ratio_lines = [
        Series(
            name=f"layer {layer}",
            points=[(0.0, ratio), *((float(point["epoch"]), point["ratios"].get(layer)) for point in points_of_run)],
        )
        for layer, ratio in (first or {}).items()
    ]
    layer_rows = [
        (layer, figure(ratio), figure(later["ratios"].get(layer)) if later else "none", "falls after few epochs")
        for layer, ratio in (first or {}).items()
    ]
    return Findings(
        tables=(
            PlainTable(
                title="Accuracy at the end, batch normalisation",
                headings=("run", "paper %", "ours %"),
                rows=[
                    (names[0], f"{paper_best(NORMED, WITH_SGD, 0):g}", f"{values[0]:.1f}"),
                    (names[1], f"{paper_best(NORMED, WITH_LARS, 2):g}", f"{values[1]:.1f}"),
                ],
            ),
            PlainTable(
                title=f"|w| / |gradient| of the weights, {names[1]}",
                headings=("layer", "ours:\nfirst step", "ours: after a\ntenth of the run", "paper"),
                rows=layer_rows,
                caption="The paper's curves are not readable.",
            ),
        ),
        claims=(
            within(
                f"LARS at the large batch matches the small one: at most {BEHIND_BASELINE} points behind",
                values[0] - values[1],
                most=BEHIND_BASELINE,
                kind="shape",
                write=points,
            ),
            within(
                "the ratios of most layers are lower after a tenth of the run",
                sum(fell) / len(fell) if fell else None,
                least=0.51,
                kind="shape",
                write=lambda share: "none" if share is None else f"{share:.0%} of the layers",
            ),
        ),
        charts=(
            line_chart(
                "accuracy",
                "Test accuracy",
                "LARS beside the baseline.",
                accuracy_lines,
                x="epoch",
                y="accuracy",
                percent=True,
            ),
            line_chart(
                "ratios",
                "Ratio of weights to gradient",
                "By the last gradient of an epoch.",
                ratio_lines,
                x="epoch",
                y="ratio",
                log_y=True,
            ),
        ),
        series=(*names, *(line.name for line in ratio_lines))[: max(len(names), len(ratio_lines))],
        remarks=remarks_for(plan, TRUST),
        numbers={
            "accuracy": dict(zip(names, values, strict=True)),
            "share of layers": sum(fell) / len(fell) if fell else None,
        },
    )
