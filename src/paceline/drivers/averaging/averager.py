"""The public interface of averaging: `HPSGD`, `LocalSGD` and the others, each around a model and its optimiser.

    with paceline.HPSGD(model, optimizer) as sync:
        for inputs, targets in loader:
            loss_function(model(inputs), targets).backward()
            optimizer.step()           # <- a step boundary: averages begin and are merged here
            optimizer.zero_grad()
        sync.flush()                   # all ranks equal: evaluate, save

The script's loop stays as it is: a hook on the optimiser tells of each step (loop.py does what is to be done then).
Where somebody watches the steps of the model (traces/step_clock.py), its clock hears of the waits for averages, and of
each average that is begun and merged in the same step, as a bucket.

    prepare              group                    train                                      close
    what can be refused  a group, equal settings, steps, averages; heartbeats beside them    all leave together
    by one rank alone    the first rank's model

Each strategy is a class at the end of this file, with its own settings beside those of `Averager`.
"""

from __future__ import annotations

import atexit
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist

from paceline.codecs import Codec
from paceline.decoding import Between, decode
from paceline.distributed import check_limits
from paceline.distributed.collectives import PendingCollective
from paceline.drivers.averaging.loop import AveragingLoop, MergedAverage, OnAverage
from paceline.drivers.averaging.preparation import Prepared, check_state, prepare
from paceline.drivers.averaging.transport import AveragingError
from paceline.drivers.ranks.group import RankGroup
from paceline.drivers.ranks.heartbeats import FailureDetector
from paceline.drivers.ranks.lifecycle import RankLifecycle, reason_of
from paceline.drivers.ranks.tracked_model import IN_USE, plain_optimizer
from paceline.events import Asked, Happening, Standing, Stepped
from paceline.exchanges.plans import AUTO, GATHER
from paceline.loggers import GuardedLog, Log
from paceline.strategies.averaging import Averaging, AveragingState, make_averaging
from paceline.traces.step_clock import clock_of, in_phase

TIMEOUT_SECONDS = 600.0


