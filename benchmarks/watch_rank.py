"""One rank of the benchmark `watch`: `python -m benchmarks.watch_rank FOLDER RANK JOB`; JOB is a `Job` as JSON.

All lanes in the same processes, in turns: each has a model of its own, of the same shape. Rank 0 writes a line for each
turn to FOLDER/lanes-0.jsonl: the processor time and the time of a step.

With `inside`, there is one lane, watched, and every way into watch's own code is wrapped: the processor time of the
thread inside it is added up. The same wrapper around nothing, called as often, says what the wrapping itself costs.
The start of an all-reduce is timed apart, and left out: DDP starts it itself where nobody watches.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from benchmarks.links_lanes import write_figures
from paceline.drivers.watching.buckets import EVERY, FIRST_STEPS, BucketTimer
from paceline.drivers.watching.lines import DelayedLines
from paceline.drivers.watching.phases import StepPhases

PLAIN, AGAIN, WATCHED, PHASES, HOOK = "plain", "plain again", "watched", "watched, buckets=False", "PyTorch's own hook"
INSIDE = "inside"
WARM_STEPS = FIRST_STEPS + EVERY  # from then on every tenth step has its buckets timed
LANES = (PLAIN, WATCHED, PHASES, HOOK, AGAIN)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks do."""

    ranks: int
    layers: int
    width: int
    passes: int
    steps: int
    inside: bool = False

    @property
    def turns(self) -> list[tuple[int, str]]:
        """Every pass over every lane."""
        return [(number, lane) for number in range(self.passes) for lane in ((INSIDE,) if self.inside else LANES)]


class InsideTime:
    """Adds up the processor time of threads inside wrapped functions; one inside another counts once."""

    def __init__(self) -> None:
        self.seconds, self.started_seconds, self.calls = 0.0, 0.0, 0
        self._lock, self._local = threading.Lock(), threading.local()

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and is timed."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._local, "inside", False):
                return call(*args, **kwargs)
            self._local.inside = True
            began = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.thread_time_ns() - began
                self._local.inside = False
                with self._lock:
                    self.seconds += took / 1e9
                    self.calls += 1

        return timed

    def left_out(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and whose time counts as `started_seconds` instead."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                took = (time.thread_time_ns() - began) / 1e9
                with self._lock:
                    self.started_seconds += took
                    if getattr(self._local, "inside", False):
                        self.seconds -= took

        return timed

    def wrap_watch(self) -> None:
        """Wrap every function of watch's that hooks, autograd or gloo call."""
        ways = ("_before_forward", "_after_forward", "_on_gradient", "_on_backward_through", "_on_round_finished")
        for name in (*ways, "_before_step", "_after_step"):
            setattr(StepPhases, name, self.wrapped(getattr(StepPhases, name)))
        setattr(BucketTimer, "_take", self.wrapped(BucketTimer._take))  # noqa: B010 - mypy takes no assignment
        setattr(BucketTimer, "_take_mean", staticmethod(self.wrapped(BucketTimer._take_mean)))  # noqa: B010
        setattr(DelayedLines, "flush", self.wrapped(DelayedLines.flush))  # noqa: B010
        setattr(dist.ProcessGroup, "allreduce", self.left_out(dist.ProcessGroup.allreduce))  # noqa: B010


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


def figures(job: Job, folder: Path) -> Iterator[dict[str, Any]]:
    """Take all turns."""
    if job.inside:
        yield from inside_figures(job, folder)
        return
    lanes = {name: Lane(name, job, folder) for name in LANES}
    for lane in lanes.values():
        lane.run(WARM_STEPS)
    for number, name in job.turns:
        yield {"pass": number, "lane": name, **lanes[name].run(job.steps)}


def inside_figures(job: Job, folder: Path) -> Iterator[dict[str, Any]]:
    """Take all turns of the watched lane, with watch's own time."""
    inside = InsideTime()
    inside.wrap_watch()
    lane = Lane(INSIDE, job, folder)
    lane.run(WARM_STEPS)
    for number, name in job.turns:
        inside.seconds, inside.started_seconds, inside.calls = 0.0, 0.0, 0
        found = lane.run(job.steps)
        took, calls, started = inside.seconds / job.steps, inside.calls, inside.started_seconds / job.steps
        empty = InsideTime()
        nothing = empty.wrapped(lambda: None)
        for _ in range(calls):
            nothing()
        wrapping = empty.seconds / job.steps
        own = {"inside_seconds": took, "wrapping_seconds": wrapping, "started_seconds": started}
        yield {"pass": number, "lane": name, **own, **found}


if __name__ == "__main__":
    job, folder = Job(**json.loads(sys.argv[3])), Path(sys.argv[1])
    write_figures(folder, int(sys.argv[2]), job.ranks, functools.partial(figures, job, folder))
