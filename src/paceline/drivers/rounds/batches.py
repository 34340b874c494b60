"""A rank's batches: epochs that end at the same round on all ranks, and batches that come in blocks.

An epoch is so many rounds. A fast rank takes a batch in each of them; a slow one takes fewer, for it is in several
rounds with one batch. What it has not taken comes first in its next epoch:

    rounds        |  0  |  1  |  2  |  3  ||  4  |  5  |  6  |  7  ||
    fast rank       b0    b1    b2    b3     b0    b1    b2    b3         its second pass over its data
    slow rank       b0    b1 --------------  b2 ----------  b3            its first pass goes on
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paceline.drivers.rounds.loader_place import PLACE, go_on, place_of, state_of

log = logging.getLogger("paceline.rounds")


class BatchSource:
    """The batches of a loader, pass after pass, also where an epoch ends within one; with a `state`, from there on.

    >>> source = BatchSource([1, 2, 3])
    >>> [source.next() for _ in range(5)]
    [1, 2, 3, 1, 2]
    >>> source.mark_trained()
    >>> BatchSource([1, 2, 3], source.state_dict()).next()
    3
    """

    def __init__(self, loader: Iterable[Any], state: Mapping[str, Any] | None = None) -> None:
        self.loader, self._state = loader, state
        self._batches: Iterator[Any] | None = None
        self._place: dict[str, Any] | None = None  # what the order of this pass follows from
        self._drawn = self._trained = 0  # batches of this pass

    def next(self) -> Any:
        """Return the next batch; after the last of a pass comes the first of the next."""
        for _ in range(3 if self._state else 2):  # a pass that is gone on with may have come to its end
            if self._batches is None:
                self._batches = self._begin()
            for batch in self._batches:
                self._drawn += 1
                return batch
            self._batches = None
        raise ValueError("the loader has no batch: an epoch needs at least one on every rank")

    def _begin(self) -> Iterator[Any]:
        state, self._state = self._state, None
        self._drawn = self._trained = 0
        if state is not None and state.get("trained"):
            try:
                rest = go_on(self.loader, state)
            except ValueError as error:
                log.warning(
                    "the loader begins at its first batch, and repeats some of the %d that were trained before the "
                    "checkpoint: %s. Rounds go on within a pass of torch's own samplers, of ours, and of loaders with "
                    "a state_dict (torchdata's StatefulDataLoader)",
                    state["trained"],
                    error,
                )
            else:
                self._place = {name: state[name] for name in PLACE if name in state}
                self._drawn = self._trained = state["trained"]
                return rest
        self._place = place_of(self.loader)
        return iter(self.loader)

    def mark_trained(self) -> None:
        """Note that the batch that was handed out last is trained."""
        self._trained = self._drawn

    def state_dict(self) -> dict[str, Any]:
        """Return where this pass stands."""
        if self._place is None:
            return dict(self._state or {})
        return state_of(self.loader, self._place, self._trained)


def rounds_in(loader: Iterable[Any], rounds: int | None) -> int:
    """Return the rounds of an epoch as one rank sees them: as many as its loader has batches, unless given.

    >>> rounds_in([1, 2, 3], None), rounds_in(iter([]), 7)
    (3, 7)
    """
    if rounds is None:
        try:
            rounds = len(loader)  # type: ignore[arg-type]
        except TypeError:
            raise ValueError(
                "this loader does not know how many batches it has: give epoch(loader, rounds=...)"
            ) from None
    try:
        number = operator.index(rounds)
    except TypeError:
        raise ValueError(f"rounds must be a whole number (rounds={rounds!r})") from None
    if number < 1:
        raise ValueError(f"an epoch needs at least one round (rounds={rounds})")
    return number


class OpenBatch:
    """The batch that a rank computes: how many blocks it has, how many are done, and since when it computes.

    A script that does not cut its batches computes one block, since it took the model. `samples` is the size of the
    whole batch, 0 where nobody has said it, and `first_sample` where it begins in the rank's order.

    >>> batch = OpenBatch()
    >>> batch.begin(4)
    >>> batch.done = 3
    >>> batch.end(held_since=0.0)[:2]
    (3, 4)
    """

    def __init__(self) -> None:
        self.blocks, self.done = 1, 0
        self.samples = self.first_sample = 0
        self.left_early = False  # the loop over its blocks was not followed to its end
        self._began: float | None = None

    def begin(self, blocks: int, *, samples: int = 0, first_sample: int = 0) -> None:
        """Begin a batch of so many blocks."""
        self.samples, self.first_sample = samples, first_sample
        self.blocks, self.done, self.left_early, self._began = blocks, 0, False, time.perf_counter()

    def end(self, *, held_since: float) -> tuple[int, int, float]:
        """Return the blocks done, all blocks, and the seconds that they took; the next batch has one block again."""
        began = held_since if self._began is None else self._began
        ended = min(self.done or self.blocks, self.blocks), self.blocks, time.perf_counter() - began
        self.blocks, self.done, self._began = 1, 0, None
        self.samples = self.first_sample = 0
        return ended