class Averager(RankLifecycle):
    """Averages what the ranks of a process group train; `HPSGD` and the other subclasses fix the strategy (`member`).

    Every rank constructs it, with equal settings, after its model is on its device; all begin with the model of the
    group's first rank. Any optimiser of torch.optim will do, ranks may take different numbers of steps, and gradients
    may be accumulated over any number of backward passes. `member` is an `Averaging`, or a function that returns one:
    if it raises, all ranks raise.

    `steps` counts the steps of this rank, `merged_steps` the steps of all ranks that are in the shared model,
    `averages` the averages done, and `sent_bytes` the bytes that this rank has given to the network for them. After an
    error nothing is averaged any more.

    Args:
        model: The model of this rank.
        optimizer: Its optimiser; a hook on `optimizer.step` begins and merges averages.
        member: The strategy.
        codec: Compresses the changes: words that name a codec ("identity": not at all), or a Codec.
        plan: How ranks come to the sum: "all-reduce", "gather", "two-step", or the quickest of them ("auto").
        process_group: The ranks that average; None: all.
        timeout_seconds: The longest that an average may take.
        silence_seconds: A rank without a heartbeat for so long counts as gone.
        seed: The seed of codecs that round at random.
        record: Whether to keep every `MergedAverage` in `history`.
        on_average: Called with each `MergedAverage`.
        log: Called with `figures()` and this rank's steps after each average (paceline.loggers).
    """

    has_ended, error_type = "averaging has ended", AveragingError

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        member: Averaging | Callable[[], Averaging],
        *,
        codec: Codec | str = "identity",
        plan: str = AUTO,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        silence_seconds: float = 15.0,
        seed: int = 0,
        record: bool = False,
        on_average: OnAverage | None = None,
        log: Log | None = None,
    ) -> None:
        super().__init__()
        optimizer = plain_optimizer(optimizer)
        made: Prepared | Exception
        try:
            check_limits(timeout_seconds=timeout_seconds, silence_seconds=silence_seconds)
            self._log = GuardedLog(log)
            made = prepare(model, optimizer, member, codec, plan)
        except Exception as error:  # the others must hear of it, whatever it is: they would wait
            made = error
        refusal = made if isinstance(made, Exception) else None
        self._group = RankGroup(process_group, timeout_seconds, refusal)
        if isinstance(made, Exception):
            raise made
        self._prepared, self._tracked, self.member = made, made.tracked, made.member
        self._optimizer, ranks, rank = optimizer, self._group.ranks, self._group.rank
        self._watched = model
        with self._constructing():
            name = self._group.agree(made.description() | {"plan": plan}, self._tracked.device)
            self._group.begin_equal(self._tracked.everything())
            self._begin_heartbeats(name, silence_seconds)
            self._replica = made.replica(len(ranks), self._step_along)
            self._transport = made.transport(self._replica, self._group.group, seed)
            self._state = AveragingState(self.member, len(ranks))
            self._loop = AveragingLoop(
                self._state,
                self._replica,
                self._transport,
                group=self._group,
                heartbeats=self._heartbeats,
                detector=FailureDetector(self._heartbeats, ranks, rank, timeout_seconds=timeout_seconds),
                parameters=self._tracked.parameters,
                on_average=self._averaged,
                waiting=partial(in_phase, model, "wait"),
            )
            self.steps = self.merged_steps = 0
            self.history: list[MergedAverage] = []
            self._last: MergedAverage | None = None
            self._record, self._on_average = record, on_average
            self._along = False  # ssgd in a flush: the optimiser takes a step of the other ranks, so the hook skips it
            hooked = optimizer.register_step_pre_hook if made.gradients else optimizer.register_step_post_hook
            self._hook = hooked(self._on_step)
            IN_USE.add(optimizer)
            atexit.register(self._abandon)

    def __repr__(self) -> str:
        place = f"rank {self._group.rank}, {self._group.world} ranks"
        return f"{type(self).__name__}({self.member.name}; {place}; {self.steps:,} steps, {self.averages:,} averages)"

    @property
    def averages_begun(self) -> int:
        """The averages begun so far: the number of the one to which the steps of the open window will be brought."""
        return self._state.averages

    @property
    def averages(self) -> int:
        """The averages done so far."""
        return self._state.averages - self._state.in_flight

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has given to the network for averages so far."""
        return self._transport.sent_bytes

    def figures(self) -> dict[str, float]:
        """Return what is worth logging by now, of this rank unless it says otherwise.

        `window_steps` are the steps in the last average, and `window_steps_of_all` those of all ranks in it;
        `wait_seconds` is how long this rank has waited for averages in all.
        """
        windows = () if self._last is None else self._last.windows
        place = self._group.ranks.index(self._group.rank)
        return {
            "steps": self.steps,
            "averages": self.averages,
            "merged_steps_of_all": self.merged_steps,
            "window_steps": windows[place].brought if windows else 0,
            "window_steps_of_all": sum(window.brought for window in windows),
            "sent_bytes": self.sent_bytes,
            "wait_seconds": self._loop.waited_seconds,
        }

    @property
    def plan(self) -> str:
        """How the ranks come to the sum of their changes: "all-reduce", "gather" or "two-step"."""
        return self._transport.plan

    @property
    def shared(self) -> dict[str, torch.Tensor]:
        """A copy of the model that all ranks agree on, as of the last average merged here: parameters by name."""
        parameters = self._tracked.parameters
        if self._group.world == 1:
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
        self._handle(Asked(standing=Standing.FLUSHING))

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return every rank's numbers, in the order of the ranks. All ranks must call it, with as many numbers each.

        Only where everybody is at the same place: before the first step, or after a flush or a `state_dict`.
        """
        self._check_alive()
        if self._loop.stepped:
            raise AveragingError(
                "this rank has stepped: flush() first, for ranks tell numbers where all are at one place"
            )
        world = self._group.world
        if world == 1 or not numbers:
            return [list(numbers) for _ in range(world)]
        with self._guarded():
            gathered, work = self._group.start_numbers(numbers, self._tracked.device)
            self._loop.wait_for(PendingCollective(work, self._tracked.device), "what the ranks tell each other")
        rows: list[list[int]] = gathered.view(world, -1).tolist()
        return rows

    def close(self) -> None:
        """Flush, and end: training is plain from here on. All ranks must call it; the end of a `with` does."""
        if self._ended:
            return
        try:
            if self._failure is None:
                with self._guarded():
                    self._tracked.check()
                    self._loop.handle(Asked(standing=Standing.LEAVING))
        finally:
            self._end()

    def _abandon(self) -> None:
        """End because the interpreter does: threads must not outlive it, nor it wait for them."""
        self._heartbeats.stop("the end of its script, without close()")
        self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            atexit.unregister(self._abandon)
            self._hook.remove()
            self._heartbeats.stop(reason_of(self._failure))
            self._transport.close()
            self._group.close(pending=self._loop.under_way)
            IN_USE.discard(self._optimizer)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._heartbeats.stop(reason_of(error))
        super()._fail(error)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self, *, settle: bool = True) -> dict[str, Any]:
        """Return what this rank needs to go on later besides its model and its optimiser; call it before theirs.

        All ranks must call it: they come to the same average first, and may merge it, but no window is closed. With
        `settle=False` one rank may look alone, right after a flush or another `state_dict`. After `close` there is
        nobody to wait for.
        """
        if self._failure is not None:
            raise AveragingError("averaging has ended with an error: it has no state") from self._failure
        if not settle and self._loop.stepped:
            raise AveragingError(
                "this rank has stepped since the last flush: its state can be taken with all ranks only"
            )
        if settle and not self._ended:
            self._tracked.check()
            self._handle(Asked(standing=Standing.SETTLING))
        return {
            "about": self._about(),
            "course": self._state.state_dict(),
            "replica": self._replica.state_dict(),
            "codec": self._transport.state_dict(),
            "plan": self._transport.plan,
            "steps": self.steps,
            "merged_steps": self.merged_steps,
            "sent_bytes": self.sent_bytes,
            "ahead": self._loop.ahead,
            "checksum": self._tracked.checksum(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this rank's `state_dict`; load the model and the optimiser before, but after the construction."""
        check_state(state, self._about(), self._tracked.checksum())
        names, total = ("steps", "merged_steps", "sent_bytes"), Annotated[int, Between(0, 2**63)]
        steps, merged_steps, sent_bytes = (decode(total, state[name], name) for name in names)
        ahead = decode(Annotated[int, Between(-1, self._group.world - 1)], state["ahead"], "ahead")
        copy.copy(self._state).load_state_dict(state["course"])  # a trial: it may refuse
        self._replica.check(state["replica"])
        self._transport.load_state_dict(state.get("plan", GATHER), state["codec"])  # the last release gathered
        self._state.load_state_dict(state["course"])
        self._replica.load_state_dict(state["replica"])
        self.steps, self.merged_steps, self._transport.sent_bytes = steps, merged_steps, sent_bytes
        self._loop.ahead, self._loop.stepped = ahead, False

    def _about(self) -> dict[str, str]:
        place = {"rank": str(self._group.rank), "number of ranks": str(self._group.world)}
        return self._prepared.description() | place

    # -- steps -----------------------------------------------------------------------------------------------------

    def _on_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._along:
            return
        if self._prepared.gradients:
            if any(given is not None for given in (*args[1:], *kwargs.values())):
                raise ValueError("ssgd averages the gradients before the step: it cannot be given a closure")
            if getattr(optimizer, "grad_scale", None) is not None:
                raise ValueError(
                    "ssgd averages the gradients before the step, and these are still scaled: call "
                    "scaler.unscale_(optimizer) first"
                )
            if getattr(optimizer, "found_inf", None):
                return  # a gradient scaler has found an overflow, and a fused optimiser will do nothing in this step
        self.steps += 1
        self._handle(Stepped())

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """End the averaging with whatever error comes."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _handle(self, event: Happening) -> None:
        self._check_alive()
        with self._guarded():
            self._loop.handle(event)

    def _averaged(self, average: MergedAverage) -> None:
        self.merged_steps += average.brought
        self._last = average
        if (clock := clock_of(self._watched)) is not None:
            clock.bucket_between(average.begun, average.done)
        if self._log:
            self._log(self.figures(), self.steps)
        if self._record:
            self.history.append(average)
        if self._on_average is not None:
            self._on_average(average)

    def _step_along(self) -> None:
        self._along = True
        try:
            with torch.enable_grad():
                self._optimizer.step()
        finally:
            self._along = False


# -- the public classes ------------------------------------------------------------------------------------------------


class SSGD(Averager):
    """All ranks step together, by the mean of their gradients: what DistributedDataParallel does."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        codec: Codec | str = "identity",
        plan: str = AUTO,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        silence_seconds: float = 15.0,
        seed: int = 0,
        record: bool = False,
        on_average: OnAverage | None = None,
        log: Log | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            partial(make_averaging, "ssgd"),
            codec=codec,
            plan=plan,
            process_group=process_group,
            timeout_seconds=timeout_seconds,
            silence_seconds=silence_seconds,
            seed=seed,
            record=record,
            on_average=on_average,
            log=log,
        )


class LocalSGD(Averager):
    """Each rank trains alone for `period` steps, then all wait and go on from the mean.

    `normalize` scales every rank's change to the mean number of steps, for ranks that take unequal numbers.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        period: int = 8,
        normalize: bool = False,
        codec: Codec | str = "identity",
        plan: str = AUTO,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        silence_seconds: float = 15.0,
        seed: int = 0,
        record: bool = False,
        on_average: OnAverage | None = None,
        log: Log | None = None,
    ) -> None:
        settings = {"period": period, "normalize": normalize}
        super().__init__(
            model,
            optimizer,
            partial(make_averaging, "local-sgd", **settings),
            codec=codec,
            plan=plan,
            process_group=process_group,
            timeout_seconds=timeout_seconds,
            silence_seconds=silence_seconds,
            seed=seed,
            record=record,
            on_average=on_average,
            log=log,
        )


class BMUF(Averager):
    """Local SGD whose mean change has momentum: 1 - 1/N of the change before, unless `outer_momentum` says otherwise.

    With `overlap` training does not wait for the average, and `rebase` is as for HPSGD.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        period: int = 8,
        overlap: bool = False,
        rebase: bool | None = None,
        normalize: bool = False,
        outer_rate: float = 1.0,
        outer_momentum: float | None = None,
        codec: Codec | str = "identity",
        plan: str = AUTO,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        silence_seconds: float = 15.0,
        seed: int = 0,
        record: bool = False,
        on_average: OnAverage | None = None,
        log: Log | None = None,
    ) -> None:
        settings = {"period": period, "overlap": overlap, "rebase": rebase, "normalize": normalize}
        outer = {"outer_rate": outer_rate, "outer_momentum": outer_momentum}
        super().__init__(
            model,
            optimizer,
            partial(make_averaging, "bmuf", **settings, **outer),
            codec=codec,
            plan=plan,
            process_group=process_group,
            timeout_seconds=timeout_seconds,
            silence_seconds=silence_seconds,
            seed=seed,
            record=record,
            on_average=on_average,
            log=log,
        )


