"""How much of a pipeline's time is idle: the lecture's formula, the count of slots, what we predict, what is measured.

Two stages that take equally long are two processes on two cores, one thread each; micro-batches have the same size
whatever their number. Four stages need four cores: theirs is simulated, and the table says so.

    formula     (1/2)(1 - m/(k-1+m)), as the lecture prints it
    count       every idle slot: (k-1)/(k-1+m) for gpipe and 1f1b; for others counted from the schedule, with F as long
                as B, and I and W half as long
    predicted   the timeline of the schedule with each stage's measured seconds, which knows that B takes longer than F,
                and messages that take as long as was measured between two stages with nothing else to do
    measured    1 - busy / (k x step) of the quickest step, of several that were taken in turns with the others

Where two processes slow each other down, slots in which both compute are longer than those in which one is idle, and
the measured share is smaller than the count; the table's last line says by how much. The bar is for the measured
figures of gpipe and 1f1b.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.options import Options
from benchmarks.output import Bar, coloured, progress_bar, save, tables, titled
from benchmarks.pipeline_ranks import Lane, Step, steps
from paceline.pipeline.plan import Plan
from paceline.pipeline.schedules import SCHEDULES, find, lecture_idle, orders, why_not
from paceline.pipeline.timing import MessageCost, PieceCost, Span, slot_timeline, timeline
from paceline.reproduce.lecture.cut_models import ALIKE, Measured, Subject, measured

NAME = "pipeline-idle"
OFF = Bar(sign="<=", limit=0.15, style=".1%")
BARRED = ("gpipe", "1f1b")
MICROBATCHES = (1, 2, 4, 8, 16)
QUICK_MICROBATCHES = (1, 2)
TURNS, REPEATS = 5, 5
FULL = Subject(model=ALIKE, microbatch=256)
QUICK = Subject(model=ALIKE, microbatch=8, narrow=16, wide=16, depth=1)
RUN_STAGES, SIMULATED_STAGES = 2, 4


def run(options: Options) -> None:
    """`python -m benchmarks pipeline-idle`."""
    subject = (QUICK if options.quick else FULL).sized(options.microbatch, options.seed)
    numbers = _numbers(options.microbatches) or (QUICK_MICROBATCHES if options.quick else MICROBATCHES)
    turns = options.repeat or (1 if options.quick else TURNS)
    lanes = [
        Lane(plan=name, microbatches=m)
        for m in numbers
        for name in _possible(RUN_STAGES, m)
        if name in BARRED or not options.quick
    ]
    with progress_bar() as progress:
        bar = progress.add_task("idle: layers", total=2 + len(lanes) * (1 + turns))
        repeats = 3 if options.quick else REPEATS
        two = measured(dataclasses.replace(subject, stages=RUN_STAGES), repeats=repeats)
        progress.advance(bar)
        four = measured(dataclasses.replace(subject, stages=SIMULATED_STAGES), repeats=repeats)
        progress.update(bar, advance=1, description="idle: steps")
        most = {lane.plan: lane.microbatches for lane in lanes}  # the last of each, as numbers increase
        plans = {name: _plan(two, name, m) for name, m in most.items()}
        taken = steps(two.subject, plans, lanes, turns=turns, on_step=lambda: progress.advance(bar))
    message = _message_seconds(taken[0])
    rows = [_row(two, lane.plan, lane.microbatches, message, found) for lane, found in zip(lanes, taken, strict=True)]
    for m in numbers:
        rows += [_row(four, name, m, message) for name in _possible(SIMULATED_STAGES, m)]
    told = {
        "message_seconds": message,
        "together": _together(lanes, taken),
        "stage_seconds": [cost.seconds for cost in _costs(two, 1)],
    }
    _tell(rows, told, subject, turns, quick=options.quick)
    save(options, NAME, {"subject": dataclasses.asdict(subject), **told, "rows": rows})


def _numbers(text: str) -> tuple[int, ...]:
    """Numbers of micro-batches; one is always among them, for a message is measured there."""
    given = {int(number) for number in text.split(",") if number.strip()}
    return tuple(sorted(given | {1})) if given else ()


def _possible(stages: int, microbatches: int) -> list[str]:
    """Schedules for so many micro-batches; with one there is nothing that gpipe does not do."""
    names = SCHEDULES if microbatches > 1 else ("gpipe",)
    return [name for name in names if why_not(name, stages, microbatches) is None]


def _plan(found: Measured, schedule: str, microbatches: int) -> Plan:
    stages, chunks = found.subject.stages, find(schedule).chunks
    cuts = found.subject.cuts(chunks)
    return found.plan(cuts, stages=stages, microbatches=microbatches, schedule=schedule, chunks=chunks)


def _costs(found: Measured, chunks: int) -> list[PieceCost]:
    schedule = "1f1b" if chunks == 1 else "interleaved"
    return _plan(found, schedule, 4 * found.subject.stages).costs


def _row(
    found: Measured, schedule: str, microbatches: int, message: float, taken: Sequence[Step] = ()
) -> dict[str, Any]:
    stages, chunks = found.subject.stages, find(schedule).chunks
    messages = [MessageCost(forward_seconds=message, gradient_seconds=message)] * (stages * chunks - 1)
    predicted = timeline(orders(schedule, stages, microbatches), _costs(found, chunks), messages)
    counted = slot_timeline(schedule, stages, microbatches).idle
    best = min(taken, key=lambda step: step.seconds, default=None)
    off = None if best is None else abs(best.idle - counted) / counted
    return {
        "stages": stages,
        "schedule": schedule,
        "microbatches": microbatches,
        "lecture": lecture_idle(stages, microbatches),
        "counted": counted,
        "predicted": predicted.idle,
        "predicted_seconds": predicted.step_seconds,
        "measured": None if best is None else best.idle,
        "measured_seconds": None if best is None else best.seconds,
        "every_idle": [step.idle for step in taken],
        "every_seconds": [step.seconds for step in taken],
        "off": off,
        "verdict": "" if off is None or schedule not in BARRED else OFF.verdict(off),
    }


def _message_seconds(alone: Sequence[Step]) -> float:
    """From the end of a piece's work to the begin of its neighbour's, where nothing else goes on: one micro-batch."""
    gaps = [after.begin - before.end for step in alone for before, after in _handed_on(step)]
    return max(0.0, statistics.median(gaps))


def _handed_on(step: Step) -> list[tuple[Span, Span]]:
    return [(one, other) for one, other in itertools.pairwise(step.spans) if one.device != other.device]


def _together(lanes: Sequence[Lane], taken: Sequence[Sequence[Step]]) -> float:
    """How much longer a stage's work takes when both compute: the most micro-batches against one."""
    work = {
        lane.microbatches: min(step.busy_seconds for step in found) / lane.microbatches
        for lane, found in zip(lanes, taken, strict=True)
        if lane.plan == "gpipe"
    }
    return work[max(work)] / work[min(work)]


