"""Does `paceline diagnose` name the right one? One of four is slowed down on purpose, and the verdict is compared.

    +200 ms in the input, the forward or the backward pass of one of four, 5 times each; its link halved, 5 times
    none is slowed down, 10 times
    +50 ms in the same three places, 5 times each: the rate is reported

Under DistributedDataParallel, watched by `paceline.watch`, and under the parameter server, whose workers are scripts.
Four hosts are network namespaces of this machine on one switch, 200 Mbit/s each (`tc tbf`), and a server's has five
times as much, for the messages of all pass there. A step computes for some 60 ms, most of it asleep, with a jitter that
differs from rank to rank and from step to step. The processes stay; each case is a new model, a new watch or server,
and a folder of its own. Who is slowed down is drawn anew for every case.

Right is: the one, and the phase or the link, and no other. Needs root and iproute2.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from experiments.core.hosts import Switch, why_not
from experiments.core.ranks import Line, ended_by_signals, told_by_ranks, write_lines
from experiments.core.story import Numbers, Size, Skipped, Telling, chosen, experiment
from experiments.core.turns import bar
from paceline.diagnosis import Diagnosis, behind_slow_links, diagnose, verdict
from paceline.randomness import seed_for
from paceline.reports.table import PlainTable
from paceline.traces.recorded_run import read_run

RANKS = 4
BITS_PER_SECOND = 200e6
SERVER_RATE = 5  # times the workers' rate: all of their messages pass there
FIRST, SERVER = "10.79.0.1", f"10.79.0.{1 + RANKS}"
PORT = 29500
PLACES = ("input", "forward", "backward")
HOSTS = {"ddp": RANKS, "server": RANKS + 1}  # by driver; the last is the server's, where there is one
STEP_SECONDS, JITTER = 0.05, 0.1  # asleep in a step, and the spread of that
WIDTH = 384  # of the layers: 0.6 million parameters
LEAST_RIGHT, MOST_FALSE = 19, 0
OUTCOMES = {
    "right": "\nright",
    "place": "right one,\nother place",
    "other": "another\none",
    "nobody": "none, or\ncannot tell",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: `place` of rank `slow` is `seconds` slower (or its link has half the rate); no rank's where it is -1."""

    name: str
    place: str
    slow: int
    seconds: float
    steps: int
    seed: int


def cases_of(driver: str, size: Size) -> list[Case]:
    """Return all cases of a driver; who is slow is drawn from the seed.

    >>> [case.name for case in cases_of("ddp", Size("toy"))]
    ['+200 ms, input', 'half a link', 'balanced']
    """
    times, balanced, steps = size.pick((1, 1, 12), (5, 10, 30))
    kinds = [(f"+200 ms, {place}", place, 0.2) for place in size.pick(PLACES[:1], PLACES) for _ in range(times)]
    kinds += [("half a link", "link", 0.0)] * times + [("balanced", "", 0.0)] * balanced
    kinds += [(f"+50 ms, {place}", place, 0.05) for place in size.pick((), PLACES) for _ in range(times)]
    found = []
    for number, (name, place, seconds) in enumerate(kinds):
        seed = seed_for(size.seeds[0], f"diagnosis of {driver}, case {number}") % 2**31
        slow = seed % RANKS if place else -1
        found.append(Case(name=name, place=place, slow=slow, seconds=seconds, steps=steps, seed=seed))
    return found


@experiment("diagnosis", question="one of four is slowed down: does paceline diagnose name it?", minutes=17)
def diagnosis(size: Size, *, drivers: tuple[str, ...] = tuple(HOSTS)) -> Telling:
    drivers = chosen("driver", drivers, tuple(HOSTS))
    if reason := why_not():
        yield Skipped(reason)
        return
    cases, results = {driver: cases_of(driver, size) for driver in drivers}, {}
    total = sum(map(len, cases.values()))
    for driver, own in cases.items():
        labels = [f"{driver}: {case.name}" for case in own]
        with ended_by_signals(), Switch(HOSTS[driver]) as switch:
            switch.shape(BITS_PER_SECOND)
            job = {"driver": driver, "number": switch.number, "cases": [asdict(case) for case in own]}
            hosts = list(zip(switch.hosts, switch.interfaces, strict=True))
            lines = yield from told_by_ranks(__name__, len(hosts), job, labels, hosts=hosts, total=total)
        results[driver] = [asdict(case) | line for case, line in zip(own, lines, strict=True)]
    for driver, rows in results.items():
        yield from tell(driver, rows)
    yield Numbers({"results": results})


