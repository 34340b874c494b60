"""Who is who: numbers, shards and how far each number has drawn.

A shard is what one worker of the recipe holds. Workers get the number of a shard that nobody holds, the one they had
before if it is free; a worker for whom there is no such shard left gets a number above, and shares the shard that has
the fewest holders. Whoever takes a number goes on with its batches where the one before stopped.

Nothing here reads a clock or a socket.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any


class NoRoom(ValueError):  # noqa: N818 - it is an answer, not a fault
    """There are as many workers as there may be.

    >>> raise NoRoom("20 workers are here, and that is the most")
    Traceback (most recent call last):
    paceline.drivers.served.roster.NoRoom: 20 workers are here, and that is the most
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A worker's place: its number, the shard it holds, the number of its first batch.

    >>> Seat(worker=3, shard=3, first_draw=0).shard
    3
    """

    worker: int
    shard: int
    first_draw: int


class Roster:
    """The seats of a run.

    >>> roster = Roster(shards=2, most=4)
    >>> [roster.seat().worker for _ in range(3)], roster.seat(wish=1).shard
    ([0, 1, 2], 1)
    >>> roster.leave(1)
    >>> roster.seat()
    Seat(worker=1, shard=1, first_draw=0)
    """

    def __init__(self, *, shards: int, most: int) -> None:
        if not 1 <= shards <= most:
            raise ValueError(f"shards must be between 1 and the most workers (shards={shards}, most={most})")
        self.shards, self.most = shards, most
        self._held: dict[int, int] = {}
        self._next_draws: dict[int, int] = {}

    @property
    def seated(self) -> int:
        """How many seats are taken."""
        return len(self._held)

    def seat(self, wish: int | None = None) -> Seat:
        """Give a newcomer a seat."""
        if len(self._held) >= self.most:
            raise NoRoom(f"{len(self._held)} workers are here, and that is the most (most_workers)")
        worker = wish if wish is not None and self._may_have(wish) else self._lowest_free()
        shard = worker if worker < self.shards else self._fewest_holders()
        self._held[worker] = shard
        return Seat(worker=worker, shard=shard, first_draw=self._next_draws.get(worker, 0))

    def _may_have(self, wish: int) -> bool:
        if wish in self._held or wish >= self.most:
            return False
        return wish < self.shards or self._lowest_free() >= self.shards

    def _lowest_free(self) -> int:
        return next(number for number in range(self.most) if number not in self._held)

    def _fewest_holders(self) -> int:
        holders = Counter(self._held.values())
        return min(range(self.shards), key=lambda shard: (holders[shard], shard))

    def leave(self, worker: int) -> None:
        """A seat is free again."""
        self._held.pop(worker, None)

    def drawn(self, worker: int, draw: int) -> None:
        """A worker's batch has arrived; whoever has its number next goes on after it."""
        self._next_draws[worker] = max(draw + 1, self._next_draws.get(worker, 0))

    def next_draw(self, worker: int) -> int:
        """The first batch of a number that has not arrived."""
        return self._next_draws.get(worker, 0)

    def state_dict(self) -> dict[str, Any]:
        """How far each number has drawn; who is there is not part of it."""
        return {"next_draws": sorted(self._next_draws.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`, with every seat free."""
        self._held = {}
        self._next_draws = {int(worker): int(draw) for worker, draw in state["next_draws"]}
