"""Is the exact cut worth it: the slowest stage of three cuts of the same layers, predicted and measured.

    equal counts   as many layers in every stage, which is what people do by hand
    torchgpipe     the block partition by measured time, as its authors state it
    ours           the exact cut

ResNet-50 and GoogLeNet for images of 32 x 32, micro-batches of eight. Layers are measured once, with one thread; by
that profile each method cuts, and by it the slowest stage of each cut is predicted: forward and backward of one
micro-batch, without links. Then the pieces are made and run (`experiments.core.cut_models`).

With two stages, real steps are taken too: two processes of one thread each, 1f1b, the cuts in turns. A step has one
micro-batch's time to fill and to drain besides, so its ratios are a little smaller than those of the slowest stages.

Bars are for both, predicted and measured. Torchgpipe's cut may be measured a little quicker than ours, by no more than
times are spread: by prediction it cannot be, and such a measurement is reported, not judged.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from experiments.core.claims import percent, within
from experiments.core.cut_models import (
    BLOCKS,
    EQUAL,
    OURS,
    Cut,
    Measured,
    Subject,
    measured,
    prepared,
    subjects_of,
    three_cuts,
)
from experiments.core.ranks import Lane, pipeline_steps
from experiments.core.story import FIRST_SEED, Claim, Numbers, Size, Step, Telling, experiment
from experiments.core.turns import take_turns
from paceline.pipeline.timing import Timeline
from paceline.reports.table import PlainTable

LEAST = {EQUAL: 1.10, BLOCKS: 1.0}  # times as long as ours
LABORATORY = (Subject(model="resnet50", microbatch=8), Subject(model="googlenet", microbatch=8))
TOY = (Subject(model="lenet", microbatch=2, side=16),)
ROUNDING = 1e-9  # of sums that are taken in another order
MOST_NOISE = 0.03  # more than that is not excused, however disturbed the machine is
RUN_STAGES = 2  # as many as there are cores


@experiment(
    "pipeline-balance",
    question="the slowest stage of our cut against equal counts and torchgpipe's",
    minutes=7,
    timed=True,
)
def pipeline_balance(size: Size, *, only: tuple[str, ...] = (), microbatch: int = 0, repeat: int = 0) -> Telling:
    """Tell it of all networks or `only` some, with so many samples a micro-batch and turns; 0 is what the size has."""
    subjects = subjects_of(size.pick(TOY, LABORATORY), only, microbatch, size.seeds[0] - FIRST_SEED)
    several, repeats, microbatches = size.pick((2,), (2, 4)), size.pick(3, 9), size.pick(2, 4)
    piece_turns, step_turns = repeat or size.pick(1, 5), repeat or size.pick(1, 3)
    total = len(subjects) * (1 + 3 * (len(several) * piece_turns + 1 + step_turns))
    pieces, steps = list[dict[str, Any]](), list[dict[str, Any]]()
    for subject in subjects:
        yield Step(f"{subject.model}: layers", total)
        found = measured(subject, repeats=repeats)
        for stages in several:
            where = three_cuts(found, stages, microbatches)
            cuts = [prepared(found, method, places) for method, places in where.items()]
            label = f"{subject.model} in {stages}: "
            yield from take_turns({cut.method: cut.run for cut in cuts}, piece_turns, label=label, total=total)
            ours = next(cut for cut in cuts if cut.method == OURS)
            pieces += [pieces_row(found, stages, cut, ours) for cut in cuts]

        where = three_cuts(found, RUN_STAGES, microbatches)
        plans = {
            method.replace(" ", "-"): found.plan(cuts, stages=RUN_STAGES, microbatches=microbatches)
            for method, cuts in where.items()
        }
        lanes = [Lane(plan=name, microbatches=microbatches) for name in plans]
        taken = yield from pipeline_steps(subject, plans, lanes, turns=step_turns, total=total)
        predicted = [plan.timeline.step_seconds for plan in plans.values()]
        steps += steps_rows(subject.model, dict(zip(where, zip(taken, predicted, strict=True), strict=True)))

    ratios = ("pred.\nratio", "ratio", "medians")
    yield PlainTable(
        title="The slowest stage of three cuts, ms for a micro-batch",
        headings=(
            "network, k: cut",
            "pre-\ndicted",
            "meas-\nured",
            "off",
            "pred.\nratio",
            "ratio",
            "medians",
            "spread",
        ),
        rows=[pieces_cells(row) for row in pieces],
        caption=f"Each piece by itself, one thread, best of {piece_turns} turn(s). off: predicted against measured. "
        "Ratios: against ours, of the best times and of the medians. spread: the largest distance of a piece's median "
        "from its best.",
    )
    for row in pieces:
        yield from claims_of(row)
    yield PlainTable(
        title=f"A step with {RUN_STAGES} processes, ms",
        headings=("network: cut", "pre-\ndicted", "meas-\nured", "off", "idle", *ratios),
        rows=[steps_cells(row) for row in steps],
        caption=f"1f1b, {microbatches} micro-batches, one thread each, best of {step_turns} turn(s). Predicted: "
        "the timeline, with layers as they were measured with one process alone. For information, no bar.",
    )
    yield Numbers({"subjects": [dataclasses.asdict(each) for each in subjects], "pieces": pieces, "steps": steps})


def pieces_row(found: Measured, stages: int, cut: Cut, ours: Cut) -> dict[str, Any]:
    """Return what a cut's pieces take by themselves, and against those of our cut."""
    return {
        "model": found.subject.model,
        "stages": stages,
        "method": cut.method,
        "cuts": list(cut.cuts),
        "layers": len(found.profile.layers),
        "predicted_seconds": cut.predicted_seconds,
        "measured_seconds": cut.best,
        "median_seconds": cut.median,
        "off": cut.predicted_seconds / cut.best - 1,
        "predicted_ratio": cut.predicted_seconds / ours.predicted_seconds,
        "measured_ratio": cut.best / ours.best,
        "median_ratio": cut.median / ours.median,
        "spread": max(piece.median / piece.best - 1 for each in (cut, ours) for piece in each.pieces),
        "pieces": [
            {
                "predicted": piece.predicted_seconds,
                "measured": piece.seconds,
                "layers": piece.piece.end - piece.piece.begin,
            }
            for piece in cut.pieces
        ],
    }


