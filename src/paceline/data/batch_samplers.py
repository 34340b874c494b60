"""What our batch samplers have in common: how loaders meet them, and what their samples are counted from.

torchdata's StatefulDataLoader keeps its own place, by asking the sampler and the iterator over it for their states just
when a batch is drawn:

    workers draw ahead      batch 1  2  3  4  5 drawn, state of each kept           sampler: 0 are trained
    the script trains                1                  loader.state_dict(): what was kept for batch 1

So a sampler whose state says what was *trained* is asked too early, and its answer would repeat batches. The iterator
is asked by such a loader alone, and is loaded after the sampler: it says where the pass stands after what was *drawn*,
or refuses where that is not all there is to know.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler


class DrawnBatches(Iterator[list[int]]):
    """The batches of a pass: `begin` begins one, `state` says where it stands, `load` lets one begin elsewhere.

    It is made by the `__iter__` of a sampler, which refuses to be the `sampler=` of a loader: torch would take its
    batches for single samples.

    >>> class Rest(Sampler[list[int]]):
    ...     place = 0
    ...     def __iter__(self):
    ...         return DrawnBatches(self, lambda: iter([[number] for number in range(self.place, 3)]), dict, self.load)
    ...     def load(self, state):
    ...         self.place = state["next"]
    >>> batches = iter(Rest())
    >>> batches.load_state_dict({"next": 2})
    >>> list(batches)
    [[2]]
    """

    def __init__(
        self,
        sampler: Sampler[list[int]],
        begin: Callable[[], Iterator[list[int]]],
        state: Callable[[], dict[str, Any]],
        load: Callable[[Mapping[str, Any]], None],
    ) -> None:
        asking = sys._getframe(2).f_locals.get("self")  # torch's BatchSampler, or torchdata's, asks its `sampler`
        if getattr(asking, "sampler", None) is sampler and hasattr(asking, "batch_size"):
            kind = type(sampler).__name__
            raise TypeError(
                f"{kind} makes whole batches, and it was given as sampler=, which makes single samples: give "
                "DataLoader(dataset, batch_sampler=...), and leave batch_size, shuffle and drop_last out"
            )
        self._begin, self._state, self._load = begin, state, load
        self._batches = begin()

    def __next__(self) -> list[int]:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Return where the pass stands after the batch that was drawn last."""
        return self._state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch that was drawn last when the state was asked for."""
        self._load(state)
        self._batches = self._begin()


def let_set_epoch_through(loader: DataLoader[Any]) -> None:
    """Let `loader.sampler.set_epoch(epoch)`, which DDP scripts have, say so to the loader's batch sampler.

    Beside a batch sampler a loader has a sampler of torch's too, of which nobody draws; it has no `set_epoch`.
    """
    set_epoch = getattr(loader.batch_sampler, "set_epoch", None)
    if set_epoch is not None and not hasattr(loader.sampler, "set_epoch"):
        vars(loader.sampler)["set_epoch"] = set_epoch


def count_of(data: Any, taker: str) -> int:
    """Return how many samples a data set has, or the number that was given in its place.

    >>> count_of(range(8), "InfoBatch"), count_of(8, "InfoBatch")
    (8, 8)
    >>> count_of(iter([]), "InfoBatch")
    Traceback (most recent call last):
    TypeError: InfoBatch takes a data set with a length, or a number of samples (this is a list_iterator)
    """
    kind = type(data).__name__
    if isinstance(data, IterableDataset):
        raise TypeError(
            f"{taker} hands out numbers of samples, and an IterableDataset has none ({kind}): give a data set with "
            "__getitem__ and __len__"
        )
    if isinstance(data, DataLoader):
        raise TypeError(
            f"give {taker} the data set, not a loader of it: {taker} makes the batches, the loader takes them"
        )
    if isinstance(data, Iterator) or not (isinstance(data, Sized) or hasattr(data, "__index__")):
        raise TypeError(f"{taker} takes a data set with a length, or a number of samples (this is a {kind})")
    return len(data) if isinstance(data, Sized) else data
