"""pruning-bookkeeping: what pruning costs beside training, by an epoch's bookkeeping, memory and a loader's epoch.

Bookkeeping: batches of 128 are handed out, their losses (CPU tensors that are there already, with a graph to go back
through) are observed, and who sits the next epoch out is decided. Every epoch but the first is pruned.

    iter, first batch        |  batch, observe, batch, observe, ...  last observe (which judges)
    decides and shuffles     |  a pruned epoch hands out fewer: this part is scaled up to all samples
    a                        |  b                                            a + b * samples / handed out

`losses.mean()`, which a loop without pruning has too, is measured alone and taken off; both are shown. One thread does
it all and waits for nothing, so its CPU time is its time on a machine with nothing else to do. Memory is the peak
of the resident set of a fresh process above what it was when the losses were there and the sampler was not.

A loader's epoch: a `TensorDataset` of small vectors, as it is and with a collate function that takes a millisecond a
batch, in this process and with two workers, under our sampler and under torch's `BatchSampler(RandomSampler)` that
hands out as many samples. The two take turns; the best epoch of each counts: CPU time again where there are no workers,
else wall time.
"""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, default_collate

import paceline
from experiments.core.claims import within
from experiments.core.running import prepare_process
from experiments.core.story import Numbers, Size, Step, Telling, experiment
from experiments.papers.pruning.setting import written
from paceline.quantities import counted
from paceline.reports.table import PlainTable

BATCH = 128
FEATURES = 8
COLLATE_MS = 1.0
LONG = 60_000  # epochs: no window and no run ends while we measure
MOST_MS = (15.0, 2000.0)  # few samples, many
MOST_MB = 200.0
MOST_RATIO = 1.02

