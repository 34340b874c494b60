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

from experiments.core.claims import percent, within
from experiments.core.cut_models import ALIKE, Measured, Subject, measured
from experiments.core.ranks import Lane, pipeline_steps
from experiments.core.story import FIRST_SEED, Numbers, Size, Step, Telling, experiment
from paceline.pipeline.plan import Plan
from paceline.pipeline.schedules import SCHEDULES, find, lecture_idle, orders, why_not
from paceline.pipeline.timing import MessageCost, PieceCost, Timeline, slot_timeline, timeline
from paceline.reports.table import PlainTable

MOST_OFF = 0.15  # of the count
JUDGED = ("gpipe", "1f1b")
LABORATORY = Subject(model=ALIKE, microbatch=256)
TOY = Subject(model=ALIKE, microbatch=8, narrow=16, wide=16, depth=1)
RUN_STAGES, SIMULATED_STAGES = 2, 4


@experiment(
    "pipeline-idle",
    question="idle share of a pipeline: by formula, counted, predicted, measured",
    minutes=5,
    timed=True,
)
def pipeline_idle(size: Size, *, microbatches: tuple[int, ...] = (0,), microbatch: int = 0, repeat: int = 0) -> Telling:
    """Tell it for some numbers of micro-batches, of so many samples, in so many turns; 0 is what the size has."""
    subject = size.pick(TOY, LABORATORY).sized(microbatch, size.seeds[0] - FIRST_SEED)
    turns = repeat or size.pick(1, 5)
    # A message is measured with one micro-batch.
    numbers = sorted({1, *microbatches}) if all(microbatches) else size.pick((1, 2), (1, 2, 4, 8, 16))
    lanes = [
        Lane(plan=name, microbatches=m)
        for m in numbers
        for name in schedules_for(RUN_STAGES, m)
        if name in JUDGED or not size.toy
    ]
    total, found = 2 + len(lanes) * (1 + turns), dict[int, Measured]()
    for stages in (RUN_STAGES, SIMULATED_STAGES):
        yield Step(f"layers of {stages} stages", total)
        found[stages] = measured(dataclasses.replace(subject, stages=stages), repeats=size.pick(3, 5))
    two, four = found.values()
    most = {lane.plan: lane.microbatches for lane in lanes}  # the last of each, as numbers increase
    plans = {name: plan_of(two, name, m) for name, m in most.items()}
    taken = yield from pipeline_steps(two.subject, plans, lanes, turns=turns, total=total)

    message = message_seconds(taken[0])
    rows = [row_of(two, lane.plan, lane.microbatches, message, steps) for lane, steps in zip(lanes, taken, strict=True)]
    for m in numbers:
        rows += [row_of(four, name, m, message) for name in schedules_for(SIMULATED_STAGES, m)]
    together, stage_seconds = slower_together(lanes, taken), [cost.seconds for cost in costs_of(two, 1)]
    yield PlainTable(
        title="Idle share of a pipeline of equal stages",
        headings=("schedule", "k", "m", "formula", "count", "predicted", "measured", "points", "off"),
        rows=[cells_of(row) for row in rows],
        caption=f"k = {RUN_STAGES}: measured, the quickest of {turns} step(s) with {RUN_STAGES} processes of one "
        f"thread; k = {SIMULATED_STAGES}: simulated, no step was run.\n"
        f"A stage takes {1000 * statistics.mean(stage_seconds):.0f} ms for {subject.microbatch} samples, a message "
        f"{1000 * message:.2f} ms; with both at work a stage takes {together:.2f} times as long as alone.\n"
        "off: measured against the count. points: measured - count.\n"
        "formula: (1/2)(1 - m/(k-1+m)), half of gpipe's count.",
    )
    for row in rows:
        if row["off"] is not None and row["schedule"] in JUDGED:
            text = f"measured against the count: {row['schedule']}, {row['microbatches']} micro-batch(es)"
            yield within(text, row["off"], most=MOST_OFF, kind="bar", write=percent)
    told = {"message_seconds": message, "together": together, "stage_seconds": stage_seconds}
    yield Numbers({"subject": dataclasses.asdict(subject), **told, "rows": rows})


def schedules_for(stages: int, microbatches: int) -> list[str]:
    """Return the schedules for so many micro-batches; with one there is nothing that gpipe does not do."""
    names = SCHEDULES if microbatches > 1 else ("gpipe",)
    return [name for name in names if why_not(name, stages, microbatches) is None]


def plan_of(found: Measured, schedule: str, microbatches: int) -> Plan:
    stages, chunks = found.subject.stages, find(schedule).chunks
    cuts = found.subject.cuts(chunks)
    return found.plan(cuts, stages=stages, microbatches=microbatches, schedule=schedule, chunks=chunks)


def costs_of(found: Measured, chunks: int) -> list[PieceCost]:
    schedule = "1f1b" if chunks == 1 else "interleaved"
    return plan_of(found, schedule, 4 * found.subject.stages).costs


def row_of(
    found: Measured, schedule: str, microbatches: int, message: float, taken: Sequence[Timeline] = ()
) -> dict[str, Any]:
    """Return the idle shares of a schedule; those that are measured are None where no step was taken."""
    stages, chunks = found.subject.stages, find(schedule).chunks
    messages = [MessageCost(forward_seconds=message, gradient_seconds=message)] * (stages * chunks - 1)
    predicted = timeline(orders(schedule, stages, microbatches), costs_of(found, chunks), messages)
    counted = slot_timeline(schedule, stages, microbatches).idle
    best = min(taken, key=lambda step: step.step_seconds, default=None)
    return {
        "stages": stages,
        "schedule": schedule,
        "microbatches": microbatches,
        "lecture": lecture_idle(stages, microbatches),
        "counted": counted,
        "predicted": predicted.idle,
        "predicted_seconds": predicted.step_seconds,
        "measured": None if best is None else best.idle,
        "measured_seconds": None if best is None else best.step_seconds,
        "every_idle": [step.idle for step in taken],
        "every_seconds": [step.step_seconds for step in taken],
        "off": None if best is None else abs(best.idle - counted) / counted,
    }


def cells_of(row: dict[str, Any]) -> tuple[str, ...]:
    measured_cells = ("simulated", "-", "-")
    if row["measured"] is not None:
        points = 100 * (row["measured"] - row["counted"])
        measured_cells = (percent(row["measured"]), f"{points:+.1f}", percent(row["off"]))
    shares = (percent(row[name]) for name in ("lecture", "counted", "predicted"))
    return (row["schedule"], str(row["stages"]), str(row["microbatches"]), *shares, *measured_cells)


def message_seconds(alone: Sequence[Timeline]) -> float:
    """Return what lies between a piece's work and its neighbour's, where nothing else goes on: one micro-batch."""
    gaps = []
    for step in alone:
        spans = sorted(step.spans, key=lambda span: span.begin)
        gaps += [
            after.begin - before.end for before, after in itertools.pairwise(spans) if before.device != after.device
        ]
    return max(0.0, statistics.median(gaps))


def slower_together(lanes: Sequence[Lane], taken: Sequence[Sequence[Timeline]]) -> float:
    """Return how much longer a stage's work takes when both compute: the most micro-batches against one."""
    work = {
        lane.microbatches: min(sum(step.busy_seconds) for step in steps) / lane.microbatches
        for lane, steps in zip(lanes, taken, strict=True)
        if lane.plan == "gpipe"
    }
    return work[max(work)] / work[min(work)]
