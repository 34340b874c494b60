"""One of the four processes of `benchmarks.diagnosis`, on a host of its own: takes all cases, one after the other."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from benchmarks.cable import Switch
from benchmarks.diagnosis import PLACES, RANKS, Case, Job, hosts_of

FIRST, SERVER = "10.79.0.1", f"10.79.0.{1 + RANKS}"
PORT = 29500
STEP_SECONDS, JITTER = 0.05, 0.1  # asleep in a step, and the spread of that
SERVER_RATE = 5  # times the workers' rate: all of their messages pass there
WIDTH = 384  # of the layers: 0.6 million parameters


class SlowBackward(torch.autograd.Function):
    """The identity, whose backward pass takes `seconds` longer."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(context.seconds)
        return gradient, None


class Net(nn.Module):
    """Layers between which a pass is asleep: a third of the time forward, two thirds backward, with a jitter."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self._random = random.Random(f"{case.seed} {rank}")
        self._more = {place: case.seconds if rank == case.slow and place == case.place else 0.0 for place in PLACES}

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        seconds = STEP_SECONDS * self._random.lognormvariate(0.0, JITTER)
        time.sleep(seconds / 3 + self._more["forward"])
        for place, layer in enumerate(self.layers):
            values = torch.relu(layer(values))
            if place == 1:
                values = SlowBackward.apply(values, 2 * seconds / 3 + self._more["backward"])
        return values


def batches(case: Case, rank: int) -> Any:
    """Yield batches without end."""
    generator = torch.Generator().manual_seed(case.seed + rank)
    while True:
        if rank == case.slow and case.place == "input":
            time.sleep(case.seconds)
        yield torch.randn(16, WIDTH, generator=generator)


def main(folder: str, rank: int, plan: str) -> None:
    """Take all cases; rank 0 diagnoses each, and writes a line about it."""
    torch.set_num_threads(1)
    job = Job(**json.loads(plan))
    hosts = hosts_of(job.driver)
    dist.init_process_group("gloo", init_method=f"tcp://{FIRST}:{PORT}", rank=rank, world_size=hosts)
    switch = Switch(hosts, number=job.number)
    for number, values in enumerate(job.cases):
        case, place = Case(**values), Path(job.folder, f"{job.driver}-{number}")
        if rank == 0:
            switch.shape(job.bits_per_second)
            if job.driver == "server":
                switch.shape(SERVER_RATE * job.bits_per_second, only=RANKS)
            if case.place == "link":
                switch.shape(job.bits_per_second / 2, only=case.slow)
        dist.barrier()
        (train_ddp if job.driver == "ddp" else train_served)(case, rank, place, PORT + 1 + number)
        dist.barrier()
        if rank == 0:
            with Path(folder, "lanes-0.jsonl").open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(verdict_of(case, place)) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def train_ddp(case: Case, rank: int, folder: Path, port: int) -> None:
    """Train under DistributedDataParallel, watched."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(case, rank), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with paceline.watch(model, out=folder):
        for _, inputs in zip(range(case.steps), batches(case, rank), strict=False):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def train_served(case: Case, rank: int, folder: Path, port: int) -> None:
    """Be a worker of a parameter server, or the server itself, on the last host."""
    torch.manual_seed(0)
    model = Net(case, rank)
    if rank == RANKS:
        paceline.serve(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            strategy=paceline.Full(),
            listen=f"{SERVER}:{port}",
            insecure=True,
            workers=RANKS,
            rounds=case.steps,
            blocks=1,
            out=folder,
        )
        return
    with paceline.Worker(f"{SERVER}:{port}", model, wish=rank, local=False) as worker:
        drawn = batches(case, rank)
        while worker.running():
            for inputs in worker.blocks(next(drawn)):
                model(inputs).square().mean().backward()
            worker.send()


def verdict_of(case: Case, folder: Path) -> dict[str, Any]:
    """Diagnose a run, and compare the verdict with what was done.

    The outcome is "right", "place" (the right one, in another place), "other" (another one, or more than one), or
    "nobody".
    """
    from paceline.diagnosis import behind_slow_links, diagnose, verdict
    from paceline.traces.recorded_run import read_run

    found = diagnose(read_run(folder))
    named = {(each.members, each.phases) for each in found.suspects if each.matters and found.status == "slow"}
    if found.status == "link":
        behind = behind_slow_links(found.links)
        named.add(((-1 if behind is None else behind,), ("link",)))
    wanted = {((case.slow,), (case.place,))} if case.place else set()
    named = {(members, tuple("link" if each == "transfer" else each for each in phases)) for members, phases in named}
    if named == wanted:
        outcome = "right"
    elif not named:
        outcome = "nobody"
    elif {members for members, _ in named} == {(case.slow,)}:
        outcome = "place"
    else:
        outcome = "other"
    return {"right": named == wanted, "outcome": outcome, "status": found.status, "words": " ".join(verdict(found))}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