POLICIES: MappingProxyType[str, Callable[[int], Any]] = MappingProxyType(
    {
        "fine-pruning": lambda samples: paceline.FinePruning(
            samples, batch_size=BATCH, window=LONG, starting_point=0, block=1, count=1, prune=0.3
        ),
        "info-batch": lambda samples: paceline.InfoBatch(samples, batch_size=BATCH, epochs=LONG),
    }
)
"""Every policy by name, such that each epoch but the first is pruned; one more is one more line."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """How many samples, and how many pruned epochs are measured."""

    samples: int
    epochs: int


@experiment(
    "pruning-bookkeeping",
    question="the bookkeeping of an epoch of pruning: time, memory, a loader's epoch",
    minutes=3,
    timed=True,
)
def pruning_bookkeeping(size: Size, *, repeat: int = 8) -> Telling:
    if repeat < 1:
        raise ValueError(f"repeat must be at least 1 (repeat={repeat})")
    toy = Case(samples=2_000, epochs=3), Case(samples=4_000, epochs=3)
    few, many = size.pick(toy, (Case(samples=50_000, epochs=20), Case(samples=10_000_000, epochs=4)))
    kinds = list(product(size.pick((0,), (0, 2)), (False, True)))  # workers, whether collating takes long
    steps = len(POLICIES) * (2 + len(kinds))
    books, loaders = list[Bookkeeping](), list[LoaderEpochs]()
    for case, policy in product((few, many), POLICIES):
        yield Step(f"{policy}, {case.samples:,} samples", steps)
        books.append(bookkeeping(policy, case) if size.toy else in_fresh_process(policy, case))
    for (workers, slow), policy in product(kinds, POLICIES):
        yield Step(f"{policy}, {counted(workers, 'worker')}", steps)
        turns = size.pick(1, repeat)
        loaders.append(loader_epochs(policy, samples=few.samples, workers=workers, slow_collate=slow, turns=turns))

    for case, most in zip((few, many), MOST_MS, strict=True):
        yield from tell_books([book for book in books if book.case == case], most)
    yield from tell_memory([book for book in books if book.case == many])
    yield from tell_loaders(loaders, few.samples)
    yield Numbers({"bookkeeping": [book.document for book in books], "loaders": [each.document for each in loaders]})


def tell_books(books: Sequence[Bookkeeping], most: float) -> Telling:
    """Yield the time of an epoch, and whether it is within the bar."""
    case, rows = books[0].case, []
    for book in books:
        best = book.best
        parts = (best.decide_seconds, best.rest_seconds, book.all_seconds, book.mean_seconds, book.own_seconds)
        rows.append((book.policy, f"{best.handed_out:,}", *(f"{1000 * seconds:.1f}" for seconds in parts)))
        text, write = (
            f"{book.policy}, bookkeeping of {case.samples:,} samples",
            partial(written, style=".1f", unit=" ms"),
        )
        yield within(text, 1000 * book.own_seconds, most=most, kind="bar", write=write)
    yield PlainTable(
        title=f"Bookkeeping of an epoch of {case.samples:,} samples, ms",
        headings=("policy", "handed out", "decide", "rest", "all", "mean()", "own"),
        rows=rows,
        caption=f"CPU time, best of {case.epochs} pruned epochs. Decide is before the first batch. All is scaled to "
        "all samples. Own is all - mean(), which a loop without pruning has too.",
    )


def tell_memory(books: Sequence[Bookkeeping]) -> Telling:
    """Yield the memory of a sampler, and whether it is within the bar."""
    samples, rows = books[0].case.samples, []
    for book in books:
        before, peak = book.bytes_before / 1e6, book.bytes_peak / 1e6
        rows.append((book.policy, *(f"{megabytes:.0f}" for megabytes in (before, peak, peak - before))))
        text, write = f"{book.policy}, memory for {samples:,} samples", partial(written, style=".0f", unit=" MB")
        yield within(text, peak - before, most=MOST_MB, kind="bar", write=write)
    yield PlainTable(
        title=f"Memory for {samples:,} samples, MB",
        headings=("policy", "before", "peak", "own"),
        rows=rows,
        caption=f"Resident set of a fresh process ({books[0].peak_by}); before: torch and the losses are there.",
    )


def tell_loaders(loaders: Sequence[LoaderEpochs], samples: int) -> Telling:
    """Yield the time of a loader's batch, and whether ours is within the bar of torch's."""
    rows = []
    for each in loaders:
        collate = f"{COLLATE_MS:g} ms" if each.slow_collate else "torch's"
        best = (f"{1000 * min(seconds):.3f}" for seconds in (each.theirs, each.ours))
        rows.append((each.policy, str(each.workers), collate, str(each.batches), *best, f"{each.ratio:.3f}"))
        text = f"{each.policy}, a loader's epoch to torch's, {counted(each.workers, 'worker')}, collate {collate}"
        yield within(text, each.ratio, most=MOST_RATIO, kind="bar", write=partial(written, style=".3f"))
    yield PlainTable(
        title=f"A DataLoader's epoch over {samples:,} vectors, ms a batch",
        headings=("policy", "workers", "collate", "batches", "torch's", "ours", "ratio"),
        rows=rows,
        caption=f"Best of {len(loaders[0].ours)} epoch(s) each, taken in turns, with as many samples. Ratio is "
        "ours / torch's. Without workers CPU time, with workers wall time.",
    )


# -- bookkeeping -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch: CPU time until the first batch was there, and from then on."""

    decide_seconds: float
    rest_seconds: float
    handed_out: int

    def all_seconds(self, samples: int) -> float:
        """Return the time as if all samples had been handed out.

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
        """The time of the best epoch, scaled to all samples."""
        return self.best.all_seconds(self.case.samples)

    @property
    def own_seconds(self) -> float:
        """The same without what a loop has that does not prune."""
        return self.all_seconds - self.mean_seconds

    @property
    def document(self) -> dict[str, Any]:
        """The raw numbers."""
        return dataclasses.asdict(self) | {"all_seconds": self.all_seconds, "own_seconds": self.own_seconds}


def in_fresh_process(policy: str, case: Case) -> Bookkeeping:
    """Measure a policy in a process of its own with one thread, where the memory means something."""
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), initializer=prepare_process, initargs=("",)
    ) as pool:
        return pool.submit(bookkeeping, policy, case).result()


def bookkeeping(policy: str, case: Case) -> Bookkeeping:
    """Measure a policy; in a process of its own the memory means something too."""
    losses = made_up_losses(case.samples)
    gc.collect()
    before, peak, peak_by = watch_memory()
    sampler = POLICIES[policy](case.samples)
    one_epoch(sampler, losses)  # there is nothing to judge by yet: no sample sits out
    measured = [(one_epoch(sampler, losses), seconds_of_means(losses)) for _ in range(case.epochs)]
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
    """Return losses batch by batch, each with a graph; as views, so nothing is freed before memory is watched."""
    values = torch.rand(samples, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return list(torch.split(values, BATCH))


def losses_of_batch(losses: list[Tensor], step: int, size: int) -> Tensor:
    """Return the losses of a batch; the last of an epoch has fewer, or one more, since none is of a single sample.

    >>> losses = list(torch.split(torch.arange(300), BATCH))
    >>> [len(losses_of_batch(losses, 1, size)) for size in (128, 7, 129)]
    [128, 7, 129]
    """
    each = losses[step]
    if len(each) == size:
        return each
    return each[:size] if size < len(each) else torch.cat(losses[step : step + 2])[:size]


def seconds_of_means(losses: list[Tensor]) -> float:
    """Return the CPU time of what a loop without pruning does with its losses."""
    begun = time.process_time()
    for each in losses:
        each.mean()
    return time.process_time() - begun


def one_epoch(sampler: Any, losses: list[Tensor]) -> Epoch:
    """Go through an epoch without training."""
    begun = time.process_time()
    batches = iter(sampler)
    batch = next(batches, None)
    first = time.process_time()
    step = handed_out = 0
    while batch is not None:
        sampler.observe(losses_of_batch(losses, step, len(batch)))
        step, handed_out = step + 1, handed_out + len(batch)
        batch = next(batches, None)
    return Epoch(decide_seconds=first - begun, rest_seconds=time.process_time() - first, handed_out=handed_out)


def watch_memory() -> tuple[int, Callable[[], int], str]:
    """Return the resident set now, what tells its peak from now on, and how that is known.

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


