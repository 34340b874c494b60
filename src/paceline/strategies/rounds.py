"""The round all synchronous strategies share: who is in, when it closes, what is late.

      round 4 is open            closes at the K-th gradient (here K = 3): Step, then Send to all alive
    |--------------------------------|-------------- round 5 --------------|--> time
    w0 ############>.................|##############>......................|    fresh: waits until the round closes
    w1 #################>............|####################>................|    fresh
    w2 #############################>|####################################>|    fresh, and the K-th
    w3 ##################################>#################################|    late: arrives when round 5 is open

    # computes   > its gradient arrives   . waits for the next model

A gradient of the open round is *fresh*, one of the round before is *late*, an older one is dropped.
The strategies differ in K (`full`: all N workers) and in what becomes of late gradients: `full` and `fastest-k` drop
them (`Rounds` itself), `lgc` takes them into the next update (`CompensatedRounds`).

A mean of gradients is the mean over their samples: a gradient of b_i samples weighs b_i / (sum of b). Where batches are
equal, or nobody says how large they are, that is 1 / K. With shares by speed (`shares/`) a round that has closed may
assign new sizes, for the batches that begin after it: Step, Assign, Send.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.decoding import Count, WorkerNumber
from paceline.events import Action, Assign, Drop, Event, GradientArrived, Joined, Left, LossSeen, Send, Share, Step
from paceline.strategies.choose_k import Chooser
from paceline.strategies.forms import Seconds, Workers
from paceline.strategies.shares import EqualShares, SharesBySpeed, ShareState

Sizes = tuple[tuple[WorkerNumber, Count], ...]


class RoundStrategy:
    """The base of the synchronous strategies: one round is one step of the model."""

    __slots__ = ()

    def updates_per_round(self, workers: int) -> int:
        """Return the steps of the model in one round."""
        return 1


class Rounds:
    """The state of a synchronous strategy, which drops late gradients; a subclass may make use of them.

    >>> from paceline.strategies.choose_k import FixedK
    >>> rounds = Rounds(chooser=FixedK(1), warmup_rounds=0)
    >>> _ = rounds.handle(Joined(worker=0)), rounds.handle(Joined(worker=1))
    >>> rounds.handle(GradientArrived(worker=1, version=0))[0].fresh
    (Share(worker=1, version=0, weight=1.0),)
    """

    def __init__(self, *, chooser: Chooser, warmup_rounds: int, shares: SharesBySpeed | None = None) -> None:
        self.version = 0
        self.chooser = chooser
        self.warmup_rounds = warmup_rounds
        self.shares: ShareState = EqualShares() if shares is None else shares.start()
        self._alive: set[int] = set()
        self._fresh: dict[int, int] = {}  # workers whose gradients are in, and the samples of their batches
        self._sizes: dict[int, int] = {}  # samples of the last batch of each worker that has said it
        self._opened_seconds = 0.0
        self._previous_opened_seconds = 0.0

    @property
    def k(self) -> int:
        """How many gradients close the round that is open."""
        # A worker that delivered and then died counts: else its death would let `full` close without one still alive.
        members = max(1, self._members())
        if self.version < self.warmup_rounds:
            return members
        return min(self.chooser.k(members), members)

    def handle(self, event: Event) -> list[Action]:
        """Take in what happened; return what is to be done."""
        match event:
            case Joined():
                if not self._alive:
                    self._opened_seconds = event.at_seconds
                self._alive.add(event.worker)
                return [Send(workers=(event.worker,))]
            case Left():
                self._alive.discard(event.worker)
                self._sizes.pop(event.worker, None)
                self.chooser.forget(event.worker)
                self.shares.forget(event.worker)
                return self._close_if_due(event.at_seconds)
            case GradientArrived():
                return self._arrived(event)
            case LossSeen():
                self.chooser.loss_seen(event)
                return []

    def _arrived(self, event: GradientArrived) -> list[Action]:
        """Keep a fresh gradient and see whether it closes the round; pass on a late one; drop any other."""
        if event.version > self.version:
            raise ValueError(
                f"worker {event.worker} sent a gradient of version {event.version}, "
                f"but the model is at version {self.version}"
            )
        if event.worker not in self._alive:
            return [_drop(event, "its worker is not a member")]
        # When older rounds opened is not remembered; but seconds that the worker itself measured can always be used.
        if event.version >= self.version - 1 or event.work_seconds is not None:
            opened = self._opened_seconds if event.version == self.version else self._previous_opened_seconds
            self.chooser.arrived(event, round_seconds=event.at_seconds - opened)
        self.shares.arrived(event)
        if event.samples:
            self._sizes[event.worker] = event.samples
        if event.version == self.version:
            if event.worker in self._fresh:
                return [_drop(event, "it came twice")]
            if not event.whole:
                return [_drop(event, "it is incomplete and its round is still open")]
            self._fresh[event.worker] = event.samples
            return self._close_if_due(event.at_seconds)
        if event.version == self.version - 1:
            return self._late_arrived(event)
        return [_drop(event, "it missed the round after its own too")]

    def _close_if_due(self, at_seconds: float) -> list[Action]:
        """Close the round if K gradients are in, or those of everybody alive: then nobody is left to wait for."""
        if not self._fresh or (len(self._fresh) < self.k and not self._alive <= self._fresh.keys()):
            return []
        step = self._step(at_seconds)
        self.chooser.closed(self._fresh.keys())
        self._round_closed()
        assigned = self.shares.closed(version=self.version, members=self._alive) if self._alive else None
        self.version += 1
        self._fresh = {}
        self._previous_opened_seconds, self._opened_seconds = self._opened_seconds, at_seconds
        send = Send(workers=tuple(sorted(self._alive)))
        return [step, send] if assigned is None else [step, Assign(samples=tuple(sorted(assigned.items()))), send]

    def _step(self, at_seconds: float) -> Step:
        return Step(version=self.version, fresh=self._fresh_shares(), at_seconds=at_seconds)

    def _fresh_shares(self) -> tuple[Share, ...]:
        sizes = comparable(self._fresh)
        total = sum(sizes.values())
        return tuple(
            Share(worker=worker, version=self.version, weight=size / total) for worker, size in sorted(sizes.items())
        )

    def _members(self) -> int:
        """Return N of the open round: everybody alive, and those who delivered before they died."""
        return len(self._alive | self._fresh.keys())

    def _late_arrived(self, event: GradientArrived) -> list[Action]:
        return [_drop(event, "its round had closed")]

    def _round_closed(self) -> None:
        """Remember what the next round needs of this one, whose sets are still in place."""

    @property
    def form(self) -> dict[str, Any]:
        """The types of a `state_dict` that was kept as JSON."""
        return {
            "version": Count,
            "alive": Workers,
            "fresh": Workers,
            "opened_seconds": Seconds,
            "previous_opened_seconds": Seconds,
            "chooser": self.chooser.form,
            "fresh_sizes": Sizes,
            "sizes": Sizes,
            "shares": self.shares.form,
        }

    @property
    def added(self) -> dict[str, Any]:
        """What a `state_dict` of an earlier release lacks: there all batches were equal."""
        return {"fresh_sizes": [], "sizes": [], "shares": self.shares.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on later, as plain values."""
        return {
            "version": self.version,
            "alive": sorted(self._alive),
            "fresh": sorted(self._fresh),
            "opened_seconds": self._opened_seconds,
            "previous_opened_seconds": self._previous_opened_seconds,
            "chooser": self.chooser.state_dict(),
            "fresh_sizes": sorted((worker, size) for worker, size in self._fresh.items() if size),
            "sizes": sorted(self._sizes.items()),
            "shares": self.shares.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        state = self.added | state
        self.version = state["version"]
        self._alive = set(state["alive"])
        said = {int(worker): int(size) for worker, size in state["fresh_sizes"]}
        self._fresh = {worker: said.get(worker, 0) for worker in state["fresh"]}
        self._sizes = {int(worker): int(size) for worker, size in state["sizes"]}
        self._opened_seconds = state["opened_seconds"]
        self._previous_opened_seconds = state["previous_opened_seconds"]
        self.chooser.load_state_dict(state["chooser"])
        self.shares.load_state_dict(state["shares"])


def comparable(sizes: Mapping[int, int]) -> dict[int, float]:
    """Return the sizes of batches with a number for those that are not said (0): the mean of the others, or 1.

    >>> comparable({0: 30, 1: 10, 2: 0}), comparable({0: 0, 1: 0})
    ({0: 30, 1: 10, 2: 20.0}, {0: 1, 1: 1})
    """
    said = [size for size in sizes.values() if size]
    usual = sum(said) / len(said) if said else 1
    return {worker: size or usual for worker, size in sizes.items()}


def _drop(event: GradientArrived, reason: str) -> Drop:
    return Drop(worker=event.worker, version=event.version, reason=reason)
