"""One rank of the benchmark `averaging`: `python -m benchmarks.averaging_rank FOLDER RANK PLAN`.

First the seconds of one all-reduce of the model's size, by which all paces are set; then turn after turn of the plan.
Rank 0 writes a line for each to FOLDER/lanes-0.jsonl, with what all ranks measured.
"""

from __future__ import annotations

import copy
import datetime
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from benchmarks.averaging_lanes import TIMEOUT_SECONDS, Lane
from benchmarks.averaging_plan import PAPER, WARM_UP_STEPS, Plan, Stretch, step_seconds, stretches, whole_periods
from benchmarks.cable import ADDRESSES

PORT = 29577  # in a network namespace of its own
REDUCTIONS = 7
TIMED_OPTIMISER = (0.001, 0.9)  # of SGD: what a step costs does not depend on its rate, and nothing may diverge
Boundary: TypeAlias = Callable[[int, float], None]  # the step, and the seconds since the clock was started


class Task:
    """Random inputs, and the classes that a random network of one hidden layer gives them; a shard for each rank."""

    def __init__(self, plan: Plan, seed: int) -> None:
        draws = torch.Generator().manual_seed(1000 + seed)
        width, classes = plan.widths[0], plan.widths[-1]
        hidden = torch.randn(width, 2 * width, generator=draws) / width**0.5
        last = torch.randn(2 * width, classes, generator=draws)

        def drawn(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
            inputs = torch.randn(samples, width, generator=draws)
            return inputs, ((inputs @ hidden).relu() @ last - last.sum(0) * 0.4).argmax(1)

        self.evaluated = drawn(plan.evaluated)
        shards = [drawn(plan.shard) for _ in range(dist.get_world_size())]
        self._shard = shards[dist.get_rank()]
        self._draws = torch.Generator().manual_seed(dist.get_world_size() * seed + dist.get_rank())
        self._batch = plan.batch

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Some samples of this rank's shard."""
        inputs, targets = self._shard
        chosen = torch.randint(len(inputs), (self._batch,), generator=self._draws)
        return inputs[chosen], targets[chosen]


def reduction_seconds(size: int) -> list[float]:
    """One all-reduce after the other, with nothing beside it; the same figures on every rank."""
    vector, seconds = torch.zeros(size), []
    for _ in range(REDUCTIONS + 1):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(vector)
        seconds.append(time.perf_counter() - started)
    told = torch.tensor(seconds[1:], dtype=torch.float64)
    dist.broadcast(told, 0)
    return told.tolist()


def of_all_ranks(value: float) -> list[float]:
    """What every rank has measured."""
    rows = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    rows[dist.get_rank()] = value
    dist.all_reduce(rows)
    return rows.tolist()


class Rank:
    """What a rank keeps from one turn to the next."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.task = plan, Task(plan, 0)
        self.kept: dict[tuple[str, str], Lane] = {}
        self.slow = dist.get_rank() == dist.get_world_size() - 1
        self.reduction = 0.0

    def first(self) -> dict[str, Any]:
        """The all-reduce that is the measure of all paces."""
        size = sum(parameter.numel() for parameter in self._lane("speed", "ddp").module.parameters())
        seconds = reduction_seconds(size)
        self.reduction = median(seconds)
        return {"part": "all-reduce", "parameters": size, "seconds": seconds}

    def turn(self, stretch: Stretch) -> dict[str, Any]:
        """One lane's turn."""
        found = self._trained(stretch) if stretch.part == "loss" else self._timed(stretch)
        return asdict(stretch) | found

    def _lane(self, part: str, name: str) -> Lane:
        if (part, name) not in self.kept:
            self.kept[part, name] = Lane(name, self.plan, 0, TIMED_OPTIMISER, record=part == "slow")
        return self.kept[part, name]

    def _timed(self, stretch: Stretch) -> dict[str, Any]:
        """Seconds between two step boundaries of this rank, while all train; the flush comes after the clock."""
        lane, computation = self._lane(stretch.part, stretch.lane), self.reduction / stretch.ratio
        times = self.plan.slow_times if stretch.part == "slow" else 1
        free = stretch.lane in ("hpsgd", PAPER, "psgd")
        expected = step_seconds(stretch.lane, computation if free else times * computation, self.reduction)
        own_times = times if self.slow else 1
        steps = whole_periods(self.plan.seconds / expected)
        if free and times > 1:  # nobody waits for anybody: all end at about the same time
            steps = times * whole_periods(steps / times) // own_times
        lane.pace.seconds = own_times * computation
        known = len(lane.sync.history) if lane.sync is not None else 0
        averages = lane.averages(-1)
        seconds = self._steps(lane, WARM_UP_STEPS, steps)
        processor, averages = lane.clock.processor(), lane.averages(WARM_UP_STEPS + steps - 1) - averages
        windows = [average.windows for average in lane.sync.history[known:]] if lane.sync is not None else []
        clock = copy.copy(lane.clock)
        lane.flush()
        return {
            "computation": computation,
            "steps": of_all_ranks(steps),
            "seconds": of_all_ranks(seconds),
            "computing": of_all_ranks(clock.computing),
            "stepping": of_all_ranks(clock.stepping),
            "optimiser": of_all_ranks(clock.optimiser),
            "processor": of_all_ranks(processor),
            "averages": averages,  # those of the warm-up too
            "windows": [[window.steps for window in each] for each in windows],
        }

    def _steps(self, lane: Lane, before: int, steps: int, boundary: Boundary = lambda step, elapsed: None) -> float:
        dist.barrier()
        started = time.perf_counter()
        for step in range(before + steps):
            if step == before:
                lane.clock.reset()
                started = time.perf_counter()
            lane.step(*self.task.batch())
            boundary(step, time.perf_counter() - started)
        return time.perf_counter() - started

    def _trained(self, stretch: Stretch) -> dict[str, Any]:
        """Losses of copies of the shared model; rank 0 takes them on the way and evaluates them off the clock."""
        plan, computation = self.plan, self.reduction / stretch.ratio
        self.task = Task(plan, 1 + stretch.turn)
        lane = Lane(stretch.lane, plan, 1 + stretch.turn, (stretch.rate, stretch.momentum))
        lane.pace.seconds = computation
        steps = whole_periods(plan.loss_seconds / step_seconds(stretch.lane, computation, self.reduction))
        taken, known = [(0.0, lane.shared())], 0

        def boundary(step: int, elapsed: float) -> None:
            nonlocal known
            if dist.get_rank() == 0 and lane.averages(step) > known:
                known = lane.averages(step)
                taken.append((elapsed, lane.shared()))

        seconds = self._steps(lane, 0, steps, boundary)
        lane.close()
        losses = [lane.loss(parameters, *self.task.evaluated) for _, parameters in taken]
        return {"steps": steps, "seconds": seconds, "times": [elapsed for elapsed, _ in taken], "losses": losses}

    def close(self) -> None:
        """The end of all lanes."""
        for lane in self.kept.values():
            lane.close()


def main(folder: Path, rank: int, plan: Plan) -> None:
    """All turns."""
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    address, ranks = f"tcp://{ADDRESSES[0]}:{PORT}", 2 * plan.ranks_per_host
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks, timeout=timeout)
    state = Rank(plan)
    with (folder / f"lanes-{rank}.jsonl").open("w", encoding="utf-8", buffering=1) as lines:
        lines.write(json.dumps(state.first()) + "\n")
        for stretch in stretches(plan):
            lines.write(json.dumps(state.turn(stretch)) + "\n")
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Plan(**json.loads(sys.argv[3])))