# -- tables ----------------------------------------------------------------------------------------------------------


def _tell(rows: Sequence[dict[str, Any]], told: dict[str, Any], subject: Subject, turns: int, *, quick: bool) -> None:
    stage = 1000 * statistics.mean(told["stage_seconds"])
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled("Idle share of a pipeline of equal stages", quick=quick),
        caption=f"k = {RUN_STAGES}: measured, the quickest of {turns} step(s) with {RUN_STAGES} processes of one "
        f"thread; k = {SIMULATED_STAGES}: simulated, no step was run.\nA stage takes {stage:.0f} ms for "
        f"{subject.microbatch} samples, a message {1000 * told['message_seconds']:.2f} ms; with both at work a stage "
        f"takes {told['together']:.2f} times as long as alone.\noff: measured against the count; bar {OFF}, for "
        "gpipe and 1f1b. points: measured - count.\nformula: (1/2)(1 - m/(k-1+m)), half of gpipe's count.",
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    table.add_column("k")
    table.add_column("schedule")
    for name in ("m", "formula", "count", "predicted", "measured", "points", "off"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in rows:
        told_off = ["simulated", "-", "-", "-"]
        if row["measured"] is not None:
            points = 100 * (row["measured"] - row["counted"])
            told_off = [f"{row['measured']:.1%}", f"{points:+.1f}", OFF.show(row["off"]), coloured(row["verdict"])]
        shares = [f"{row[name]:.1%}" for name in ("lecture", "counted", "predicted")]
        table.add_row(str(row["stages"]), row["schedule"], str(row["microbatches"]), *shares, *told_off)
    tables().print(table)
