"""Does a plan that is made beside other work cut as one made on a quiet machine?

    judge      a quiet profile with many rounds: by it alone cuts are compared, by their slowest stage
    quiet      a profile on the machine as it is               ┐
    beside     the same beside two busy loops                  ├ in turns, each with a cut of its own
    old way    the same loops, but medians of the wall time    ┘

"Quiet" is the machine as it is found: if something else runs, the judge is disturbed too, and the spread says so. The
busy loops are processes of this timing with no lower priority, one for each of two cores. `beside` must come within
3 % of `quiet` in every turn; the old way is shown for comparison and has no bar.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from experiments.core.claims import within
from experiments.core.cut_models import Subject, one_thread, subjects_of
from experiments.core.story import FIRST_SEED, Numbers, Size, Step, Telling, experiment
from experiments.core.turns import take_turns
from paceline.pipeline.devices import Device
from paceline.pipeline.graph import ModelGraph
from paceline.pipeline.measuring import measure
from paceline.pipeline.placement import place, priced
from paceline.pipeline.profile import Profile
from paceline.pipeline.schedules import in_flight
from paceline.reports.table import PlainTable
from paceline.stopwatch import Stopwatch

MOST_RATIO = 1.03
LOOPS = 2
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"
QUIET, BESIDE, OLD = "quiet", "beside load", "beside load, old way"
LABORATORY = (
    Subject(model="resnet18", microbatch=8),
    Subject(model="googlenet", microbatch=4),
    Subject(model="mobilenetv2", microbatch=8),
    Subject(model="alike", microbatch=64, depth=10),
)
TOY = (Subject(model="lenet", microbatch=2, side=16),)
MICROBATCHES = 4


@experiment(
    "plan-beside-load",
    question="cuts planned beside busy loops against those of a quiet machine",
    minutes=8,
    timed=True,
)
def plan_beside_load(size: Size, *, only: tuple[str, ...] = (), microbatch: int = 0, repeat: int = 0) -> Telling:
    """Tell it of all networks or `only` some, with so many samples a micro-batch and turns; 0 is what the size has."""
    subjects = subjects_of(size.pick(TOY, LABORATORY), only, microbatch, size.seeds[0] - FIRST_SEED)
    several, turns = size.pick((2,), (2, 4)), repeat or size.pick(1, 3)
    total, rows = len(subjects) * (1 + 3 * turns), list[dict[str, Any]]()
    for subject in subjects:
        yield Step(f"{subject.model}: judge", total)
        graph = ModelGraph(subject.built(), (subject.batch(1)[0],))
        judge = profile_of(subject, graph, size.pick(3, 15))
        ways = {way: partial(profile_by, way, subject, graph, size.pick(3, 5)) for way in (QUIET, BESIDE, OLD)}
        found = yield from take_turns(ways, turns, label=f"{subject.model}: ", total=total)
        rows += [row_of(subject, judge, found, stages) for stages in several]
    yield PlainTable(
        title="The slowest stage of cuts made beside two busy loops, against cuts made without",
        headings=("network", "k", "layers", "spread", "quiet\nms", "ratio", "old\nratio", "off", "old\noff"),
        rows=[cells_of(row) for row in rows],
        caption=f"By one quiet profile; the worst of {turns} turn(s) against the median of the quiet cuts. off: all "
        "layers together against the quiet profile. old: medians of wall time. spread: how far the medians of the "
        "quiet profile are above its least times.",
    )
    for row in rows:
        text = f"the slowest stage, beside load over quiet: {row['model']}, {row['stages']} stages"
        yield within(text, row["beside_ratio"], most=MOST_RATIO, kind="bar")
    yield Numbers({"rows": rows})


@contextlib.contextmanager
def busy_loops(count: int = LOOPS) -> Iterator[None]:
    """Keep so many cores busy with processes of our own; they end with the block, or with this process."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def profile_by(way: str, subject: Subject, graph: ModelGraph, repeats: int) -> Profile:
    with contextlib.nullcontext() if way == QUIET else busy_loops():
        return profile_of(subject, graph, repeats, old_way=way == OLD)


def profile_of(subject: Subject, graph: ModelGraph, repeats: int, *, old_way: bool = False) -> Profile:
    """Measure with one thread; the old way takes medians of the wall time."""
    model, (inputs, _) = subject.built(), subject.batch(1)
    with one_thread():
        if old_way:
            watch = Stopwatch(wall_clock=True)
            return measure(
                model, (inputs,), graph=graph, repeats=repeats, watch=watch, figure=lambda turns: turns.median
            )
        return measure(model, (inputs,), graph=graph, repeats=repeats)


def row_of(subject: Subject, judge: Profile, found: dict[str, list[Profile]], stages: int) -> dict[str, Any]:
    """Return how slow the cuts of each way are by the judge, and how far their profiles are from it."""
    slowest = {way: [judged(judge, profile, stages) for profile in profiles] for way, profiles in found.items()}
    quiet, whole = statistics.median(slowest[QUIET]), seconds_of(judge)
    return {
        "model": subject.model,
        "stages": stages,
        "layers": len(judge.layers),
        "spread": math.fsum(layer.seconds * layer.spread for layer in judge.layers) / whole,
        "quiet_seconds": slowest[QUIET],
        "beside_seconds": slowest[BESIDE],
        "old_seconds": slowest[OLD],
        "beside_ratio": max(slowest[BESIDE]) / quiet,
        "old_ratio": max(slowest[OLD]) / quiet,
        "beside_off": statistics.median(seconds_of(profile) for profile in found[BESIDE]) / whole - 1,
        "old_off": statistics.median(seconds_of(profile) for profile in found[OLD]) / whole - 1,
    }


def seconds_of(profile: Profile) -> float:
    return math.fsum(layer.seconds for layer in profile.layers)


def judged(judge: Profile, profile: Profile, stages: int) -> float:
    """Return the slowest stage's seconds, by the judge, of the cut that is best by another profile."""
    devices = (Device(),) * stages
    held = in_flight("1f1b", stages, MICROBATCHES)
    cuts = place(profile, devices, microbatches=MICROBATCHES, in_flight=held).cuts
    return priced(judge, cuts, devices, microbatches=MICROBATCHES, in_flight=held).slowest.seconds


def cells_of(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["model"],
        str(row["stages"]),
        str(row["layers"]),
        f"{100 * row['spread']:.1f} %",
        f"{1000 * statistics.median(row['quiet_seconds']):.2f}",
        *(f"{row[name]:.3f}" for name in ("beside_ratio", "old_ratio")),
        *(f"{100 * row[name]:+.1f} %" for name in ("beside_off", "old_off")),
    )
