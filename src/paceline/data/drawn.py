"""Passes of batch samplers as torchdata's StatefulDataLoader asks for them.

It keeps its own place, by asking the sampler and the iterator over it for their states just when a batch is drawn:

    workers draw ahead      batch 1  2  3  4  5 drawn, state of each kept           sampler: 0 are trained
    the script trains                1                  loader.state_dict(): what was kept for batch 1

So a sampler whose state says what was *trained* is asked too early, and its answer would repeat batches. The iterator
is asked by such a loader alone, and is loaded after the sampler: it says where the pass stands after what was *drawn*,
or refuses where that is not all there is to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class DrawnBatches(Iterator[list[int]]):
    """The batches of a pass: `begin` begins one, `state` says where it stands, `load` lets one begin elsewhere.

    >>> place = {"next": 0}
    >>> batches = DrawnBatches(lambda: iter([[number] for number in range(place["next"], 3)]), dict, place.update)
    >>> batches.load_state_dict({"next": 2})
    >>> list(batches)
    [[2]]
    """

    def __init__(
        self,
        begin: Callable[[], Iterator[list[int]]],
        state: Callable[[], dict[str, Any]],
        load: Callable[[Mapping[str, Any]], None],
    ) -> None:
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
