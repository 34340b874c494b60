"""Does a plan that is made beside other work cut as one made on a quiet machine?

    judge      a quiet profile with many rounds: by it alone cuts are compared, by their slowest stage
    quiet      a profile on the machine as it is               ┐
    beside     the same beside two busy loops                  ├ in turns, each with a cut of its own
    old way    the same loops, but medians of the wall time    ┘

"Quiet" is the machine as it is found: if something else runs, the judge is disturbed too, and the spread says so. The
busy loops are processes of this benchmark with no lower priority, one for each of two cores. `beside` must come within
3 % of `quiet` in every turn; the old way is shown for comparison and has no bar.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.progress import Progress, TaskID
from rich.table import Table

from benchmarks.options import Options, chosen
from benchmarks.output import Bar, coloured, progress_bar, save, tables, titled
from paceline.pipeline.devices import Device
from paceline.pipeline.graph import ModelGraph
from paceline.pipeline.measuring import measure
from paceline.pipeline.placement import place, priced
from paceline.pipeline.profile import Profile
from paceline.pipeline.schedules import in_flight
from paceline.reproduce.lecture.cut_models import Subject, one_thread
from paceline.stopwatch import Stopwatch

NAME = "plan-beside-load"
BAR = Bar(sign="<=", limit=1.03, style=".3f")
LOOPS = 2
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"
QUIET, BESIDE, OLD = "quiet", "beside load", "beside load, old way"
FULL = (
    Subject(model="resnet18", microbatch=8),
    Subject(model="googlenet", microbatch=4),
    Subject(model="mobilenetv2", microbatch=8),
    Subject(model="alike", microbatch=64, depth=10),
)
TINY = (Subject(model="lenet", microbatch=2, side=16),)
MICROBATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured."""

    stages: tuple[int, ...] = (2, 4)
    turns: int = 3
    repeats: int = 5
    judge_repeats: int = 15


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A model, traced, with the inputs of one micro-batch."""

    subject: Subject
    graph: ModelGraph

    def profile(self, repeats: int, *, old_way: bool = False) -> Profile:
        """Measure with one thread; the old way takes medians of the wall time."""
        model, (inputs, _) = self.subject.built(), self.subject.batch(1)
        with one_thread():
            if old_way:
                watch = Stopwatch(wall_clock=True)
                return measure(
                    model, (inputs,), graph=self.graph, repeats=repeats, watch=watch, figure=lambda turns: turns.median
                )
            return measure(model, (inputs,), graph=self.graph, repeats=repeats)


def run(options: Options) -> None:
    """`python -m benchmarks plan-beside-load`."""
    subjects = TINY if options.quick else FULL
    names = chosen(options.only, tuple(subject.model for subject in subjects), "network")
    subjects = tuple(each.sized(options.microbatch, options.seed) for each in subjects if each.model in names)
    effort = Effort(stages=(2,), turns=1, repeats=3, judge_repeats=3) if options.quick else Effort()
    if options.repeat:
        effort = Effort(turns=options.repeat)
    rows: list[dict[str, Any]] = []
    with progress_bar() as progress:
        bar = progress.add_task(NAME, total=len(subjects) * (1 + 3 * effort.turns))
        for subject in subjects:
            progress.update(bar, description=subject.model)
            rows += _rows(subject, effort, progress, bar)
    tables().print(_table(rows, effort, quick=options.quick))
    save(options, NAME, {"rows": rows})


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


def _rows(subject: Subject, effort: Effort, progress: Progress, bar: TaskID) -> list[dict[str, Any]]:
    prepared = Prepared(subject=subject, graph=ModelGraph(subject.built(), (subject.batch(1)[0],)))
    judge = prepared.profile(effort.judge_repeats)
    progress.advance(bar)
    found: dict[str, list[Profile]] = {QUIET: [], BESIDE: [], OLD: []}
    for _ in range(effort.turns):
        for way, profiles in found.items():
            with contextlib.nullcontext() if way == QUIET else busy_loops():
                profiles.append(prepared.profile(effort.repeats, old_way=way == OLD))
            progress.advance(bar)
    return [_row(subject, judge, found, stages) for stages in effort.stages]


def _row(subject: Subject, judge: Profile, found: dict[str, list[Profile]], stages: int) -> dict[str, Any]:
    slowest = {way: [_judged(judge, profile, stages) for profile in profiles] for way, profiles in found.items()}
    quiet = statistics.median(slowest[QUIET])
    whole = _whole(judge)
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
        "beside_off": statistics.median(_whole(profile) for profile in found[BESIDE]) / whole - 1,
        "old_off": statistics.median(_whole(profile) for profile in found[OLD]) / whole - 1,
        "verdict": BAR.verdict(max(slowest[BESIDE]) / quiet),
    }


def _whole(profile: Profile) -> float:
    return math.fsum(layer.seconds for layer in profile.layers)


def _judged(judge: Profile, profile: Profile, stages: int) -> float:
    """The slowest stage, by the judge, of the cut that is best by another profile."""
    devices = (Device(),) * stages
    held = in_flight("1f1b", stages, MICROBATCHES)
    cuts = place(profile, devices, microbatches=MICROBATCHES, in_flight=held).cuts
    return priced(judge, cuts, devices, microbatches=MICROBATCHES, in_flight=held).slowest.seconds


def _table(rows: list[dict[str, Any]], effort: Effort, *, quick: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled("The slowest stage of cuts made beside two busy loops, against cuts made without", quick=quick),
        caption=f"By one quiet profile; the worst of {effort.turns} turn(s) against the median of the quiet cuts. Bar: "
        f"{BAR}, for the least of undisturbed times. off: all layers together against the quiet profile. old: medians "
        "of wall time. spread: how far the medians of the quiet profile are above its least times.",
        padding=(0, 1, 0, 0),
    )
    table.add_column("model")
    for name in ("k", "layers", "spread", "quiet ms", "ratio", "old ratio", "off", "old off", "verdict"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["model"],
            str(row["stages"]),
            str(row["layers"]),
            f"{row['spread']:.1%}",
            f"{1000 * statistics.median(row['quiet_seconds']):.2f}",
            BAR.show(row["beside_ratio"]),
            BAR.show(row["old_ratio"]),
            f"{row['beside_off']:+.1%}",
            f"{row['old_off']:+.1%}",
            coloured(row["verdict"]),
        )
    return table
