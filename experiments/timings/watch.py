"""What paceline.watch costs: processor time in a step, beside the same step that is not watched.

The cost of a step does not depend on how long the step computes: hooks are called, buckets are timed, a line is
written. So it is measured in steps that compute little, where a few microseconds show, and judged by its share in a
step of 20 ms. Lanes take turns in the same processes, each with a model of its own, of the same shape; of each the turn
with the least processor time counts, since whatever else the machine does only adds to it. The plain lane is measured
twice, first and last in each pass: the difference of the two is what the measurement itself is worth.

Processor time of a whole process has a noise of its own (gloo's threads spin), which is larger than what is looked
for. So watch's own code is timed as well: the processor time of the threads inside it, every way into it wrapped, less
what the wrapper itself takes around nothing. The start of each bucket's all-reduce, which DDP would do itself, is timed
apart. That is the figure which is judged.

A communication hook in Python makes DDP scale gradients in a pass of its own (DDP does so while it copies them); the
lane with PyTorch's own hook shows that part.

    python -m experiments.timings.watch FOLDER RANK JOB      a rank
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from experiments.core.inside import InsideTime, around_nothing
from experiments.core.ranks import Line, told_by_ranks, write_lines
from experiments.core.story import Numbers, Size, Telling, experiment
from experiments.core.turns import bar, verdict
from paceline.drivers.watching.buckets import EVERY, FIRST_STEPS, BucketTimer
from paceline.drivers.watching.lines import DelayedLines
from paceline.drivers.watching.phases import StepPhases
from paceline.quantities import percent_text
from paceline.reports.table import PlainTable

PLAIN, AGAIN, WATCHED, PHASES, HOOK = "plain", "plain again", "watched", "watched, buckets=False", "PyTorch's own hook"
LANES = (PLAIN, WATCHED, PHASES, HOOK, AGAIN)
INSIDE = "inside"
WARM_STEPS = FIRST_STEPS + EVERY  # from then on every tenth step has its buckets timed
STEP_SECONDS, MOST_SHARE = 0.02, 0.01
fine = partial(percent_text, digits=2)
WAYS_IN = (
    "_before_forward", "_after_forward", "_on_gradient", "_on_backward_through", "_on_round_finished", "_before_step",
    "_after_step",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks do; with `inside`, there is one lane, watched, whose own time is told."""

    ranks: int
    passes: int
    steps: int
    inside: bool = False
    layers: int = 6
    width: int = 224

    @property
    def turns(self) -> list[tuple[int, str]]:
        """Every pass over every lane."""
        return [(number, lane) for number in range(self.passes) for lane in ((INSIDE,) if self.inside else LANES)]


@experiment("watch", question="processor time that paceline.watch adds to a step of DDP", minutes=2)
def watch(size: Size) -> Telling:
    passes, steps = size.pick((3, 10), (40, 30))
    jobs = [
        Job(ranks=ranks, passes=passes, steps=steps, inside=inside)
        for ranks in size.pick((2,), (2, 4))
        for inside in (False, True)
    ]
    total = sum(len(job.turns) for job in jobs)
    rows, inside, parameters = dict[int, Any](), dict[int, Any](), jobs[0].layers * jobs[0].width * (jobs[0].width + 1)
    for job in jobs:
        labels = [f"{job.ranks} ranks, {lane}" for _, lane in job.turns]
        turns = yield from told_by_ranks("experiments.timings.watch", job.ranks, asdict(job), labels, total=total)
        if job.inside:
            inside[job.ranks] = inside_of(turns)
            continue
        rows[job.ranks] = of_ranks = rows_of(turns)
        yield PlainTable(
            title=f"A step of {parameters:,} parameters in a few buckets, {job.ranks} ranks",
            headings=("lane", "processor, us", "added, us", "of 20 ms"),
            rows=[
                (row["lane"], *(f"{1e6 * row[name]:,.0f}" for name in ("processor_seconds", "added_seconds")),
                 fine(row["added_seconds"] / STEP_SECONDS))
                for row in of_ranks
            ],
            caption="Added: processor time of a step over the plain lanes' least.",
        )  # fmt: skip
    claims = {
        ranks: bar(f"inside watch, {ranks} ranks: processor time in a step, of 20 ms", found["least"] / STEP_SECONDS,
                   most=MOST_SHARE, write=fine)
        for ranks, found in inside.items()
    }  # fmt: skip
    yield PlainTable(
        title="Processor time inside watch in a step, us",
        headings=("\nranks", "\nleast", "\nmedian", "halves\napart", "wrappers,\ntaken off", "buckets\nstarted", ""),
        rows=[
            (str(ranks), *(f"{1e6 * found[name]:.0f}" for name in ("least", "median", "halves_apart", "wrapping",
                                                                   "started")), verdict(claims[ranks]))
            for ranks, found in inside.items()
        ],
        caption="Halves: even against odd turns. Buckets started: their all-reduces, as DDP does itself; not in it.",
    )  # fmt: skip
    yield from claims.values()
    yield Numbers({"jobs": [asdict(job) for job in jobs], "rows": rows, "inside": inside})


