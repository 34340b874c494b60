"""Is the exact cut worth it: the slowest stage of three cuts of the same layers, predicted and measured.

    equal counts   as many layers in every stage, which is what people do by hand
    torchgpipe     the block partition by measured time, as its authors state it
    ours           the exact cut

ResNet-50 and GoogLeNet for images of 32 x 32, micro-batches of eight. Layers are measured once, with one thread; by
that profile each method cuts, and by it the slowest stage of each cut is predicted: forward and backward of one
micro-batch, without links. Then the pieces are made and run (`paceline.reproduce.lecture.cut_models`).

With two stages, real steps are taken too: two processes of one thread each, 1f1b, the cuts in turns. A step has one
micro-batch's time to fill and to drain besides, so its ratios are a little smaller than those of the slowest stages.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.progress import Progress, TaskID
from rich.table import Table

from benchmarks.options import Options, chosen
from benchmarks.output import Bar, coloured, progress_bar, save, tables, titled
from benchmarks.pipeline_ranks import Lane, Step, steps
from paceline.pipeline.measuring import OnRound
from paceline.reproduce.lecture.cut_models import (
    BLOCKS,
    EQUAL,
    OURS,
    Cut,
    Measured,
    Subject,
    measured,
    prepared,
    run_in_turns,
    three_cuts,
)

NAME = "pipeline-balance"
BARS = {EQUAL: Bar(sign=">=", limit=1.10, style=".3f"), BLOCKS: Bar(sign=">=", limit=1.0, style=".3f")}
FULL: tuple[Subject, ...] = (Subject(model="resnet50", microbatch=8), Subject(model="googlenet", microbatch=8))
QUICK: tuple[Subject, ...] = (Subject(model="lenet", microbatch=2, side=16),)
ROUNDING = 1e-9  # of sums that are taken in another order
MOST_NOISE = 0.03  # more than that is not excused, however disturbed the machine is
RUN_STAGES = 2  # as many as there are cores


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured."""

    stages: tuple[int, ...] = (2, 4)
    repeats: int = 9
    turns: int = 5
    microbatches: int = 4
    step_turns: int = 3


def run(options: Options) -> None:
    """`python -m benchmarks pipeline-balance`."""
    subjects = QUICK if options.quick else FULL
    names = chosen(options.only, tuple(subject.model for subject in subjects), "network")
    subjects = tuple(each.sized(options.microbatch, options.seed) for each in subjects if each.model in names)
    effort = Effort(stages=(2,), repeats=3, turns=1, microbatches=2, step_turns=1) if options.quick else Effort()
    if options.repeat:
        effort = Effort(turns=options.repeat, step_turns=options.repeat)
    pieces: list[dict[str, Any]] = []
    real: list[dict[str, Any]] = []
    with progress_bar() as progress:
        for subject in subjects:
            bar = progress.add_task(subject.model, total=_total(effort))
            on_round = _advancing(progress, bar)
            found = measured(subject, repeats=effort.repeats, on_round=on_round)
            for stages in effort.stages:
                pieces += _pieces(found, stages, effort, progress, bar)
            real += _steps(found, effort, progress, bar)
    tables().print(_pieces_table(pieces, effort, quick=options.quick))
    tables().print(_steps_table(real, effort, quick=options.quick))
    save(options, NAME, {"subjects": [asdict(s) for s in subjects], "pieces": pieces, "steps": real})


def _advancing(progress: Progress, bar: TaskID) -> OnRound:
    return lambda done, of: progress.advance(bar)


def _total(effort: Effort) -> int:
    rounds = 2 * (effort.repeats + 1) + 1
    return rounds + len(effort.stages) * effort.turns + 3 * (1 + effort.step_turns)


# -- pieces by themselves --------------------------------------------------------------------------------------------


def _pieces(found: Measured, stages: int, effort: Effort, progress: Progress, bar: TaskID) -> list[dict[str, Any]]:
    where = three_cuts(found, stages, effort.microbatches)
    cuts = [prepared(found, method, places) for method, places in where.items()]
    run_in_turns(cuts, effort.turns, on_turn=lambda: progress.advance(bar))
    ours = next(cut for cut in cuts if cut.method == OURS)
    return [_pieces_row(found, stages, cut, ours) for cut in cuts]


def _pieces_row(found: Measured, stages: int, cut: Cut, ours: Cut) -> dict[str, Any]:
    spread = max(piece.median / piece.best - 1 for each in (cut, ours) for piece in each.pieces)
    ratio, predicted = cut.best / ours.best, cut.predicted_seconds / ours.predicted_seconds
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
        "predicted_ratio": predicted,
        "measured_ratio": ratio,
        "median_ratio": cut.median / ours.median,
        "spread": spread,
        "verdict": _verdict(cut.method, predicted, ratio, spread),
        "pieces": [
            {
                "predicted": piece.predicted_seconds,
                "measured": piece.seconds,
                "layers": piece.piece.end - piece.piece.begin,
            }
            for piece in cut.pieces
        ],
    }


