"""One rank of the benchmark `watch`: `python -m benchmarks.watch_rank FOLDER RANK JOB`; JOB is a `Job` as JSON.

All lanes in the same processes, in turns: each has a model of its own, of the same shape. Rank 0 writes a line for each
turn to FOLDER/lanes-0.jsonl: the processor time and the time of a step.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from benchmarks.links_lanes import write_figures

PLAIN, AGAIN, WATCHED, PHASES, HOOK = "plain", "plain again", "watched", "watched, buckets=False", "PyTorch's own hook"
LANES = (PLAIN, WATCHED, PHASES, HOOK, AGAIN)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks do."""

    ranks: int
    layers: int
    width: int
    passes: int
    steps: int

    @property
    def turns(self) -> list[tuple[int, str]]:
        """Every pass over every lane."""
        return [(number, lane) for number in range(self.passes) for lane in LANES]


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
        if name in (WATCHED, PHASES):
            paceline.watch(self._model, out=folder / name.replace(" ", "-"), buckets=name == WATCHED, probe_links=False)

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
    lanes = {name: Lane(name, job, folder) for name in LANES}
    for lane in lanes.values():
        lane.run(5)
    for number, name in job.turns:
        yield {"pass": number, "lane": name, **lanes[name].run(job.steps)}


if __name__ == "__main__":
    job, folder = Job(**json.loads(sys.argv[3])), Path(sys.argv[1])
    write_figures(folder, int(sys.argv[2]), job.ranks, functools.partial(figures, job, folder))