def inside_of(turns: Sequence[Line]) -> dict[str, float]:
    """Return the least and the median seconds inside watch in a step, and how far two halves of the turns differ.

    >>> one = {"inside_seconds": 3.0, "wrapping_seconds": 1.0, "started_seconds": 0.5}
    >>> inside_of([one, one | {"inside_seconds": 5.0}])
    {'least': 2.0, 'median': 3.0, 'wrapping': 1.0, 'started': 0.5, 'halves_apart': 2.0}
    """
    own = [turn["inside_seconds"] - turn["wrapping_seconds"] for turn in turns]
    return {
        "least": min(own),
        "median": median(own),
        "wrapping": min(turn["wrapping_seconds"] for turn in turns),
        "started": min(turn["started_seconds"] for turn in turns),
        "halves_apart": abs(min(own[::2]) - min(own[1::2])) if len(own) > 1 else 0.0,
    }


def rows_of(turns: Sequence[Line]) -> list[Line]:
    """Return a row for each lane: the least processor time of a step, and what it adds to the plain lanes'.

    >>> turns = [{"lane": PLAIN, "processor_seconds": 0.003}, {"lane": PLAIN, "processor_seconds": 0.001},
    ...          {"lane": AGAIN, "processor_seconds": 0.002}, {"lane": WATCHED, "processor_seconds": 0.0012}]
    >>> [(row["lane"], round(row["added_seconds"], 6)) for row in rows_of(turns)]
    [('plain', 0.0), ('watched', 0.0002), ('plain again', 0.001)]
    """
    least: dict[str, float] = {}
    for turn in turns:
        lane, seconds = turn["lane"], float(turn["processor_seconds"])
        least[lane] = min(seconds, least.get(lane, seconds))
    plain = min(least[PLAIN], least[AGAIN])
    return [
        {"lane": lane, "processor_seconds": least[lane], "added_seconds": least[lane] - plain}
        for lane in LANES
        if lane in least
    ]


# -- a rank ------------------------------------------------------------------------------------------------------------


class Lane:
    """A model that is trained on nothing much, watched or not."""

    def __init__(self, name: str, job: Job, folder: Path) -> None:
        layers = [nn.Linear(job.width, job.width) for _ in range(job.layers)]
        megabytes = 4 * job.width * (job.width + 1) * job.layers / 2**20
        self._model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=megabytes / 3)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._inputs = torch.ones(4, job.width)
        if name == HOOK:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            self._model.register_comm_hook(None, allreduce_hook)
        if name in (WATCHED, PHASES, INSIDE):
            paceline.watch(self._model, out=folder / name.replace(" ", "-"), buckets=name != PHASES, probe_links=False)

    def run(self, steps: int) -> dict[str, float]:
        """Take steps; return the mean seconds of one, and of the processor in it."""
        began, processor = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._model(self._inputs).sum().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        seconds, processor_seconds = time.perf_counter() - began, time.process_time() - processor
        return {"seconds": seconds / steps, "processor_seconds": processor_seconds / steps}


def figures(job: Job, folder: Path) -> Iterator[Line]:
    """Take all turns; of the watched lane alone, with watch's own time."""
    inside = InsideTime()
    if job.inside:  # every function that hooks, autograd or gloo call
        inside.wrap(StepPhases, *WAYS_IN)
        inside.wrap(BucketTimer, "_take", "_take_mean")
        inside.wrap(DelayedLines, "flush")
        setattr(dist.ProcessGroup, "allreduce", inside.left_out(dist.ProcessGroup.allreduce))  # noqa: B010 - mypy
    lanes = {name: Lane(name, job, folder) for name in ((INSIDE,) if job.inside else LANES)}
    for lane in lanes.values():
        lane.run(WARM_STEPS)
    for number, name in job.turns:
        inside.clear()
        line: Line = {"pass": number, "lane": name, **lanes[name].run(job.steps)}
        if job.inside:
            told = {"inside": inside.processor_seconds, "started": inside.left_out_seconds}
            told["wrapping"] = around_nothing(inside.calls).processor_seconds
            line |= {f"{what}_seconds": seconds / job.steps for what, seconds in told.items()}
        yield line


if __name__ == "__main__":
    job, folder = Job(**json.loads(sys.argv[3])), Path(sys.argv[1])
    write_lines(folder, int(sys.argv[2]), job.ranks, lambda: figures(job, folder))