def _verdict(method: str, predicted: float, ratio: float, spread: float) -> str:
    """Both figures must hold; torchgpipe's may be measured a little below 1, by no more than times are spread."""
    if method == OURS:
        return ""
    bar, noise = BARS[method], min(spread, MOST_NOISE) if method == BLOCKS else 0.0
    if bar.verdict(predicted + ROUNDING) == "MISS" or bar.verdict(ratio + noise) == "MISS":
        return "MISS"
    return "PASS" if bar.verdict(ratio) == "PASS" else "in noise"


# -- real steps ------------------------------------------------------------------------------------------------------


def _steps(found: Measured, effort: Effort, progress: Progress, bar: TaskID) -> list[dict[str, Any]]:
    m = effort.microbatches
    where = three_cuts(found, RUN_STAGES, m)
    plans = {
        method.replace(" ", "-"): found.plan(cuts, stages=RUN_STAGES, microbatches=m) for method, cuts in where.items()
    }
    lanes = [Lane(plan=name, microbatches=m) for name in plans]
    taken = steps(found.subject, plans, lanes, turns=effort.step_turns, on_step=lambda: progress.advance(bar))
    ours = list(where).index(OURS)
    predicted = [plan.timeline.step_seconds for plan in plans.values()]
    return [
        _steps_row(found, method, one, predicted[place], taken[ours], predicted[ours])
        for place, (method, one) in enumerate(zip(where, taken, strict=True))
    ]


def _steps_row(
    found: Measured, method: str, taken: Sequence[Step], predicted: float, ours: Sequence[Step], ours_predicted: float
) -> dict[str, Any]:
    seconds, our_seconds = [step.seconds for step in taken], [step.seconds for step in ours]
    return {
        "model": found.subject.model,
        "method": method,
        "predicted_seconds": predicted,
        "measured_seconds": min(seconds),
        "every_seconds": seconds,
        "idle": min(taken, key=lambda step: step.seconds).idle,
        "off": predicted / min(seconds) - 1,
        "predicted_ratio": predicted / ours_predicted,
        "measured_ratio": min(seconds) / min(our_seconds),
        "median_ratio": statistics.median(seconds) / statistics.median(our_seconds),
    }


# -- tables ----------------------------------------------------------------------------------------------------------


def _table(title: str, caption: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, caption=caption, padding=(0, 1, 0, 0), pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", min_width=min(len(name), 8))
    return table


def _pieces_table(rows: Sequence[dict[str, Any]], effort: Effort, *, quick: bool) -> Table:
    table = _table(
        titled("The slowest stage of three cuts, ms for a micro-batch", quick=quick),
        f"Each piece by itself, one thread, best of {effort.turns} turn(s). off: predicted against measured. Ratios: "
        "against ours, of the best times and of the medians.\n"
        f"bar: both, predicted and measured, equal counts {BARS[EQUAL]}, torchgpipe {BARS[BLOCKS]}. spread: the "
        "largest distance of a piece's median from its best. in noise: torchgpipe's ratio is below 1 by less than "
        f"that, and by less than {MOST_NOISE:.0%}.",
        ("model", "k", "cut"),
        ("predicted", "measured", "off", "pred. ratio", "ratio", "medians", "spread", "verdict"),
    )
    for row in rows:
        ratios = [f"{row[name]:.3f}" for name in ("predicted_ratio", "measured_ratio", "median_ratio")]
        table.add_row(
            row["model"],
            str(row["stages"]),
            row["method"],
            f"{1000 * row['predicted_seconds']:.1f}",
            f"{1000 * row['measured_seconds']:.1f}",
            f"{row['off']:+.1%}",
            *ratios,
            f"{row['spread']:.1%}",
            coloured(row["verdict"]),
        )
    return table


def _steps_table(rows: Sequence[dict[str, Any]], effort: Effort, *, quick: bool) -> Table:
    table = _table(
        titled(f"A step with {RUN_STAGES} processes, ms", quick=quick),
        f"1f1b, {effort.microbatches} micro-batches, one thread each, best of {effort.step_turns} turn(s). Predicted: "
        "the timeline, with layers as they were measured with one process alone. For information, no bar.",
        ("model", "cut"),
        ("predicted", "measured", "off", "idle", "pred. ratio", "ratio", "medians"),
    )
    for row in rows:
        table.add_row(
            row["model"],
            row["method"],
            f"{1000 * row['predicted_seconds']:.0f}",
            f"{1000 * row['measured_seconds']:.0f}",
            f"{row['off']:+.1%}",
            f"{row['idle']:.1%}",
            *(f"{row[name]:.3f}" for name in ("predicted_ratio", "measured_ratio", "median_ratio")),
        )
    return table