def tell(driver: str, rows: Sequence[Mapping[str, Any]]) -> Telling:
    """Yield whom diagnose named, case by case, whether that is within the bars, and what it said where it was wrong."""
    shown = []
    for name in dict.fromkeys(row["name"] for row in rows):
        counts = Counter(row["outcome"] for row in rows if row["name"] == name)
        shown.append((name, str(counts.total()), *(str(counts[each]) for each in OUTCOMES)))
    yield PlainTable(
        title=f"Named by `paceline diagnose`: {driver}, {RANKS} ranks",
        headings=("\ncase", "\nruns", *OUTCOMES.values()),
        rows=shown,
    )
    large = [row["right"] for row in rows if row["seconds"] == 0.2 or row["place"] == "link"]
    small = [row["right"] for row in rows if row["seconds"] == 0.05]
    balanced = [row["right"] for row in rows if not row["place"]]
    yield bar(f"{driver}: right in {len(large)} runs", sum(large), least=LEAST_RIGHT)
    yield bar(f"{driver}: a rank is named in {len(balanced)} balanced runs", balanced.count(False), most=MOST_FALSE)
    if small:
        yield f"{driver}, +50 ms: {sum(small)} of {len(small)} are right."
    for row in rows:
        if not row["right"]:
            yield f"{driver}, {row['name']}, slow: {row['slow']}: {row['words']}"


# -- the ranks ---------------------------------------------------------------------------------------------------------


def take_cases(folder: Path, rank: int, job: Mapping[str, Any]) -> Iterator[Line]:
    """Take all cases of a driver, one after the other; rank 0 diagnoses each."""
    driver = job["driver"]
    switch = Switch(HOSTS[driver], number=job["number"])
    for number, values in enumerate(job["cases"]):
        case, out = Case(**values), folder / f"{driver}-{number}"
        if rank == 0:
            switch.shape(BITS_PER_SECOND)
            if driver == "server":
                switch.shape(SERVER_RATE * BITS_PER_SECOND, only=RANKS)
            if case.place == "link":
                switch.shape(BITS_PER_SECOND / 2, only=case.slow)
        dist.barrier()
        torch.manual_seed(0)
        if driver == "ddp":
            train_ddp(case, rank, out)
        else:
            train_served(case, rank, out, PORT + 1 + number)
        dist.barrier()
        if rank == 0:
            found = diagnose(read_run(out))
            outcome = outcome_of(case, found)
            words = " ".join(verdict(found))
            yield {"right": outcome == "right", "outcome": outcome, "status": found.status, "words": words}


def outcome_of(case: Case, found: Diagnosis) -> str:
    """Compare a diagnosis with what was done.

    The outcome is "right", "place" (the right one, in another place), "other" (another one, or more than one), or
    "nobody".
    """
    named = {(each.members, each.phases) for each in found.suspects if each.matters and found.status == "slow"}
    if found.status == "link":
        behind = behind_slow_links(found.links)
        named.add(((-1 if behind is None else behind,), ("link",)))
    wanted = {((case.slow,), (case.place,))} if case.place else set()
    named = {(members, tuple("link" if each == "transfer" else each for each in phases)) for members, phases in named}
    if named == wanted:
        return "right"
    if not named:
        return "nobody"
    return "place" if {members for members, _ in named} == {(case.slow,)} else "other"


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


slow_backward: Any = SlowBackward.apply


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
                values = slow_backward(values, 2 * seconds / 3 + self._more["backward"])
        return values


def batches(case: Case, rank: int) -> Iterator[torch.Tensor]:
    """Yield batches without end."""
    generator = torch.Generator().manual_seed(case.seed + rank)
    while True:
        if rank == case.slow and case.place == "input":
            time.sleep(case.seconds)
        yield torch.randn(16, WIDTH, generator=generator)


def train_ddp(case: Case, rank: int, out: Path) -> None:
    """Train under DistributedDataParallel, watched."""
    model = DistributedDataParallel(Net(case, rank), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with paceline.watch(model, out=out):
        for _, inputs in zip(range(case.steps), batches(case, rank), strict=False):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def train_served(case: Case, rank: int, out: Path, port: int) -> None:
    """Be a worker of a parameter server, or the server itself, on the last host."""
    model, address = Net(case, rank), f"{SERVER}:{port}"
    if rank == RANKS:
        paceline.serve(
            model, torch.optim.SGD(model.parameters(), lr=0.01), strategy=paceline.Full(), listen=address,
            insecure=True, workers=RANKS, rounds=case.steps, blocks=1, out=out,
        )  # fmt: skip
        return
    with paceline.Worker(address, model, wish=rank, local=False) as worker:
        drawn = batches(case, rank)
        while worker.running():
            for inputs in worker.blocks(next(drawn)):
                model(inputs).square().mean().backward()
            worker.send()


def main(folder: Path, rank: int, job: Mapping[str, Any]) -> None:
    """Be a rank on a host of its own."""
    cases = partial(take_cases, folder, rank, job)
    write_lines(folder, rank, HOSTS[job["driver"]], cases, address=f"{FIRST}:{PORT}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
