"""What `pruning-overhead` times: epochs of bookkeeping alone, and epochs of a loader under our sampler and torch's."""

from __future__ import annotations

import dataclasses
import gc
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, default_collate

import paceline

BATCH = 128
FEATURES = 8
COLLATE_MS = 1.0
LONG = 60_000  # epochs: no window and no run ends while we measure

POLICIES: MappingProxyType[str, Callable[[int], Any]] = MappingProxyType(
    {
        "fine-pruning": lambda samples: paceline.FinePruning(
            samples, batch_size=BATCH, window=LONG, starting_point=0, block=1, count=1, prune=0.3
        ),
        "info-batch": lambda samples: paceline.InfoBatch(samples, batch_size=BATCH, epochs=LONG),
    }
)
"""Every policy by name, such that each epoch but the first is pruned; one more is one more line."""


# -- bookkeeping -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """How many samples, and how many pruned epochs are measured."""

    samples: int
    epochs: int


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch: CPU time until the first batch was there, and from then on."""

    decide_seconds: float
    rest_seconds: float
    handed_out: int

    def all_seconds(self, samples: int) -> float:
        """As if all samples had been handed out.

        >>> Epoch(decide_seconds=1, rest_seconds=2, handed_out=50).all_seconds(100)
        5.0
        """
        return self.decide_seconds + self.rest_seconds * samples / self.handed_out


@dataclass(frozen=True, kw_only=True)
class Bookkeeping:
    """What was measured of one policy."""

    policy: str
    case: Case
    epochs: list[Epoch]
    mean_seconds: float
    bytes_before: int
    bytes_peak: int
    peak_by: str

    @property
    def best(self) -> Epoch:
        """The epoch that cost least."""
        return min(self.epochs, key=lambda epoch: epoch.all_seconds(self.case.samples))

    @property
    def all_seconds(self) -> float:
        """Of the best epoch, scaled to all samples."""
        return self.best.all_seconds(self.case.samples)

    @property
    def own_seconds(self) -> float:
        """Without what a loop has that does not prune."""
        return self.all_seconds - self.mean_seconds

    def document(self) -> dict[str, Any]:
        """The raw numbers."""
        return dataclasses.asdict(self) | {"all_seconds": self.all_seconds, "own_seconds": self.own_seconds}


def bookkeeping(policy: str, case: Case) -> Bookkeeping:
    """Measure a policy; in a process of its own the memory means something too."""
    losses = made_up_losses(case.samples)
    gc.collect()
    before, peak, peak_by = watch_memory()
    sampler = POLICIES[policy](case.samples)
    one_epoch(sampler, losses)  # nothing to judge by yet: nobody sits out
    measured = [(one_epoch(sampler, losses), _means(losses)) for _ in range(case.epochs)]
    return Bookkeeping(
        policy=policy,
        case=case,
        epochs=[epoch for epoch, _ in measured],
        mean_seconds=min(means for _, means in measured),
        bytes_before=before,
        bytes_peak=peak(),
        peak_by=peak_by,
    )


def made_up_losses(samples: int) -> list[Tensor]:
    """Batch by batch, each with a graph to go back through; views, so nothing is freed before memory is watched."""
    values = torch.rand(samples, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return list(torch.split(values, BATCH))


def _means(losses: list[Tensor]) -> float:
    begun = time.process_time()
    for each in losses:
        each.mean()
    return time.process_time() - begun


def one_epoch(sampler: Any, losses: list[Tensor]) -> Epoch:
    """An epoch without training."""
    begun = time.process_time()
    batches = iter(sampler)
    batch = next(batches, None)
    first = time.process_time()
    step = handed_out = 0
    while batch is not None:
        size = len(batch)
        each = losses[step]
        sampler.observe(each if len(each) == size else each[:size])
        step, handed_out = step + 1, handed_out + size
        batch = next(batches, None)
    return Epoch(decide_seconds=first - begun, rest_seconds=time.process_time() - first, handed_out=handed_out)


# -- memory ----------------------------------------------------------------------------------------------------------


def watch_memory() -> tuple[int, Callable[[], int], str]:
    """The resident set now, what tells its peak from now on, and how that is known.

    Linux can forget an earlier peak. Elsewhere the peak until now stands for what is there now, and what fits below it
    is not seen.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return _status("VmRSS"), lambda: _status("VmHWM"), "VmHWM, reset before"
    except (OSError, KeyError):
        return _highest(), _highest, "ru_maxrss"


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(name)


def _highest() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# -- loaders ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoaderEpochs:
    """Seconds a batch, epoch by epoch, of both sides."""

    policy: str
    workers: int
    slow_collate: bool
    batches: int
    ours: list[float]
    theirs: list[float]

    @property
    def ratio(self) -> float:
        """Our best beside theirs."""
        return min(self.ours) / min(self.theirs)

    def document(self) -> dict[str, Any]:
        """The raw numbers."""
        return dataclasses.asdict(self) | {"ratio": self.ratio}


def loader_epochs(policy: str, *, samples: int, workers: int, slow_collate: bool, turns: int) -> LoaderEpochs:
    """Epochs in turns, after some that do not count: they start workers, and tell how many samples ours hands out."""
    vectors = TensorDataset(torch.zeros(samples, FEATURES))
    losses = made_up_losses(samples)
    sampler = POLICIES[policy](samples)

    def loader(batches: Any) -> DataLoader[Any]:
        return DataLoader(
            vectors,
            batch_sampler=batches,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=collate_slowly if slow_collate else default_collate,
        )

    ours = loader(sampler)
    _loader_epoch(ours, losses, sampler.observe)  # whole: nothing to judge by yet
    handed_out, _ = _loader_epoch(ours, losses, sampler.observe)
    theirs = loader(BatchSampler(RandomSampler(range(samples), num_samples=handed_out), BATCH, drop_last=False))
    _loader_epoch(theirs, losses, torch.mean)
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        sides = [(ours, sampler.observe, found[0]), (theirs, torch.mean, found[1])]
        for side, observe, seconds in sides if turn % 2 else reversed(sides):
            seconds.append(_loader_epoch(side, losses, observe)[1])
    return LoaderEpochs(
        policy=policy,
        workers=workers,
        slow_collate=slow_collate,
        batches=-(-handed_out // BATCH),
        ours=found[0],
        theirs=found[1],
    )


def collate_slowly(samples: list[Any]) -> Any:
    """What torch does, and more work, a millisecond in all: about what small images take."""
    until = time.process_time() + COLLATE_MS / 1000
    together = default_collate(samples)
    while time.process_time() < until:
        pass
    return together


def _loader_epoch(
    loader: DataLoader[Any], losses: list[Tensor], observe: Callable[[Tensor], Tensor]
) -> tuple[int, float]:
    """How many samples came, and the seconds a batch: of the processor, where no worker has a part in it."""
    clock = time.perf_counter if loader.num_workers else time.process_time
    begun = clock()
    step = samples = 0
    for (vectors,) in loader:
        size = len(vectors)
        each = losses[step]
        observe(each if len(each) == size else each[:size])
        step, samples = step + 1, samples + size
    return samples, (clock() - begun) / step
