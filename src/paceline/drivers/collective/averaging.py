"""Averaging among the ranks of a training script: the driver of a worker's course on torch.distributed.

    with paceline.HPSGD(model, optimizer) as sync:
        for inputs, targets in loader:
            loss_function(model(inputs), targets).backward()
            optimizer.step()           # <- a step boundary: averages begin and are merged here
            optimizer.zero_grad()
        sync.flush()                   # all ranks equal: evaluate, save

    step boundary     forward, backward      step boundary     ...               flush
    | begin 0         | (0 on its way)       | merge 0, begin 1                  | wait, merge, until all are here

The script's loop stays as it is: a hook on the optimiser tells the course of each step, and carries out what it orders.
Nothing waits but what the course orders to wait for; every wait has an end, and an error that names who did not come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from paceline.codecs import Codec
from paceline.codecs.identity import Identity
from paceline.drivers.collective.beats import Beats, beats_store
from paceline.drivers.collective.carriers import Carrier, Gathered, Summed
from paceline.drivers.collective.common import described, first_line
from paceline.drivers.collective.flights import Flight
from paceline.drivers.collective.history import Average
from paceline.drivers.collective.meeting import Meeting
from paceline.drivers.collective.states import check_state, member_description
from paceline.drivers.collective.tracked import AVERAGED, accepted
from paceline.drivers.collective.watch import Watch
from paceline.events import Asked, Averaged, Begin, Happening, Merge, Order, Release, Standing, Stepped, Wait, Window
from paceline.strategies.averaging import Averaging, Course
from paceline.training.replica import GradientReplica, Replica

SLICE_SECONDS = 0.5  # of a wait, between two looks at who is alive
OnAverage = Callable[[Average], None]


class Averager:
    """Averages what the ranks of a process group train; `paceline.HPSGD` and its sisters are this with a member chosen.

    Every rank constructs it, with equal settings, after its model is on its device; all begin with the model of the
    group's first rank. Any optimiser of torch.optim, any number of steps on each rank, and gradients accumulated over
    any number of backward passes. `steps` counts this rank's, `merged_steps` those of all ranks that are in the shared
    model, `averages` the averages done, and `sent_bytes` what this rank has given to them, however many ranks it went
    to. After an error nothing is averaged any more.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        member: Averaging,
        *,
        codec: Codec | str = "identity",
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = 600.0,
        silence_seconds: float = 15.0,
        seed: int = 0,
        record: bool = False,
        on_average: OnAverage | None = None,
    ) -> None:
        for name, value in (("timeout_seconds", timeout_seconds), ("silence_seconds", silence_seconds)):
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be above 0 and finite ({name}={value})")
        self.member, self._optimizer = member, optimizer
        refusal: ValueError | None = None
        try:
            self._tracked, self._codec = accepted(model, optimizer, codec)
        except ValueError as error:  # the others must hear of it: they would wait
            refusal = error
        self._meeting = Meeting(process_group, timeout_seconds, refusal)
        ranks, rank = self._meeting.ranks, self._meeting.rank
        try:
            name = self._meeting.agree(self._description(), self._tracked.device)
            self._meeting.begin_equal(self._tracked.everything())
        except BaseException:
            self._meeting.leave(pending=False)
            raise
        self._course, self._replica = Course(member, len(ranks)), self._make_replica()
        self._carrier = self._make_carrier(seed)
        self._beats = Beats(beats_store(name), ranks, rank, silence_seconds=silence_seconds)
        limits = {"timeout_seconds": timeout_seconds, "silence_seconds": silence_seconds}
        self._watch = Watch(self._beats, ranks, rank, **limits)
        self._beats.start()
        self.steps = self.merged_steps = 0
        self.history: list[Average] = []
        self._record, self._on_average = record, on_average
        self._flight: Flight | None = None
        self._stepped = False  # since everybody was last at the same place
        self._along = False  # the optimiser's step is our own: a step of the others, taken along
        self._ended = False
        self._failure: BaseException | None = None
        self._open_since = time.perf_counter()  # the open window
        self._departed = (self._open_since, self._open_since)  # the window in flight: when it started and left
        hooked = optimizer.register_step_pre_hook if self._gradients else optimizer.register_step_post_hook
        self._hook = hooked(self._on_step)
        AVERAGED.add(optimizer)

    def __repr__(self) -> str:
        place = f"rank {self._meeting.rank}, {self._meeting.world} ranks"
        return f"{type(self).__name__}({self.member.name}; {place}; {self.steps:,} steps, {self.averages:,} averages)"

    @property
    def averages(self) -> int:
        """The averages done so far."""
        return self._course.averages - self._course.in_flight

    @property
    def sent_bytes(self) -> int:
        """What this rank has given to averages so far, each byte counted once."""
        return self._carrier.sent_bytes

    @property
    def shared(self) -> dict[str, torch.Tensor]:
        """A copy of the model that all ranks agree on, as of the last average merged here: parameters by name."""
        parameters = self._tracked.parameters
        if self._meeting.world == 1:
            return {name: p.detach().clone() for name, p in zip(self._tracked.names, parameters, strict=True)}
        parts = torch.split(self._replica.shared, [parameter.numel() for parameter in parameters])
        return {
            name: part.view(parameter.shape).to(parameter.dtype, copy=True)
            for name, part, parameter in zip(self._tracked.names, parts, parameters, strict=True)
        }

    # -- everybody at one place ------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Merge all that every rank has done; all ranks are equal then. All of them must call it."""
        self._tracked.check()
        self._moment(Asked(standing=Standing.FLUSHING))

    def close(self) -> None:
        """Flush, and end: training is plain from here on. All ranks must call it; the end of a `with` does."""
        if self._ended:
            return
        try:
            if self._failure is None:
                self._tracked.check()
                self._moment(Asked(standing=Standing.LEAVING))
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._fail(error)
            self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._hook.remove()
            self._beats.stop(_reason(self._failure))
            self._meeting.leave(pending=self._flight is not None and self._flight.under_way)
            AVERAGED.discard(self._optimizer)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._beats.stop(_reason(error))

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on later besides its model and its optimiser; call it before theirs.

        If a rank has stepped since the last flush (or the last state_dict), all ranks must call it: they come to the
        same average first, and may merge it, but no window is closed. Else it is a look, and one rank may look alone.
        """
        if self._failure is not None:
            raise RuntimeError("averaging has ended with an error: it has no state") from self._failure
        if self._stepped:
            self._tracked.check()
            self._moment(Asked(standing=Standing.SETTLING))
        return {
            "about": self._description()
            | {"rank": str(self._meeting.rank), "number of ranks": str(self._meeting.world)},
            "course": self._course.state_dict(),
            "replica": self._replica.state_dict(),
            "codec": self._carrier.state_dict(),
            "steps": self.steps,
            "merged_steps": self.merged_steps,
            "sent_bytes": self.sent_bytes,
            "checksum": self._tracked.checksum(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this rank's `state_dict`; load the model and the optimiser before, but after the construction."""
        about = self._description() | {"rank": str(self._meeting.rank), "number of ranks": str(self._meeting.world)}
        check_state(state, about, self._tracked.checksum())
        self._course.load_state_dict(state["course"])
        self._replica.load_state_dict(state["replica"])
        self._carrier.load_state_dict(state["codec"])
        self.steps, self.merged_steps = int(state["steps"]), int(state["merged_steps"])
        self._carrier.sent_bytes = int(state["sent_bytes"])
        self._stepped = False

    # -- orders ----------------------------------------------------------------------------------------------------

    def _on_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._along:
            return
        if self._gradients and any(given is not None for given in (*args[1:], *kwargs.values())):
            raise ValueError("ssgd averages the gradients before the step: it cannot be given a closure")
        self.steps += 1
        self._stepped = True
        self._moment(Stepped())

    @torch.no_grad()
    def _moment(self, event: Happening) -> None:
        """A step boundary, or something asked for."""
        if self._failure is not None:
            raise RuntimeError(f"averaging has ended with an error: {first_line(self._failure)}") from self._failure
        if self._ended:
            raise RuntimeError("averaging has ended: this was closed")
        before = self._flight  # one that begins now is looked at from the next moment on: it has hardly left
        try:
            self._carry_out(self._course.handle(event))
            if before is not None and self._flight is before and self._over(before):
                self._carry_out(self._land(before))
            self._replica.catch_up()
        except BaseException as error:
            self._fail(error)
            raise

    def _carry_out(self, orders: list[Order]) -> None:
        while orders:
            match orders[0]:
                case Begin() as order:
                    self._begin(order)
                case Wait():
                    orders = [orders[0], *self._waited_for(), *orders[1:]]
                case Merge() as order:
                    raise RuntimeError(f"average {order.number} cannot be merged: it has not landed")
                case Release():
                    self._stepped = False
            orders = orders[1:]

    # -- one average -----------------------------------------------------------------------------------------------

    def _begin(self, order: Begin) -> None:
        now = time.perf_counter()
        self._departed = (self._open_since, now)
        if order.window.standing is not Standing.SETTLING:
            self._open_since = now
        self._replica.leave(self._carrier.room, scale=order.scale, brings=order.window.brought > 0)
        self._flight = self._carrier.depart(order.number, order.window)
        self._beats.begun(order.number + 1)

    def _waited_for(self) -> list[Order]:
        flight = self._flight
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
        except RuntimeError as error:
            self._watch.lost(number, error)
        self._watch.look(number, begun=self._departed[1])
        return False

    def _land(self, flight: Flight) -> list[Order]:
        """Merge an average that is done; what else is to be done then."""
        number = self._course.averages - 1
        try:
            said, total = flight.land()
        except RuntimeError as error:
            self._watch.lost(number, error)
        self._watch.check(number, said, "gradient" if self._gradients else "change", self._carrier.cause)
        self._flight, windows = None, tuple(each.window for each in said)
        orders = self._course.handle(Averaged(number=number, windows=windows))
        if orders and isinstance(orders[0], Merge):
            self._replica.merge(total, weight=orders[0].weight, open_steps=orders[0].open_steps)
            orders = orders[1:]
        self._tell(number, windows, flight.done_at)
        return orders

    def _tell(self, number: int, windows: tuple[Window, ...], done_at: float | None) -> None:
        now = time.perf_counter()
        started, begun = self._departed
        done = now if done_at is None else done_at
        average = Average(number=number, windows=windows, started=started, begun=begun, done=done, merged=now)
        self.merged_steps += average.brought
        if self._record:
            self.history.append(average)
        if self._on_average is not None:
            self._on_average(average)

    # -- parts -----------------------------------------------------------------------------------------------------

    @property
    def _gradients(self) -> bool:
        return self.member.averages == "gradients"

    def _description(self) -> dict[str, str]:
        return {"model": self._tracked.description(), "codec": described(self._codec)} | member_description(self.member)

    def _make_replica(self) -> Replica | GradientReplica:
        parameters, buffers, workers = self._tracked.parameters, self._tracked.buffers, self._meeting.world
        if self._gradients:
            return GradientReplica(parameters, buffers, workers=workers, step=self._step_along)
        return Replica(parameters, buffers, self.member, workers=workers)

    def _step_along(self) -> None:
        self._along = True
        try:
            with torch.enable_grad():
                self._optimizer.step()
        finally:
            self._along = False

    def _make_carrier(self, seed: int) -> Carrier:
        replica, device, group = self._replica, self._tracked.device, self._meeting.group
        shapes = [parameter.shape for parameter in self._tracked.parameters]
        if isinstance(self._codec, Identity):
            changes = sum(shape.numel() for shape in shapes)
            return Summed(replica.size, changes, replica.dtype, device, group)
        return Gathered(self._codec, shapes, replica.size, device, group, seed=seed)


def _reason(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {first_line(error)}"
