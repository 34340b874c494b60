"""Batches by speed under DDP: how near `paceline.Balance` comes to what all machines could do together.

Four real ranks on this machine, gloo over the loopback. A model that computes next to nothing sleeps in its forward
pass, as long as the rank would take for its batch, so that four ranks on two cores are four machines:

    seconds  =  (fixed_seconds + slower x equal_seconds x samples / samples of an equal share)  x  jitter

DDP's own all-reduce and the optimiser come on top. Each lane is a launch of its own, lanes take turns, and of each the
quickest turn counts: whatever else the machine does only adds to it.

    torch: ddp    equal batches: every step waits for the slowest
    balance       the same script with paceline.Balance
    ideal         the sum of all speeds, computed from the pads: no time for DDP, the optimiser, or whole samples

pace       samples a second after the first 20 steps, as a share of the ideal, and in times DDP's. Where speeds change
           in the run, the steps in which they have changed and shares have not are among them. Beside it the same
           clusters as recipes, simulated: `full` on ranks with equal shares and by speed, a network that costs nothing.
jitter     ranks that are equal but for noise of 20 %, drawn anew in every batch: shares should stay as they are.
overhead   ranks that are equal. Balance against DDP, whose difference is smaller than what two turns differ by; and the
           time inside Balance's own code, every way into it wrapped, less what the wrappers take around nothing. By the
           clock it contains the waits for other ranks where they tell each other their times.
accuracy   digits, a network with BatchNorm, one rank three times slower: the same epochs with equal batches and with
           shares. `equal shares kept` has the same batches as `balance`, so it differs by what BatchNorm makes of parts
           of other sizes, and by rounding.

Periods and limits of paceline.strategies.shares were chosen on seeds from 100 on.

    python -m experiments.timings.shares FOLDER RANK JOB      a rank; rank 0 writes a line for each run of the job
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline
from experiments.core.claims import percent
from experiments.core.inside import InsideTime, around_nothing
from experiments.core.ranks import Line, by_lane, told_by_ranks, write_lines
from experiments.core.story import Numbers, Size, Telling, chosen, deviation, experiment
from experiments.core.turns import bar, verdict
from paceline.drivers.balancing.balance import Balance
from paceline.drivers.balancing.hooks import BalanceHooks
from paceline.drivers.balancing.passes import BatchPass
from paceline.drivers.balancing.sampler import BalancedBatches
from paceline.quantities import percent_text
from paceline.randomness import seed_for
from paceline.recipes import Recipe
from paceline.reports.table import PlainTable
from paceline.runs import simulate
from paceline.strategies.shares.sharing import PERIOD

PARTS = ("pace", "jitter", "overhead", "accuracy")
DDP, BALANCE, KEPT = "torch: ddp", "balance", "balance, equal shares kept"
LANES = (DDP, BALANCE)
TRAINED, TESTED, CLASSES = 1500, 297, 10  # digits
RATE = 0.1
MOST_OVERHEAD, MOST_POINTS = 0.005, 1.0
Noise: TypeAlias = Literal["uniform", "gaussian"]
NOISES: tuple[Noise, ...] = ("uniform", "gaussian")
Row = dict[str, Any]
fine = partial(percent_text, digits=2)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks of one launch do, lane by lane and seed by seed: `steps` steps, or `epochs` on digits."""

    lanes: tuple[str, ...] = (BALANCE,)
    slower: tuple[float, ...]  # of each rank
    slow_from: float = 0.0  # of all steps: before, all ranks are equal
    slow_to: float = 1.0
    equal_seconds: float
    fixed_seconds: float = 0.0  # of every rank, slow or not, beside its samples
    jitter: Noise | None = None
    jitter_share: float = 0.2
    share: int = 32  # samples of an equal share
    steps: int = 0
    warm_steps: int = 0  # are not counted
    epochs: int = 0
    seeds: tuple[int, ...] = (0,)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.slower)

    @property
    def batch_size(self) -> int:
        """The samples of a step, of all ranks."""
        return self.share * self.ranks

    def slower_at(self, step: int) -> tuple[float, ...]:
        """Return how many times longer each rank takes in a step.

        >>> job = Job(slower=(1, 3), slow_from=0.5, slow_to=0.75, equal_seconds=1, steps=8)
        >>> [job.slower_at(step)[1] for step in range(8)]
        [1.0, 1.0, 1.0, 1.0, 3, 3, 1.0, 1.0]
        """
        slow = self.slow_from * self.steps <= step < self.slow_to * self.steps or not self.steps
        return self.slower if slow else (1.0,) * self.ranks

    def ideal_seconds(self, step: int) -> float:
        """Return how long a step takes if all ranks are busy all the time, and parts of samples could be dealt.

        >>> Job(slower=(1, 1, 1, 3), equal_seconds=0.25, steps=1).ideal_seconds(0)
        0.3
        """
        speeds = [self.share / (self.equal_seconds * slower) for slower in self.slower_at(step)]  # samples a second
        return self.fixed_seconds + self.batch_size / sum(speeds)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Ranks of some speeds, and the least that is asked of figures."""

    name: str
    job: Job
    turns: int = 2
    ddp_steps: int | None = 12  # DDP does not change: fewer steps say as much
    least: Mapping[str, float] = field(default_factory=dict)

    def at(self, size: Size) -> Scenario:
        """Return it at this size; a toy has two ranks, which do not take turns."""
        return replace(self, job=shorter(self.job), turns=0, ddp_steps=None) if size.toy else self

    def lane(self, lane: str, seed: int) -> Job:
        """Return the job of a lane."""
        job = replace(self.job, lanes=(lane,), seeds=(seed,))
        return job if lane == BALANCE or self.ddp_steps is None else replace(job, steps=self.ddp_steps, warm_steps=2)

    def launches(self, seed: int, repeat: int) -> list[Job]:
        """Return a launch for each lane, turn after turn; without turns, one of both."""
        both = [replace(self.job, lanes=LANES, seeds=(seed,))]
        return [self.lane(lane, seed) for lane in LANES] * (repeat or self.turns) if self.turns else both


def shorter(job: Job) -> Job:
    return replace(job, slower=job.slower[-2:], equal_seconds=0.02, steps=16, warm_steps=8)


ONE_SLOW = Job(slower=(1, 1, 1, 3), equal_seconds=0.25, steps=50, warm_steps=20)
SCENARIOS = (
    Scenario(name="one 3 times slower", job=ONE_SLOW, least={"of_ideal": 0.93, "of_ddp": 2.3}),
    Scenario(name="two 2 times slower", job=replace(ONE_SLOW, slower=(1, 1, 2, 2)), least={"of_ideal": 0.93}),
    Scenario(
        name="one 3 times slower, fixed part", job=replace(ONE_SLOW, equal_seconds=0.2, fixed_seconds=0.05), turns=1
    ),
    Scenario(
        name="one slow from 1/2 to 3/4",
        job=replace(ONE_SLOW, slow_from=0.5, slow_to=0.75, steps=80),
        turns=1,
        ddp_steps=None,
    ),
)
EQUAL = Scenario(name="all equal", job=replace(ONE_SLOW, slower=(1, 1, 1, 1), steps=60), ddp_steps=None)


@experiment("shares", question="how near paceline.Balance comes to what all ranks can do", minutes=12, seeds=5)
def shares(size: Size, *, parts: tuple[str, ...] = PARTS, repeat: int = 0, accuracy_seeds: int = 3) -> Telling:
    """Tell these parts, with so many turns of each lane; 0 is what each scenario has."""
    parts, first = chosen("part of shares", parts, PARTS), size.seeds[0]
    scenarios = {each.name: each.at(size) for each in size.pick(SCENARIOS[:1], SCENARIOS)}
    equal, some = EQUAL.at(size), size.seeds[:accuracy_seeds]
    quiet = equal.job if size.toy else replace(equal.job, equal_seconds=0.1)
    slower = size.pick((1.0, 3.0), ONE_SLOW.slower)
    learning = Job(lanes=(DDP, KEPT, BALANCE), slower=slower, equal_seconds=0.008, share=128 // len(slower),
                   epochs=size.pick(2, 12), seeds=some)  # fmt: skip
    launches: dict[str, dict[str, list[Job]]] = {
        "pace": {name: scenario.launches(first, repeat) for name, scenario in scenarios.items()},
        "jitter": {kind: [replace(quiet, jitter=kind, seeds=size.seeds)] for kind in size.pick(NOISES[:1], NOISES)},
        "overhead": {equal.name: equal.launches(first, repeat)},
        "accuracy": {"digits": [learning]},
    }
    wanted = [(part, name, job) for part in parts for name, jobs in launches[part].items() for job in jobs]
    total, found = sum(len(job.lanes) * len(job.seeds) for *_, job in wanted), dict[tuple[str, str], list[Line]]()
    for part, name, job in wanted:
        labels = [f"{name}: {lane}, seed {seed}" for lane, seed in itertools.product(job.lanes, job.seeds)]
        lines = yield from told_by_ranks("experiments.timings.shares", job.ranks, asdict(job), labels, total=total)
        found.setdefault((part, name), []).extend(lines)
    if "pace" in parts:
        yield from tell_pace(
            [pace_row(each, first, found["pace", name]) for name, each in scenarios.items()], scenarios
        )
    if "jitter" in parts:
        yield from tell_jitter({name: lines for (part, name), lines in found.items() if part == "jitter"}, quiet.steps)
    if "overhead" in parts:
        yield from tell_overhead(by_lane(found["overhead", equal.name]))
    if "accuracy" in parts:
        yield from tell_accuracy(by_lane(found["accuracy", "digits"]))
    yield Numbers({"first_seed": first})


# -- how quick ---------------------------------------------------------------------------------------------------------


def pace_row(scenario: Scenario, seed: int, lines: Sequence[Line]) -> Row:
    turns = by_lane(lines)
    simulated = {lane: simulated_step(scenario.lane(lane, seed)) for lane in LANES}
    pace = pace_of(turns[DDP], turns[BALANCE], scenario.job.batch_size)
    return {"scenario": scenario.name, **pace, "simulated_step_seconds": simulated, "turns": turns}


def pace_of(ddp: Sequence[Line], balance: Sequence[Line], batch_size: int) -> Row:
    """Return the paces of the quickest turns, of the ideal, and when shares changed.

    >>> turn = {"steps": 10, "seconds": 6.0, "ideal_seconds": 2.0, "changed_at": [], "shares": [8, 8]}
    >>> found = pace_of([turn], [turn | {"seconds": 2.5, "changed_at": [6]}], batch_size=16)
    >>> found["of_ideal"], found["of_ddp"], found["samples_per_second"]
    (0.8, 2.4, 64.0)
    """
    slow, quick = (min(turns, key=step_seconds) for turns in (ddp, balance))
    steps_per_second = [turn["steps"] / turn["seconds"] for turn in (slow, quick)]
    return {
        "ideal_samples_per_second": batch_size * quick["steps"] / quick["ideal_seconds"],
        "ddp_samples_per_second": batch_size * steps_per_second[0],
        "samples_per_second": batch_size * steps_per_second[1],
        "of_ideal": quick["ideal_seconds"] / quick["seconds"],
        "of_ddp": steps_per_second[1] / steps_per_second[0],
        "changed_at": quick["changed_at"],
        "shares": quick["shares"],
    }


def step_seconds(turn: Line) -> float:
    return float(turn["seconds"] / turn["steps"])


def simulated_step(job: Job) -> float:
    """Return the seconds of a step after those that do not count, on the simulator's clock.

    >>> round(simulated_step(Job(lanes=(DDP,), slower=(1, 3), equal_seconds=0.1, steps=4, warm_steps=1)), 3)
    0.3
    """
    with tempfile.TemporaryDirectory(prefix="paceline-shares-") as folder:
        whole = (
            [job.fixed_seconds + job.equal_seconds * each for each in job.slower_at(step)] for step in range(job.steps)
        )
        table = Path(folder, "delays.csv")
        table.write_text("".join(",".join(f"{each:.6f}" for each in batch) + "\n" for batch in whole), encoding="utf-8")
        recipe = Recipe(seed=job.seeds[0], rounds=job.steps, evaluate_every=job.steps).with_settings(
            data={"split": "iid"},
            worker={"shares": "equal" if job.lanes == (DDP,) else "speed", "batch_size": job.share, "blocks": 1},
            cluster={"workers": job.ranks},
            strategy={"name": "full", "on": "ranks"},
            delay={"name": "recorded", "file": str(table), "fixed_seconds": job.fixed_seconds},
        )
        rounds = simulate(recipe).trace.rounds[job.warm_steps :]
    return (rounds[-1].closed_seconds - rounds[0].opened_seconds) / len(rounds)


def tell_pace(rows: Sequence[Row], scenarios: Mapping[str, Scenario]) -> Telling:
    """Yield samples a second, and how long a step takes beside the simulated one."""
    yield PlainTable(
        title="Samples a second after the first steps: real ranks, padded by sleep",
        headings=("\nranks", "\nideal", "\nddp", "\nbalance", "of the\nideal", "times\nddp", "changed\nafter"),
        rows=[
            (row["scenario"], *(f"{row[f'{name}samples_per_second']:,.0f}" for name in ("ideal_", "ddp_", "")),
             percent(row["of_ideal"]), f"{row['of_ddp']:.2f}", ", ".join(map(str, row["changed_at"])) or "never")
            for row in rows
        ],
        caption="Changed after: the steps after which shares were others.",
    )  # fmt: skip
    steps = [(row, lane, min(map(step_seconds, turns))) for row in rows for lane, turns in row["turns"].items()]
    yield PlainTable(
        title="A step after the first ones: real, and simulated",
        headings=("ranks", "lane", "real, ms", "simulated", "off"),
        rows=[
            (row["scenario"], lane, f"{1e3 * real:.0f}", f"{1e3 * row['simulated_step_seconds'][lane]:.0f}",
             f"{100 * (row['simulated_step_seconds'][lane] / real - 1):+.1f} %")
            for row, lane, real in steps
        ],
    )  # fmt: skip
    for row in rows:
        for name, least in scenarios[row["scenario"]].least.items():
            write, text = (percent, "of the ideal") if name == "of_ideal" else ("{:.2f}".format, "times ddp")
            yield bar(f"pace, {row['scenario']}: {text}", row[name], least=least, write=write)
    yield Numbers({"pace": rows})


# -- what must not happen ----------------------------------------------------------------------------------------------


def tell_jitter(found: Mapping[str, Sequence[Line]], steps: int) -> Telling:
    """Yield how often shares changed among equal ranks."""
    changes = {kind: sum(len(line["changed_at"]) for line in lines) for kind, lines in found.items()}
    claims = {kind: bar(f"jitter, {kind}: changes of shares", count, most=0) for kind, count in changes.items()}
    yield PlainTable(
        title="Equal ranks with 20 % of noise in every batch",
        headings=("noise", "seeds", "steps", "changes", ""),
        rows=[
            (kind, str(len(lines)), str(steps * len(lines)), str(changes[kind]), verdict(claims[kind]))
            for kind, lines in found.items()
        ],
    )
    yield from claims.values()
    yield Numbers({"jitter": {kind: {"changes": changes[kind], "lines": lines} for kind, lines in found.items()}})


def tell_overhead(turns: Mapping[str, Sequence[Line]]) -> Telling:
    """Yield what Balance takes where all ranks are equal."""
    ddp, own = (list(map(step_seconds, turns[lane])) for lane in LANES)
    best, step = min(turns[BALANCE], key=lambda turn: float(turn["inside_seconds"])), min(ddp)
    inside, processor = best["inside_seconds"] - best["wrapping_seconds"], best["inside_processor_seconds"]
    against, apart = min(own) / step - 1, (max(ddp) - step) / step
    changes = sum(len(turn["changed_at"]) for turn in turns[BALANCE])
    claims = [
        bar("overhead: inside Balance by the clock, of a step", inside / step, most=MOST_OVERHEAD, write=fine),
        bar("overhead: a step of balance over ddp's", against, most=MOST_OVERHEAD, write=fine),
    ]
    yield PlainTable(
        title="What Balance takes where all ranks are equal",
        headings=("", "us a step", "of a step", ""),
        rows=[
            ("inside, by the clock", f"{1e6 * inside:.0f}", fine(inside / step), verdict(claims[0])),
            ("inside, of the processor", f"{1e6 * processor:.0f}", fine(processor / step), ""),
            ("a step of balance over ddp's", f"{1e6 * against * step:+.0f}", fine(against), verdict(claims[1])),
            ("turns of ddp apart", f"{1e6 * apart * step:.0f}", fine(apart), ""),
        ],
        caption=f"A step of ddp takes {1e3 * step:.0f} ms: quickest turns. Inside: on the rank that is longest in it. "
        f"Shares changed {changes} times.",
    )
    yield from claims
    figures = {"step_seconds": step, "against_ddp": against, "turns_apart": apart, "inside_seconds": inside}
    told = {"inside_processor_seconds": processor, "changes": changes, "turns": turns}
    yield Numbers({"overhead": {**figures, **told}})


# -- how well it learns ------------------------------------------------------------------------------------------------


def tell_accuracy(lines: Mapping[str, Sequence[Line]]) -> Telling:
    """Yield how good the network is after the same epochs."""
    accuracies = {lane: [float(line["accuracy"]) for line in own] for lane, own in lines.items()}
    losses = {lane: fmean(line["loss"] for line in own) for lane, own in lines.items()}
    mean = {lane: fmean(own) for lane, own in accuracies.items()}
    spread = {lane: deviation(own) for lane, own in accuracies.items()}
    yield PlainTable(
        title="Digits, one rank 3 times slower: the same epochs",
        headings=("\nlane", "test\naccuracy", "seeds differ\nby points", "test\nloss", "shares\nat the end"),
        rows=[
            (lane, fine(mean[lane]), f"{100 * spread[lane]:.2f}" if len(own) > 1 else "-", f"{losses[lane]:.4f}",
             " ".join(map(str, own[-1]["shares"])))
            for lane, own in lines.items()
        ],
        caption="Seeds differ by: standard deviation.",
    )  # fmt: skip
    apart = round(100 * abs(mean[BALANCE] - mean[DDP]), 6)
    yield bar("accuracy: points between balance and ddp", apart, most=MOST_POINTS)
    rows = {
        lane: {"accuracy": mean[lane], "deviation": spread[lane], "loss": losses[lane], "lines": own}
        for lane, own in lines.items()
    }
    yield Numbers({"accuracy": rows})


# -- a rank ------------------------------------------------------------------------------------------------------------


class Padded(nn.Module):
    """A network that takes as long for a batch as its rank would."""

    def __init__(self, network: nn.Module, job: Job, seed: int) -> None:
        super().__init__()
        self.network, self.step = network, 0
        self._job, self._rank = job, dist.get_rank()
        self._draw = np.random.default_rng(seed_for(seed, "jitter of shares", self._rank))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Sleep and compute."""
        if self.training:
            job = self._job
            slower = job.slower_at(self.step)[self._rank]
            seconds = job.fixed_seconds + slower * job.equal_seconds * len(inputs) / job.share
            time.sleep(seconds * self._jitter())
        output: torch.Tensor = self.network(inputs)
        return output

    def _jitter(self) -> float:
        share = self._job.jitter_share
        if self._job.jitter == "uniform":
            return float(self._draw.uniform(1 - share, 1 + share))
        return max(0.2, float(self._draw.normal(1, share))) if self._job.jitter == "gaussian" else 1.0


