"""Batches by speed for ranks that take rounds: each takes its next samples from one order that all have in common.

Ranks in rounds are at different batches at the same time, and each draws its next one when it has room for it. So there
is no step of which every rank has its part, as under DDP; there is a counter in the launch's store, of how many samples
of the epoch are taken. A rank that wants b samples adds b to it, and what it was before is where they begin:

    counter   0          48               96      112          160 ...
    order     | rank 2   | rank 0         | rank 1 | rank 2     | rank 0 ...
              asked 48   asked 48           asked 16

Every sample is taken once in an epoch, whoever is fast and whatever the shares do meanwhile, and nobody has to agree
with anybody. Which rank takes which is an affair of time, as it is who is in time.

Where fewer than `fewest` samples would be left behind a batch, they are part of it: a block of one sample is too small
for BatchNorm. A rank that asks next finds the counter within these last samples, and knows that they are taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from paceline.data.batch_samplers import DrawnBatches, count_of
from paceline.decoding import Count, decode
from paceline.randomness import torch_generator

STATE = {"epoch": Count, "taken": Count, "samples": Count, "open": tuple[tuple[Count, Count, Count], ...]}


class SampleCounter:
    """How many samples of an epoch are taken, by all ranks together, in a store that they share.

    `data` are words for what is taken from; ranks that come with others are refused.
    """

    def __init__(self, store: Any, data: str = "") -> None:
        self._store = store
        found = store.compare_set("data", "", data).decode()
        if found != data:
            raise ValueError(f"all ranks must take batches of the same data: here it is {data}, elsewhere {found}")

    def take(self, epoch: int, samples: int) -> int:
        """Take so many samples of an epoch; return how many were taken before."""
        return int(self._store.add(str(epoch), samples)) - samples

    def begin_at(self, epoch: int, taken: int) -> None:
        """Let so many samples of an epoch count as taken, if nobody has taken one yet."""
        self._store.compare_set(str(epoch), "", str(taken))


class TakenBatches(Sampler[list[int]]):
    """A batch sampler of a rank in rounds; `RoundSync.sampler` makes it. `size` says how many samples come next.

    >>> from torch.distributed import HashStore
    >>> counter = SampleCounter(HashStore())
    >>> fast, slow = (TakenBatches(10, counter, lambda size=size: size, whole=4, seed=0) for size in (3, 1))
    >>> ours, theirs = iter(fast), iter(slow)
    >>> taken = [*next(ours), *next(theirs), *next(ours), *next(theirs), *next(ours)]
    >>> sorted(taken), list(ours), len(fast)
    ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [], 3)
    """

    def __init__(
        self,
        data: int | Sized,
        counter: SampleCounter,
        size: Callable[[], int],
        *,
        whole: int,
        fewest: int = 2,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.samples = count_of(data, "sync.sampler")
        if self.samples < 1:
            raise ValueError(f"a sampler needs at least one sample (samples={self.samples})")
        self._counter, self._size, self._whole, self._fewest = counter, size, whole, fewest
        self._shuffle, self._seed = shuffle, seed
        self._epoch = 0  # of the next pass
        self._again: deque[tuple[int, int, int]] = deque()  # batches of a state: taken before, and not trained
        self._open: deque[tuple[int, int, int]] = deque()  # (epoch, first, samples) of batches that are not trained

    def __len__(self) -> int:
        """Return how many rounds an epoch has, in which each rank computes a batch."""
        return -(-self.samples // self._whole)

    def __iter__(self) -> Iterator[list[int]]:
        return DrawnBatches(self, self._batches, self._refuse_to_be_saved, lambda state: None)

    def _refuse_to_be_saved(self) -> dict[str, Any]:
        raise ValueError(
            "a loader (torchdata's StatefulDataLoader) asks where sync.sampler() stands, and its place is part of "
            "sync.state_dict(): the batches that all ranks have taken are. Take torch.utils.data.DataLoader"
        )

    def _batches(self) -> Iterator[list[int]]:
        epoch, handed_out = self._epoch, bool(self._again)
        while self._again:
            yield self._batch(*self._again.popleft())
        order = self._order(epoch)
        while True:
            size = self._size()
            first = self._counter.take(epoch, size)
            if first == 0 or self.samples - first >= self._fewest:
                handed_out = True
                left = self.samples - first
                yield self._batch(epoch, first, size if left - size >= self._fewest else left, order)
                continue
            self._epoch = epoch + 1
            if handed_out:
                return
            epoch = self._epoch  # the others have taken all of it: this pass is of the next epoch
            order = self._order(epoch)

    def _batch(self, epoch: int, first: int, samples: int, order: torch.Tensor | None = None) -> list[int]:
        self._open.append((epoch, first, samples))
        order = self._order(epoch) if order is None else order
        return [int(index) for index in order[first : first + samples]]

    def _order(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self.samples)
        generator = torch_generator(self._seed, "rounds", "order", epoch)
        return torch.randperm(self.samples, generator=generator)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, for loops that call it: epochs count themselves, and ranks may be in different ones."""

    def mark_trained(self) -> None:
        """Note that the rank has computed the batch that was handed out longest ago."""
        if self._open:
            self._open.popleft()

    # -- going on later: all ranks at one place, between two flushes -------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands, and which of this rank's batches are taken and not trained."""
        taken = min(self.samples, self._counter.take(self._epoch, 0))
        return {
            "epoch": self._epoch,
            "taken": taken,
            "samples": self.samples,
            "open": [*self._open, *self._again],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from this rank's `state_dict`: first with the batches that it had taken."""
        held = self.check(state)
        self._epoch, self._again, self._open = held["epoch"], deque(held["open"]), deque()
        self._counter.begin_at(self._epoch, held["taken"])

    def check(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Refuse a state that does not fit; return what it holds."""
        held: dict[str, Any] = decode(STATE, dict(state), "the state of the sampler")
        if held["samples"] != self.samples:
            raise ValueError(f"this state is of {held['samples']} samples, and here there are {self.samples}")
        if any(first + samples > self.samples for _, first, samples in held["open"]):
            raise ValueError("a batch of this state is beyond the last sample: it is damaged")
        return held