def claims_of(row: dict[str, Any]) -> list[Claim]:
    """Return the bars of a cut against ours, predicted and measured.

    >>> row = {"method": "torchgpipe", "model": "lenet", "stages": 2, "predicted_ratio": 1.0, "spread": 0.02}
    >>> [[claim.judged and claim.holds for claim in claims_of({**row, "measured_ratio": ratio})]
    ...     for ratio in (1.01, 0.99, 0.97)]
    [[True, True], [True, False], [True, False]]
    """
    method = row["method"]
    if method == OURS:
        return []
    least, ratio = LEAST[method], row["measured_ratio"]
    noise = min(row["spread"], MOST_NOISE) if method == BLOCKS else 0.0
    where = f"{method} over ours, {row['model']}, {row['stages']} stages"
    return [
        within(f"predicted: {where}", row["predicted_ratio"] + ROUNDING, least=least, kind="bar"),
        within(f"measured: {where}", ratio, least=least, kind="bar", judged=not least - noise <= ratio < least),
    ]


def pieces_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['model']}, {row['stages']}: {row['method']}",
        f"{1000 * row['predicted_seconds']:.1f}",
        f"{1000 * row['measured_seconds']:.1f}",
        f"{100 * row['off']:+.1f} %",
        *(f"{row[name]:.3f}" for name in ("predicted_ratio", "measured_ratio", "median_ratio")),
        percent(row["spread"]),
    )


def steps_rows(model: str, taken: dict[str, tuple[Sequence[Timeline], float]]) -> list[dict[str, Any]]:
    """Return what a step takes with each cut: the steps that were taken, and the predicted seconds."""
    seconds = {method: [step.step_seconds for step in steps] for method, (steps, _) in taken.items()}
    return [
        {
            "model": model,
            "method": method,
            "predicted_seconds": predicted,
            "measured_seconds": min(seconds[method]),
            "every_seconds": seconds[method],
            "idle": min(steps, key=lambda step: step.step_seconds).idle,
            "off": predicted / min(seconds[method]) - 1,
            "predicted_ratio": predicted / taken[OURS][1],
            "measured_ratio": min(seconds[method]) / min(seconds[OURS]),
            "median_ratio": statistics.median(seconds[method]) / statistics.median(seconds[OURS]),
        }
        for method, (steps, predicted) in taken.items()
    ]


def steps_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['model']}: {row['method']}",
        f"{1000 * row['predicted_seconds']:.0f}",
        f"{1000 * row['measured_seconds']:.0f}",
        f"{100 * row['off']:+.1f} %",
        percent(row["idle"]),
        *(f"{row[name]:.3f}" for name in ("predicted_ratio", "measured_ratio", "median_ratio")),
    )