def figures(job: Job) -> Iterator[Line]:
    """Do the job for every seed; every function of Balance's that hooks, autograd or a loader call is timed."""
    inside = InsideTime()
    hooks = ("_before_forward", "_before_inner", "_after_forward", "_on_gradient", "_on_through", "_before_step")
    inside.wrap(BalanceHooks, *hooks)
    inside.wrap(Balance, "_backward_over")
    inside.wrap(BatchPass, "__next__")
    inside.wrap(BalancedBatches, "__iter__")
    for lane, seed in itertools.product(job.lanes, job.seeds):
        found = trained(job, lane, seed) if job.epochs else paced(job, lane, seed, inside)
        yield {"lane": lane, "seed": seed, **found}


def paced(job: Job, lane: str, seed: int, inside: InsideTime) -> Row:
    """Take steps on data without a meaning; return how long they took after those that do not count."""
    torch.manual_seed(seed)
    data = TensorDataset(
        torch.randn(job.steps * job.batch_size, 64), torch.randint(0, CLASSES, (job.steps,)).repeat(job.batch_size)
    )
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    model = DistributedDataParallel(Padded(network, job, seed))
    loader, balance = loader_of(job, lane, model, data, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    ended, sizes = [time.perf_counter()], list[int]()
    for step, (inputs, targets) in enumerate(loader):
        if step == job.warm_steps:
            inside.clear()
        model.module.step = step
        loss: Any = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended.append(time.perf_counter())
        sizes.append(len(inputs))
    counted = len(sizes) - job.warm_steps
    wrapping = around_nothing(1000).seconds / 1000 * inside.calls / counted
    of_ranks: list[Any] = [None] * job.ranks
    dist.all_gather_object(of_ranks, (sizes, inside.seconds / counted, inside.processor_seconds / counted))
    shares = list(zip(*(sizes for sizes, _, _ in of_ranks), strict=True))
    if balance is not None:
        balance.close()
    return {
        "steps": counted,
        "seconds": ended[-1] - ended[job.warm_steps],
        "ideal_seconds": sum(job.ideal_seconds(step) for step in range(job.warm_steps, len(sizes))),
        "shares": shares[-1],
        "changed_at": [step for step in range(1, len(shares)) if shares[step] != shares[step - 1]],
        "inside_seconds": max(seconds for _, seconds, _ in of_ranks),
        "inside_processor_seconds": max(seconds for _, _, seconds in of_ranks),
        "wrapping_seconds": wrapping,
    }


def loader_of(
    job: Job, lane: str, model: DistributedDataParallel, data: TensorDataset, seed: int
) -> tuple[DataLoader[Any], Balance | None]:
    """Return the loader of a lane, and its balance if it has one."""
    if lane == DDP:
        sampler: DistributedSampler[Any] = DistributedSampler(data, seed=seed, drop_last=True)
        return DataLoader(data, batch_size=job.share, sampler=sampler, drop_last=True), None
    balance = paceline.Balance(model, batch_size=job.batch_size, period=None if lane == KEPT else PERIOD)
    return DataLoader(data, batch_sampler=balance.sampler(data, seed=seed, drop_last=True)), balance


def trained(job: Job, lane: str, seed: int) -> dict[str, Any]:
    """Train on digits, with BatchNorm; return the loss and the accuracy on images that were not trained on."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed_for(seed, "digits of shares")).permutation(TRAINED + TESTED)
    inputs = torch.tensor(np.asarray(images)[order], dtype=torch.float32) / 16
    targets = torch.tensor(np.asarray(labels)[order])
    data = TensorDataset(inputs[:TRAINED], targets[:TRAINED])
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, CLASSES))
    model = DistributedDataParallel(Padded(network, job, seed))
    loader, balance = loader_of(job, lane, model, data, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for epoch in range(job.epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for batch, classes in loader:
            loss: Any = nn.functional.cross_entropy(model(batch), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    shares = [job.share] * job.ranks if balance is None else list(balance.shares)
    if balance is not None:
        balance.close()
    with torch.no_grad():
        outputs = model.module.eval()(inputs[TRAINED:])
    return {
        "shares": shares,
        "loss": float(nn.functional.cross_entropy(outputs, targets[TRAINED:])),
        "accuracy": float((outputs.argmax(1) == targets[TRAINED:]).float().mean()),
    }


if __name__ == "__main__":
    given = json.loads(sys.argv[3])
    job = Job(**given | {name: tuple(given[name]) for name in ("lanes", "slower", "seeds")})
    write_lines(Path(sys.argv[1]), int(sys.argv[2]), job.ranks, lambda: figures(job))