class DiLoCo(Averager):
    """Local SGD with long periods, whose mean change is a Nesterov step.

    With `overlap` training does not wait for the average, and `rebase` is as for HPSGD.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        period: int = 100,
        overlap: bool = False,
        rebase: bool | None = None,
        normalize: bool = False,
        outer_rate: float = 0.7,
        outer_momentum: float = 0.9,
        codec: Codec | str = "identity",
        plan: str = AUTO,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        silence_seconds: float = 15.0,
        seed: int = 0,
        record: bool = False,
        on_average: OnAverage | None = None,
        log: Log | None = None,
    ) -> None:
        settings = {"period": period, "overlap": overlap, "rebase": rebase, "normalize": normalize}
        outer = {"outer_rate": outer_rate, "outer_momentum": outer_momentum}
        super().__init__(
            model,
            optimizer,
            partial(make_averaging, "diloco", **settings, **outer),
            codec=codec,
            plan=plan,
            process_group=process_group,
            timeout_seconds=timeout_seconds,
            silence_seconds=silence_seconds,
            seed=seed,
            record=record,
            on_average=on_average,
            log=log,
        )


class HPSGD(Averager):
    """One average begins as soon as the one before is merged, and training never waits: a fast rank takes more steps.

    With `rebase` a rank that has begun an average trains on from the shared model plus the change it has just sent;
    without, from the shared model (the paper). `period` is the fewest steps between two averages.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        period: int = 1,
        rebase: bool = True,
        normalize: bool = False,
        codec: Codec | str = "identity",
        plan: str = AUTO,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        silence_seconds: float = 15.0,
        seed: int = 0,
        record: bool = False,
        on_average: OnAverage | None = None,
        log: Log | None = None,
    ) -> None:
        member = partial(make_averaging, "hpsgd", period=period, rebase=rebase, normalize=normalize)
        super().__init__(
            model,
            optimizer,
            member,
            codec=codec,
            plan=plan,
            process_group=process_group,
            timeout_seconds=timeout_seconds,
            silence_seconds=silence_seconds,
            seed=seed,
            record=record,
            on_average=on_average,
            log=log,
        )


class PSGD(Averager):
    """Every rank for itself until a flush: the speed limit, to compare with."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        normalize: bool = False,
        codec: Codec | str = "identity",
        plan: str = AUTO,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        silence_seconds: float = 15.0,
        seed: int = 0,
        record: bool = False,
        on_average: OnAverage | None = None,
        log: Log | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            partial(make_averaging, "psgd", normalize=normalize),
            codec=codec,
            plan=plan,
            process_group=process_group,
            timeout_seconds=timeout_seconds,
            silence_seconds=silence_seconds,
            seed=seed,
            record=record,
            on_average=on_average,
            log=log,
        )


AVERAGERS: dict[str, type[Averager]] = {
    "ssgd": SSGD,
    "local-sgd": LocalSGD,
    "bmuf": BMUF,
    "diloco": DiLoCo,
    "hpsgd": HPSGD,
    "psgd": PSGD,
}
"""The public classes by the names of their strategies, for frameworks in which a strategy is named."""
