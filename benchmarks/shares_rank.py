"""One rank of the benchmark `shares`: `python -m benchmarks.shares_rank FOLDER RANK JOB`; JOB is a `Job` as JSON.

A model that computes next to nothing sleeps in its forward pass, so long as the rank would take for its batch:

    seconds  =  (fixed_seconds + slower x equal_seconds x samples / samples of an equal share)  x  jitter

So four ranks on two cores are four machines. DDP's own all-reduce and the optimiser come on top, as they would. Rank 0
writes a line to FOLDER/lanes-0.jsonl for each run of the job.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline
from benchmarks.links_lanes import write_figures
from paceline.drivers.balancing.balance import Balance
from paceline.drivers.balancing.hooks import BalanceHooks
from paceline.drivers.balancing.passes import BatchPass
from paceline.drivers.balancing.sampler import BalancedBatches
from paceline.randomness import seed_for
from paceline.strategies.shares.sharing import PERIOD

DDP, BALANCE, KEPT = "torch: ddp", "balance", "balance, equal shares kept"
TRAINED, TESTED, CLASSES = 1500, 297, 10  # digits
RATE = 0.1
Noise: TypeAlias = Literal["uniform", "gaussian"]


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


class InsideTime:
    """Adds up the seconds inside wrapped functions, by the clock and of the processor; one in another counts once."""

    def __init__(self) -> None:
        self.seconds, self.processor_seconds, self.calls = 0.0, 0.0, 0
        self._inside = False

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and is timed."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside = True
            began, processor = time.perf_counter_ns(), time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.processor_seconds += (time.thread_time_ns() - processor) / 1e9
                self.seconds += (time.perf_counter_ns() - began) / 1e9
                self._inside, self.calls = False, self.calls + 1

        return timed

    def wrap_balance(self) -> None:
        """Wrap every function of Balance's that hooks, autograd or a loader call; all are called on one thread."""
        ways = {
            BalanceHooks: ["_before_forward", "_before_inner", "_after_forward", "_on_gradient", "_on_through"],
            Balance: ["_backward_over"],
            BatchPass: ["__next__"],
            BalancedBatches: ["__iter__"],
        }
        ways[BalanceHooks] += [name for name in ("_before_step",) if hasattr(BalanceHooks, name)]
        for owner, names in ways.items():
            for name in names:
                setattr(owner, name, self.wrapped(getattr(owner, name)))


def figures(job: Job) -> Iterator[dict[str, Any]]:
    """Do the job for every seed."""
    inside = InsideTime()
    inside.wrap_balance()
    for lane, seed in itertools.product(job.lanes, job.seeds):
        found = trained(job, lane, seed) if job.epochs else paced(job, lane, seed, inside)
        yield {"lane": lane, "seed": seed, **found}


# -- how quick ---------------------------------------------------------------------------------------------------------


def paced(job: Job, lane: str, seed: int, inside: InsideTime) -> dict[str, Any]:
    """Take steps on data without a meaning; return how long they took after those that do not count."""
    torch.manual_seed(seed)
    data = TensorDataset(
        torch.randn(job.steps * job.batch_size, 64), torch.randint(0, CLASSES, (job.steps,)).repeat(job.batch_size)
    )
    model = DistributedDataParallel(
        Padded(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)), job, seed)
    )
    loader, balance = loader_of(job, lane, model, data, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    ended, sizes, spent = [time.perf_counter()], list[int](), (0.0, 0.0, 0)
    for step, (inputs, targets) in enumerate(loader):
        if step == job.warm_steps:
            spent = inside.seconds, inside.processor_seconds, inside.calls
        model.module.step = step
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        ended.append(time.perf_counter())
        sizes.append(len(inputs))
    counted = len(sizes) - job.warm_steps
    inside_of_step = [(inside.seconds - spent[0]) / counted, (inside.processor_seconds - spent[1]) / counted]
    everybody: list[Any] = [None] * job.ranks
    dist.all_gather_object(everybody, (sizes, *inside_of_step))
    shares = list(zip(*(sizes for sizes, _, _ in everybody), strict=True))
    changed = [step for step in range(1, len(shares)) if shares[step] != shares[step - 1]]
    if balance is not None:
        balance.close()
    return {
        "steps": counted,
        "seconds": ended[-1] - ended[job.warm_steps],
        "ideal_seconds": sum(job.ideal_seconds(step) for step in range(job.warm_steps, len(sizes))),
        "shares": shares[-1],
        "changed_at": changed,
        "inside_seconds": max(seconds for _, seconds, _ in everybody),
        "inside_processor_seconds": max(seconds for _, _, seconds in everybody),
        "wrapping_seconds": _wrapping_seconds((inside.calls - spent[2]) / counted),
    }


def _wrapping_seconds(calls: float) -> float:
    """Return what the wrapper itself takes in a step, around nothing."""
    empty = InsideTime()
    nothing = empty.wrapped(lambda: None)
    for _ in range(1000):
        nothing()
    return empty.seconds / 1000 * calls


def loader_of(
    job: Job, lane: str, model: DistributedDataParallel, data: TensorDataset, seed: int
) -> tuple[DataLoader[Any], Balance | None]:
    """Return the loader of a lane, and its balance if it has one."""
    if lane == DDP:
        sampler = DistributedSampler(data, seed=seed, drop_last=True)
        return DataLoader(data, batch_size=job.share, sampler=sampler, drop_last=True), None
    balance = paceline.Balance(model, batch_size=job.batch_size, period=None if lane == KEPT else PERIOD)
    return DataLoader(data, batch_sampler=balance.sampler(data, seed=seed, drop_last=True)), balance


# -- how well it learns ------------------------------------------------------------------------------------------------


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
            nn.functional.cross_entropy(model(batch), classes).backward()
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
    write_figures(Path(sys.argv[1]), int(sys.argv[2]), job.ranks, functools.partial(figures, job))
