"""Who takes part: seats (a worker's number, its shard of the data, its next batch), and what is known of each worker.

A shard is what one worker of the recipe holds. Workers get the number of a shard that nobody holds, the one they had
before if it is free; a worker for whom there is no such shard left gets a number above, and shares the shard that has
the fewest holders. Whoever takes a number goes on with its batches where the one before stopped. Where batches are by
speed that is a place in the number's order of samples, which only moves forward: by the samples of every batch that has
arrived, whatever became of it.

Nothing here reads a clock or a socket.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.decoding import Count, WorkerNumber, decode
from paceline.errors import PacelineError
from paceline.traces.run_status import WorkerStatus

MOST_SENT = 64  # models whose sending is remembered, of those that a worker has not answered
_Numbers = tuple[tuple[WorkerNumber, Count], ...]


class NoSeatError(PacelineError, ValueError):
    """There are as many workers as there may be.

    >>> raise NoSeatError("20 workers are here, and that is the most")
    Traceback (most recent call last):
    paceline.drivers.served.membership.NoSeatError: 20 workers are here, and that is the most
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A worker's place: its number, the shard it holds, the number of its first batch, and where that batch begins.

    `first_sample` counts where batches are by speed alone, and is 0 elsewhere.

    >>> Seat(worker=3, shard=3, first_draw=0).shard
    3
    """

    worker: int
    shard: int
    first_draw: int
    first_sample: int = 0


class Seats:
    """The seats of a run.

    >>> seats = Seats(shards=2, most=4)
    >>> [seats.take().worker for _ in range(3)], seats.take(wish=1).shard
    ([0, 1, 2], 1)
    >>> seats.release(1)
    >>> seats.take()
    Seat(worker=1, shard=1, first_draw=0, first_sample=0)
    """

    def __init__(self, *, shards: int, most: int) -> None:
        if not 1 <= shards <= most:
            raise ValueError(f"shards must be between 1 and the most workers (shards={shards}, most={most})")
        self.shards, self.most = shards, most
        self._held: dict[int, int] = {}
        self._next_draws: dict[int, int] = {}
        self._next_samples: dict[int, int] = {}  # where the next batch begins, where batches are by speed

    def take(self, wish: int | None = None) -> Seat:
        """Give a new worker a seat, the one it wishes if that is free."""
        if len(self._held) >= self.most:
            raise NoSeatError(f"{len(self._held)} workers are here, and that is the most (most_workers)")
        worker = wish if wish is not None and self._may_have(wish) else self._lowest_free()
        shard = worker if worker < self.shards else self._fewest_holders()
        self._held[worker] = shard
        return Seat(
            worker=worker,
            shard=shard,
            first_draw=self.next_draw(worker),
            first_sample=self.next_sample(worker),
        )

    def _may_have(self, wish: int) -> bool:
        if wish in self._held or wish >= self.most:
            return False
        return wish < self.shards or self._lowest_free() >= self.shards

    def _lowest_free(self) -> int:
        return next(number for number in range(self.most) if number not in self._held)

    def _fewest_holders(self) -> int:
        holders = Counter(self._held.values())
        return min(range(self.shards), key=lambda shard: (holders[shard], shard))

    def release(self, worker: int) -> None:
        """Free the seat of a worker."""
        self._held.pop(worker, None)

    def drawn(self, worker: int, draw: int, samples: int = 0) -> None:
        """Note that a worker's batch has arrived; whoever has its number next goes on after it.

        `samples` is its size where batches are by speed.
        """
        self._next_draws[worker] = max(draw + 1, self._next_draws.get(worker, 0))
        if samples:
            self._next_samples[worker] = self.next_sample(worker) + samples

    def next_draw(self, worker: int) -> int:
        """Return the number of a worker's first batch that has not arrived."""
        return self._next_draws.get(worker, 0)

    def next_sample(self, worker: int) -> int:
        """Return where a worker's first batch that has not arrived begins; 0 where batches are equal."""
        return self._next_samples.get(worker, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return how far each number has drawn; who is there is not part of it."""
        placed = {"next_samples": sorted(self._next_samples.items())} if self._next_samples else {}
        return {"next_draws": sorted(self._next_draws.items()), **placed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`, with every seat free."""
        self._held = {}
        self._next_draws = dict(decode(_Numbers, state["next_draws"], "next_draws"))
        self._next_samples = dict(decode(_Numbers, state.get("next_samples", ()), "next_samples"))


@dataclass(slots=True, kw_only=True)
class Member(WorkerStatus):
    """What the coordinator knows of a worker that takes part, or did."""

    seat: Seat
    host: str
    sent_version: int = -1
    sent_at: dict[int, float] = field(default_factory=dict)
    asked_samples: dict[int, int] = field(default_factory=dict)  # of the batch at each version of `sent_at`; 0: any
    most_asked: int = 0
    answered_version: int = -1

    @property
    def status(self) -> WorkerStatus:
        """A copy of its status."""
        return WorkerStatus(**{each.name: getattr(self, each.name) for each in fields(WorkerStatus)})

    def sent(self, version: int, now: float, samples: int = 0) -> None:
        """Note that it is sent this version of the model: the next, or the same for another try.

        `samples` is the size of the batch that it is asked for, where batches are by speed.
        """
        if version == self.sent_version or self.sent_version < 0:  # another try; or the first that it is sent
            self.answered_version = version - 1
        self.sent_version, self.most_asked = version, max(samples, self.most_asked)
        self.sent_at[version], self.asked_samples[version] = now, samples
        if len(self.sent_at) > MOST_SENT:  # it computes one of the first, and takes one of the last next
            self._forget(list(self.sent_at)[MOST_SENT // 2])

    def answered(self, version: int) -> None:
        """Note that its gradient of a version has come; it goes on with one of the newest that it was sent."""
        self.answered_version = version
        kept = [sent for sent in self.sent_at if sent > version][-MOST_SENT // 2 :]
        for sent in self.sent_at.keys() - set(kept):
            self._forget(sent)

    def _forget(self, version: int) -> None:
        del self.sent_at[version], self.asked_samples[version]

    def may_answer(self, version: int) -> bool:
        """Whether a gradient of this version can come: however many models it was sent since, it may compute it yet."""
        return self.answered_version < version <= self.sent_version

    def sent_seconds(self, version: int, now: float) -> float:
        """Return when it was sent a version; if that is not remembered, the one that is remembered before it."""
        times = [at for sent, at in self.sent_at.items() if sent <= version]
        return times[-1] if times else next(iter(self.sent_at.values()), now)

    @property
    def owes(self) -> bool:
        """Whether it has a model that it has not answered."""
        return self.alive and self.sent_version > self.answered_version
