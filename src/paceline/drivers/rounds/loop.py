"""A rank's side of the rounds: its threads, its waits, and what they end with.

    training thread     report ──> store ──> deciding thread (on one rank) ──> store ──> exchange thread (on every rank)
                        wait <──────────────────────────────── updates, releases, failures ──┘

Every wait of the training thread is in slices, and between two of them it looks whether a rank is gone. Reports leave
by a thread of their own, since a store whose machine is gone answers nobody (`Outbox`). What a failure leads to: the
rank that finds it writes `Failed` as the next notice, so all ranks end with the same reason; threads that wait in the
store wake up, and end.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from paceline.distributed import RankGoneError, name_ranks
from paceline.distributed.stores import StoreGather, launcher_keeps_store, private_store
from paceline.drivers.ranks.group import ROUNDS, RankGroup
from paceline.drivers.ranks.heartbeats import FailureDetector, Heartbeats
from paceline.drivers.rounds.decider import Decider, DecidingThread
from paceline.drivers.rounds.exchange import Exchange, over_connections
from paceline.drivers.rounds.messages import AllWaiting, Failed, GoOn, Mailbox, Outbox, Overdue, Report, Stop, Waiting
from paceline.errors import PacelineError
from paceline.strategies import LGC, Strategy
from paceline.traces.journal import Arrival
from paceline.training.contributions import RankGradients, VectorPool
from paceline.training.rank_model import RankModel
from paceline.training.round_sums import RoundSum

log = logging.getLogger("paceline.rounds")

WARN_SECONDS = 10.0  # after which a wait in a flush is told
ANSWER_SECONDS = 10.0  # within which the rank that decides says who is missing
SLICE_SECONDS = 0.5  # of a wait, between two looks at who is alive
JOIN_SECONDS, LOST_JOIN_SECONDS = 5.0, 1.0
LINGER_SECONDS, LINGER_LOOK_SECONDS = 3.0, 0.02
DECIDER = 0  # the place in the group of the rank that decides


class RoundsError(PacelineError, RuntimeError):
    """The rounds of these ranks cannot go on: they have ended, or the ranks do not fit together.

    >>> raise RoundsError("rounds have ended: this was closed")
    Traceback (most recent call last):
    paceline.drivers.rounds.loop.RoundsError: rounds have ended: this was closed
    """


class RoundsDivergedError(RoundsError):
    """Gradients are not finite any more.

    >>> raise RoundsDivergedError("the gradients of all ranks are not finite in round 7: lower the learning rate")
    Traceback (most recent call last):
    paceline.drivers.rounds.loop.RoundsDivergedError: the gradients of all ranks are not finite in round 7: lower ...
    """


_ERRORS: dict[str, type[Exception]] = {"gone": RankGoneError, "late": RankGoneError, "diverged": RoundsDivergedError}


class Deadline:
    """When a wait has taken too long; it may be extended once, for an answer.

    >>> Deadline(600.0).is_over
    False
    """

    def __init__(self, seconds: float) -> None:
        self._at, self.extended = time.monotonic() + seconds, False

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() > self._at

    def extend(self, seconds: float) -> None:
        """Let it pass so many seconds from now."""
        self._at, self.extended = time.monotonic() + seconds, True


class RoundLoop:
    """The threads of one rank, and how its training thread waits for them; `name` is that of these rounds in the store.

    None of them runs before `start`, or the first report. `deciding` is the thread that decides, on one rank, and None
    on the others.
    """

    def __init__(
        self,
        model: RankModel,
        strategy: Strategy,
        group: RankGroup,
        heartbeats: Heartbeats,
        name: str,
        *,
        round_sum: RoundSum,
        device: torch.device,
        most_behind: int,
        timeout_seconds: float,
    ) -> None:
        ranks, rank = group.ranks, group.rank
        self._group, self._timeout_seconds, self.started = group, timeout_seconds, False
        self._zero, self._earlier_seconds = time.monotonic(), 0.0
        self.place = ranks.index(rank)
        self.vectors = VectorPool(model.layout.size, model.dtype, device)
        self.gradients = RankGradients(self.place, model.layout, self.vectors, compensates=isinstance(strategy, LGC))
        self._reports = Mailbox(private_store(name, own_connection=True))
        self._words = StoreGather(
            private_store(f"{name}/words"),
            self.place,
            len(ranks),
            timeout_seconds=timeout_seconds,
            ranks=ranks,
            while_waiting=lambda: self._check_others("an epoch"),
        )
        self._heartbeats = heartbeats
        self._detector = FailureDetector(self._heartbeats, ranks, rank, timeout_seconds=timeout_seconds, purpose=ROUNDS)
        self.exchange = Exchange(
            Mailbox(private_store(name, own_connection=True)),
            self.gradients,
            self.vectors,
            round_sum,
            group.group,
            ranks=ranks,
            rank=rank,
            device=device,
            heartbeats=self._heartbeats,
            detector=self._detector,
            most_behind=most_behind,
            timeout_seconds=timeout_seconds,
        )
        self._outbox = Outbox(self.exchange.end_with)
        self.deciding: DecidingThread | None = None
        if self.place == DECIDER:
            inbox = Mailbox(private_store(name, own_connection=True))
            failed = self.exchange.end_with
            self.deciding = DecidingThread(Decider(strategy, ranks), inbox, clock=self.seconds, failed=failed)

    def seconds(self) -> float:
        """Return the seconds since the first round began, also those before a checkpoint."""
        return time.monotonic() - self._zero if self.started else self._earlier_seconds

    def start(self) -> None:
        """Begin the first round."""
        self.started, self._zero = True, time.monotonic() - self._earlier_seconds
        self.exchange.start()
        if self.deciding is not None:
            self.deciding.start(self._earlier_seconds)

    def report(self, message: Report) -> None:
        """Tell the rank that decides."""
        self._outbox.send(partial(self._deliver, message))

    def _deliver(self, message: Report) -> None:
        with over_connections():
            self._reports.report(message)

    def gather(self, doing: str, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every rank; all must call it. `doing` completes "waited for rank 1 to ..."."""
        return self._words.gather(doing, list(numbers))

    # -- arrivals, on the rank that decides ----------------------------------------------------------------------------

    def next_arrivals(self) -> tuple[Arrival, ...]:
        """Return the arrivals of the next round that is applied, or flush; none on a rank that does not decide."""
        return () if self.deciding is None else self.deciding.arrivals.popleft()

    # -- waits ---------------------------------------------------------------------------------------------------------

    def wait_for_round(self, version: int) -> None:
        """Wait until the update of this round is there."""
        deadline = Deadline(self._timeout_seconds)
        while not self._wait(f"round {version}", until=lambda: self.exchange.next_version > version):
            if deadline.is_over:
                self._overdue(deadline, version, flushing=False)

    def meet(
        self, waiting: Waiting, *, while_waiting: Callable[[], None], released: Callable[[AllWaiting], None]
    ) -> bool:
        """Wait until all ranks wait, and leave, if this one does; `released` is called each time that all wait.

        Rounds that others still close meanwhile are applied (`while_waiting`), and are signs of life. Return whether
        all have met: not where this rank waited `again`, and another has trained on.
        """
        self.report(waiting)
        deadline, warning = Deadline(self._timeout_seconds), Deadline(WARN_SECONDS)
        while True:
            while_waiting()
            release = self.exchange.next_release()
            if isinstance(release, GoOn):
                return False
            if release is not None:
                released(release)
                if release.leaving or not waiting.leaving:
                    return True
            elif self._wait("a flush", until=lambda: self.exchange.has_come):
                deadline = Deadline(self._timeout_seconds)
            elif deadline.is_over:
                self._overdue(deadline, self.exchange.next_version, flushing=True)
            elif warning.is_over and not warning.extended:
                warning.extend(math.inf)
                self._warn_of_waiting()

    def _warn_of_waiting(self) -> None:
        who = name_ranks(self.deciding.decider.training) if self.deciding is not None else "others"
        log.warning(
            "rank %d has waited %g s in a flush, and %s still train: do all ranks call flush, state_dict and close?",
            self._group.rank,
            WARN_SECONDS,
            who,
        )

    def _overdue(self, deadline: Deadline, version: int, *, flushing: bool) -> None:
        """Ask the rank that decides who is missing: it tells all. Where it does not answer, it is the one."""
        if deadline.extended:
            who = f"rank {self._group.ranks[DECIDER]}, which decides, does not answer"
            raise RankGoneError(f"round {version} did not close in {self._timeout_seconds:g} s, and {who}")
        self.report(Overdue(rank=self.place, version=version, seconds=self._timeout_seconds, flushing=flushing))
        deadline.extend(ANSWER_SECONDS)

    def _wait(self, what: str, *, until: Callable[[], bool]) -> bool:
        """Wait for the exchange thread, for a while, and return whether it has come; raise if a rank is gone."""
        if self.exchange.wait(SLICE_SECONDS, until):
            return True
        self._check_others(what)
        return False

    def _check_others(self, what: str) -> None:
        self.check_failure(what)
        gone = self._heartbeats.find_gone()
        if gone:
            raise RankGoneError(f"{gone} ({what} waited for it)")

    def check_failure(self, what: str) -> None:
        """Raise if the rounds have failed; `what` is what this rank was about."""
        failed = self.exchange.failure
        if failed is None:
            return
        if failed.kind == "lost":  # a connection: that somebody is gone is known, and who it is shows in a moment
            with self._detector.naming_lost(what):
                raise RuntimeError(failed.reason)
        raise _ERRORS.get(failed.kind, RoundsError)(failed.reason)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """End the threads and leave the group; `reason` is why before the time, "" if all ranks have left together."""
        lost = self._heartbeats.store_lost  # and with it the threads that wait in it
        self._heartbeats.stop(reason)
        if self.started:
            self.exchange.stop()
            if reason and not lost:
                self._outbox.send(partial(self._tell_failure, reason))
        join_seconds = LOST_JOIN_SECONDS if lost else JOIN_SECONDS
        self._outbox.close(join_seconds)
        if self.started:
            self.exchange.join(join_seconds)
            if self.deciding is not None:
                self.deciding.join(join_seconds)
        # A sum that has failed counts as under way: gloo throws again where such a group is destroyed, and aborts.
        self._group.close(pending=bool(reason) or self.exchange.under_way)

    def _tell_failure(self, reason: str) -> None:
        """Wake all, with the reason. A rank that keeps the store stays until the others have read it, for a while."""
        failed = Failed(reason=f"rank {self._group.rank} has left: {reason}")
        self._reports.post_failure(failed, first=self.exchange.notices_read)
        left, deadline = self._reports.count_left(1), time.monotonic() + LINGER_SECONDS
        if self.deciding is not None:
            self._reports.report(Stop())
        while self._group.rank == 0 and not launcher_keeps_store() and left < self._group.world:
            if time.monotonic() > deadline:
                break
            time.sleep(LINGER_LOOK_SECONDS)
            left = self._reports.count_left(0)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def decider_state(self) -> dict[str, Any]:
        """Return the state of the decider, between two rounds; empty on a rank that does not decide."""
        return {} if self.deciding is None else self.deciding.decider.state_dict()

    def load(
        self,
        version: int,
        *,
        strategy: Strategy,
        round_sum: RoundSum,
        gradients: dict[str, Any],
        decider: dict[str, Any],
        seconds: float,
    ) -> None:
        """Go on from a checkpoint of this version, by its strategy and sums; one that is refused changes nothing."""
        deciding = None if self.deciding is None else Decider(strategy, self._group.ranks)
        if deciding is not None:
            deciding.load_state_dict(decider, version=version)
        self.gradients.load_state_dict(gradients)  # the last that may refuse
        if self.deciding is not None and deciding is not None:
            self.deciding.decider = deciding
        self.exchange.round_sum, self.exchange.next_version = round_sum, version
        self._earlier_seconds = seconds
