"""One rank's averages: begun as its course orders, looked at in passing, waited for, merged.

    step boundary     forward, backward      step boundary     ...               flush
    | begin 0         | (0 on its way)       | merge 0, begin 1                  | wait, merge, until all are here

Nothing waits but what the course orders to wait for; every wait has an end, and an error that names who did not come.

Where gradients are averaged, a rank that brings none takes the others' step along, by its own learning rate and its own
momentum: it drifts from them. So if an average was of some ranks only, a flush ends with a broadcast, from the lowest
of those that brought something to the last such average. All ranks read the same windows, so all come to it.

    rank 0   step 0   step 1   step 2                     flush ──┐ its parameters, to all
    rank 1   step 0   flush ·· along ·· along ···················<┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from paceline.distributed.collectives import PendingCollective
from paceline.drivers.collective.beats import Beats
from paceline.drivers.collective.carriers import Carrier
from paceline.drivers.collective.flights import Flight, MessageError
from paceline.drivers.collective.history import Average
from paceline.drivers.collective.meeting import Meeting
from paceline.drivers.collective.watch import Watch
from paceline.events import Averaged, Begin, Happening, Merge, Order, Release, Standing, Stepped, Wait, Window
from paceline.strategies.averaging import Course
from paceline.training.replica import Flat, GradientReplica, Replica

SLICE_SECONDS = 0.5  # of a wait, between two looks at who is alive
NOBODY = -1
OnAverage = Callable[[Average], None]


class Traffic:
    """Carries out what a course orders."""

    def __init__(
        self,
        course: Course,
        replica: Replica | GradientReplica,
        carrier: Carrier,
        *,
        meeting: Meeting,
        beats: Beats,
        watch: Watch,
        parameters: Sequence[torch.Tensor],
        on_average: OnAverage,
    ) -> None:
        self._course, self._replica, self._carrier = course, replica, carrier
        self._meeting, self._beats, self._watch = meeting, beats, watch
        self._parameters, self._on_average = list(parameters), on_average
        self._what = "gradient" if course.member.averages == "gradients" else "change"
        self.flight: Flight | None = None
        self._other: PendingCollective | None = None  # a collective that is no average
        self.stepped = False  # since everybody was last at the same place
        self.ahead = NOBODY  # the place of a rank whose parameters all are to take in the next flush
        self._open_since = time.perf_counter()  # the open window
        self._departed = (self._open_since, self._open_since)  # the window in flight: when it started and left

    @property
    def under_way(self) -> bool:
        """Whether a collective is."""
        return (self.flight is not None and self.flight.under_way) or (
            self._other is not None and not self._other.done()
        )

    @torch.no_grad()
    def moment(self, event: Happening) -> None:
        """A step boundary, or something asked for."""
        self.stepped = self.stepped or isinstance(event, Stepped)
        before = self.flight  # one that begins now is looked at from the next moment on: it has hardly left
        self._carry_out(self._course.handle(event))
        if before is not None and self.flight is before and self._over(before):
            self._carry_out(self._land(before))
        self._replica.catch_up()

    def together(self, pending: PendingCollective, what: str) -> None:
        """Wait for a collective that all ranks come to, and that is no average."""
        self._other, begun, number = pending, time.perf_counter(), self._course.averages - 1
        while not pending.done():
            pending.wait(SLICE_SECONDS)
            if not pending.done():
                self._watch.look(number, begun=begun, what=what)
        try:
            pending.check()
        except RuntimeError as error:
            self._watch.lost(what, error)

    def _carry_out(self, orders: list[Order]) -> None:
        while orders:
            match orders[0]:
                case Begin() as order:
                    self._begin(order)
                case Wait():
                    orders = [orders[0], *self._waited_for(), *orders[1:]]
                case Merge() as order:
                    raise RuntimeError(f"average {order.number} cannot be merged: it has not landed")
                case Release() as order:
                    self._release(order)
            orders = orders[1:]

    def _release(self, order: Release) -> None:
        self.stepped = False
        if order.standing is Standing.SETTLING or self.ahead == NOBODY:
            return
        vector, place, self.ahead = self._replica.shared, self.ahead, NOBODY
        self.together(self._meeting.start_broadcast(vector, place), "the end of a flush")
        Flat(self._parameters, self._replica.dtype).write(vector)

    # -- one average -----------------------------------------------------------------------------------------------

    def _begin(self, order: Begin) -> None:
        now = time.perf_counter()
        self._departed = (self._open_since, now)
        if order.window.standing is not Standing.SETTLING:
            self._open_since = now
        self._replica.leave(self._carrier.room, scale=order.scale, brings=order.window.brought > 0)
        self.flight = self._carrier.depart(order.number, order.window)
        self._beats.begun(order.number + 1)

    def _waited_for(self) -> list[Order]:
        flight = self.flight
        if flight is None:
            raise RuntimeError("there is no average to wait for")
        while not self._over(flight):
            flight.wait(SLICE_SECONDS)
        return self._land(flight)

    def _over(self, flight: Flight) -> bool:
        """Whether it can land; raises where somebody is gone, or has not come for too long."""
        number = self._course.averages - 1
        try:
            if flight.poll():
                return True
        except MessageError:
            raise
        except RuntimeError as error:
            self._watch.lost(f"average {number}", error)
        self._watch.look(number, begun=self._departed[1])
        return False

    def _land(self, flight: Flight) -> list[Order]:
        """Merge an average that is done; what else is to be done then."""
        number = self._course.averages - 1
        try:
            said, total = flight.land()
        except MessageError:
            raise
        except RuntimeError as error:
            self._watch.lost(f"average {number}", error)
        self._watch.check(number, said, self._what, self._carrier.cause)
        self.flight, windows = None, tuple(each.window for each in said)
        orders = self._course.handle(Averaged(number=number, windows=windows))
        if orders and isinstance(orders[0], Merge):
            self._replica.merge(total, weight=orders[0].weight, open_steps=orders[0].open_steps)
            self._note_ahead(windows)
            orders = orders[1:]
        self._tell(number, windows, flight.done_at)
        return orders

    def _note_ahead(self, windows: tuple[Window, ...]) -> None:
        brought = [place for place, window in enumerate(windows) if window.brought]
        if isinstance(self._replica, GradientReplica) and 0 < len(brought) < len(windows):
            self.ahead = brought[0]

    def _tell(self, number: int, windows: tuple[Window, ...], done_at: float | None) -> None:
        now = time.perf_counter()
        started, begun = self._departed
        done = now if done_at is None else done_at
        self._on_average(Average(number=number, windows=windows, started=started, begun=begun, done=done, merged=now))