# -- loaders -----------------------------------------------------------------------------------------------------------


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

    @property
    def document(self) -> dict[str, Any]:
        """The raw numbers."""
        return dataclasses.asdict(self) | {"ratio": self.ratio}


def loader_epochs(policy: str, *, samples: int, workers: int, slow_collate: bool, turns: int) -> LoaderEpochs:
    """Time epochs in turns, after some that do not count: they start workers, and tell how many samples there are."""
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
    one_loader_epoch(ours, losses, sampler.observe)  # whole: there is nothing to judge by yet
    handed_out, _ = one_loader_epoch(ours, losses, sampler.observe)
    theirs = loader(BatchSampler(RandomSampler(range(samples), num_samples=handed_out), BATCH, drop_last=False))
    one_loader_epoch(theirs, losses, torch.mean)
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        sides = [(ours, sampler.observe, found[0]), (theirs, torch.mean, found[1])]
        for side, observe, seconds in sides if turn % 2 else reversed(sides):
            seconds.append(one_loader_epoch(side, losses, observe)[1])
    return LoaderEpochs(
        policy=policy,
        workers=workers,
        slow_collate=slow_collate,
        batches=-(-handed_out // BATCH),
        ours=found[0],
        theirs=found[1],
    )


def collate_slowly(samples: list[Any]) -> Any:
    """Collate as torch does, and work on for a millisecond in all: about what small images take."""
    until = time.process_time() + COLLATE_MS / 1000
    together = default_collate(samples)
    while time.process_time() < until:
        pass
    return together


def one_loader_epoch(
    loader: DataLoader[Any], losses: list[Tensor], observe: Callable[[Tensor], Tensor]
) -> tuple[int, float]:
    """Return how many samples came, and the seconds a batch: of the processor, where no worker has a part in it."""
    clock = time.perf_counter if loader.num_workers else time.process_time
    begun = clock()
    step = samples = 0
    for (vectors,) in loader:
        observe(losses_of_batch(losses, step, len(vectors)))
        step, samples = step + 1, samples + len(vectors)
    return samples, (clock() - begun) / step
