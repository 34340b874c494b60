"""Carries out the orders of one rank's averaging state: begins averages, polls or waits for them, merges them.

    step boundary     forward, backward      step boundary     ...               flush
    | begin 0         | (0 on its way)       | merge 0, begin 1                  | wait, merge, until all are here

    at every step boundary:  state.handle(Stepped) -> Begin?             replica.pack_change, transport.send
                             the average is done?  -> Averaged -> Merge  replica.merge, then Begin the next
                                                                         replica.catch_up

A rank waits only where its state orders `Wait`. Every wait has a timeout, whose error names the rank that did not come.

Where gradients are averaged (ssgd), a rank in a flush brings no gradient, but takes the step of the others with their
mean gradient, by its own learning rate and momentum, so it drifts from them. If an average was of some ranks only, the
flush therefore ends with a broadcast of the parameters, from the lowest rank that brought a gradient to the last such
average. All ranks read the same windows, so all take part in it.

    rank 0   step 0   step 1   step 2                     flush ──┐ its parameters, to all
    rank 1   step 0   flush ·· along ·· along ···················<┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from paceline.codecs import NotFiniteError
from paceline.distributed import name_ranks
from paceline.distributed.collectives import PendingCollective
from paceline.drivers.averaging.transport import DIGIT, AverageHeader, AveragingError, PendingAverage, Transport
from paceline.drivers.ranks.group import RankGroup
from paceline.drivers.ranks.heartbeats import FailureDetector, Heartbeats
from paceline.events import Averaged, Begin, Happening, Merge, Order, Release, Standing, Stepped, Wait, Window
from paceline.exchanges import Trouble
from paceline.strategies.averaging import AveragingState
from paceline.training.replica import Flat, GradientReplica, Replica

SLICE_SECONDS = 0.5  # of a wait, between two looks at who is alive
NOBODY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedAverage:
    """One average that is merged: every rank's window, and this rank's moments, by its `time.perf_counter()`.

        started          begun            done        merged
        |### window #####|~~~ on its way ~~|           |
                         |### the next window #########|          merged at the first step boundary after it was done

    >>> MergedAverage(number=0, windows=(Window(steps=3),), started=0.0, begun=1.0, done=1.5, merged=1.75).brought
    3
    """

    number: int
    windows: tuple[Window, ...]
    started: float
    begun: float
    done: float
    merged: float

    @property
    def brought(self) -> int:
        """The steps of all ranks that are in it."""
        return sum(window.brought for window in self.windows)


OnAverage = Callable[[MergedAverage], None]


class AveragingLoop:
    """Carries out what an averaging state orders; each wait for other ranks is in a context of `waiting`."""

    def __init__(
        self,
        state: AveragingState,
        replica: Replica | GradientReplica,
        transport: Transport,
        *,
        group: RankGroup,
        heartbeats: Heartbeats,
        detector: FailureDetector,
        parameters: Sequence[torch.Tensor],
        on_average: OnAverage,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._state, self._replica, self._transport = state, replica, transport
        self._group, self._heartbeats, self._detector = group, heartbeats, detector
        self._parameters, self._on_average, self._waiting = list(parameters), on_average, waiting
        self.pending: PendingAverage | None = None
        self._collective: PendingCollective | None = None  # the last one that is no average
        self.stepped = False  # since everybody was last at the same place
        self.ahead = NOBODY  # ssgd: the rank (its index in the group) whose parameters the next flush broadcasts
        self.waited_seconds = 0.0
        self._open_since = time.perf_counter()  # the open window
        self._sent_window = (self._open_since, self._open_since)  # when the window on its way started and was sent

    @property
    def under_way(self) -> bool:
        """Whether a collective is under way."""
        collectives = (self.pending.collective if self.pending else None, self._collective)
        return any(each is not None and not each.done() for each in collectives)

    @torch.no_grad()
    def handle(self, event: Happening) -> None:
        """Do what a step, or something that was asked for, leads to."""
        self.stepped = self.stepped or isinstance(event, Stepped)
        before = self.pending  # an average that begins in this call is polled from the next step on
        self._carry_out(self._state.handle(event))
        if before is not None and self.pending is before and self._is_done(before):
            self._carry_out(self._merge(before))
        self._replica.catch_up()

    def wait_for(self, collective: PendingCollective, what: str) -> None:
        """Wait for a collective that all ranks come to, and that is no average."""
        self._collective, begun, number = collective, time.perf_counter(), self._state.averages - 1
        with self._waiting():
            while not collective.done():
                collective.wait(SLICE_SECONDS)
                if not collective.done():
                    self._detector.check(number, begun, what)
        self.waited_seconds += time.perf_counter() - begun
        with self._detector.naming_lost(what):
            collective.check()

    def _carry_out(self, orders: list[Order]) -> None:
        while orders:
            match orders[0]:
                case Begin() as order:
                    self._begin(order)
                case Wait():
                    orders = [orders[0], *self._wait_and_merge(), *orders[1:]]
                case Merge() as order:  # a Merge answers Averaged, and `_merge` has carried it out already
                    raise AveragingError(f"average {order.number} cannot be merged: it is not done")
                case Release() as order:
                    self._release(order)
            orders = orders[1:]

    def _release(self, order: Release) -> None:
        self.stepped = False
        if order.standing is Standing.SETTLING or self.ahead == NOBODY:
            return
        vector, place, self.ahead = self._replica.shared, self.ahead, NOBODY
        self.wait_for(self._group.start_broadcast(vector, place), "the end of a flush")
        Flat(self._parameters, self._replica.dtype).write(vector)

    # -- one average -----------------------------------------------------------------------------------------------

    def _begin(self, order: Begin) -> None:
        now = time.perf_counter()
        self._sent_window = (self._open_since, now)
        if order.window.standing is not Standing.SETTLING:
            self._open_since = now
        self._replica.pack_change(self._transport.message, scale=order.scale, brings=order.window.brought > 0)
        self.pending = self._transport.send(order.number, order.window)
        self._heartbeats.entered = order.number + 1

    def _wait_and_merge(self) -> list[Order]:
        pending = self.pending
        if pending is None:
            raise AveragingError("there is no average to wait for")
        began = time.perf_counter()
        with self._waiting():
            while not self._is_done(pending):
                pending.collective.wait(SLICE_SECONDS)
        self.waited_seconds += time.perf_counter() - began
        return self._merge(pending)

    def _is_done(self, pending: PendingAverage) -> bool:
        """Whether it can be finished; raises where a rank is gone, or has not come for too long."""
        number = self._state.averages - 1
        with self._detector.naming_lost(f"average {number}"):
            done = pending.poll()
        if not done:
            self._detector.check(number, self._sent_window[1], f"average {number}")
        return done

    def _merge(self, pending: PendingAverage) -> list[Order]:
        """Merge an average that is done; return what else is to be done then."""
        number = self._state.averages - 1
        with self._detector.naming_lost(f"average {number}"):
            headers, total = pending.finish()
        self._check_headers(number, headers)
        self.pending, windows = None, tuple(header.window for header in headers)
        orders = self._state.handle(Averaged(number=number, windows=windows))
        if orders and isinstance(orders[0], Merge):
            self._replica.merge(total, weight=orders[0].weight, open_steps=orders[0].open_steps)
            brought = [place for place, window in enumerate(windows) if window.brought]
            if isinstance(self._replica, GradientReplica) and 0 < len(brought) < len(windows):
                self.ahead = brought[0]
            orders = orders[1:]
        (started, begun), now = self._sent_window, time.perf_counter()
        done = now if pending.collective.done_at is None else pending.collective.done_at
        self._on_average(
            MergedAverage(number=number, windows=windows, started=started, begun=begun, done=done, merged=now)
        )
        return orders

    def _check_headers(self, number: int, headers: Sequence[AverageHeader]) -> None:
        """Raise if a rank could not bring what it had, or is in another average; all ranks read the same headers."""
        by_rank = dict(zip(self._group.ranks, headers, strict=True))
        if any(header.number != number % DIGIT for header in headers):
            places = ", ".join(f"rank {rank} in average {header.number}" for rank, header in by_rank.items())
            raise AveragingError(f"the ranks have loaded different checkpoints: {places}")
        who = name_ranks(rank for rank, header in by_rank.items() if header.trouble)
        what = "gradient" if self._state.member.averages == "gradients" else "change"
        if any(header.trouble == Trouble.NOT_FINITE for header in headers):
            raise NotFiniteError(
                f"{who}: the {what} is {self._transport.unsendable} in average {number}; nothing of it was merged. "
                "Lower the learning rate or clip"
            ) from self._transport.failure
        if who:
            raise AveragingError(
                f"{who}: the {what} could not be encoded in average {number}; the reason is with {who}"
            ) from self._transport.failure
