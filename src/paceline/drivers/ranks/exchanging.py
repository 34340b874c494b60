"""Runs the protocols of exchanges over process groups.

One vector at a time, where nothing else is to be done meanwhile:  `exchange_now`.
Many vectors, one after the other, while training goes on:          `ExchangeScheduler`.

    training thread:       begin 0 (encode, first request)   begin 1            begin 2
    the scheduler's:                                  0: answer, second request    1: ...    0: answer, the end

Vectors may travel together: each is encoded when it is there, and what they ask for is asked for at once.

Every step of a protocol has a process group of its own. Within a group all ranks must start the same collectives in the
same order, and they do: an exchange takes its next step only when all that began before it have taken theirs, or have
ended. Between groups no order is needed. (Nothing is started in a callback of the backend's: there the order is that
of arrival, which differs from rank to rank, and they would wait for each other for ever.)
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.codecs import Codec
from paceline.codecs.requests import AllGather, AllReduce, AllToAll, Request, request_traffic
from paceline.distributed import first_line, name_ranks
from paceline.distributed.collectives import PendingCollective, start_gather
from paceline.distributed.groups import never_destroy
from paceline.drivers.ranks.heartbeats import LOST_BEATS, LOST_LOOK_SECONDS, Heartbeats
from paceline.drivers.ranks.lifecycle import reason_of
from paceline.errors import PacelineError
from paceline.exchanges import ExchangeProtocol, TroubleError, make_exchange
from paceline.exchanges.exchange import Outcome
from paceline.exchanges.joined import BegunExchange, JoinedProtocol, begin_exchange, join_exchanges
from paceline.exchanges.lockstep import run_in_lockstep
from paceline.exchanges.plans import adds_plainly, refuse_float64

log = logging.getLogger("paceline.exchanges")

MOST_COPIED_BYTES = 32_768  # of a gather that is sent to all at once, in copies, and not around a ring
JOIN_SECONDS = 1.0
LOOK_SECONDS = 0.5  # without an arrival, after which the thread looks at who is alive
Result = TypeVar("Result")


class ConnectionLostError(PacelineError, RuntimeError):
    """A collective has failed: a rank is gone, or was not heard of for too long.

    >>> raise ConnectionLostError("Connection closed by peer")
    Traceback (most recent call last):
    paceline.drivers.ranks.exchanging.ConnectionLostError: Connection closed by peer
    """


def try_codec(
    codec: Codec, plan: str, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor] = ()
) -> None:
    """Refuse a codec that cannot carry these parameters; let its kernels be loaded or compiled before others wait.

    Buffers travel beside what it encodes, in float32 as well.

    >>> from paceline.codecs import make_codec
    >>> try_codec(make_codec("qsgd"), "auto", [torch.zeros(3, dtype=torch.float64)])
    Traceback (most recent call last):
    ValueError: codecs carry float32, and this model has float64 parameters (codec=QSGD(levels=7, bucket=512, ...
    """
    if adds_plainly(codec, plan):
        return
    refuse_float64(codec, plan, {parameter.dtype for parameter in parameters})
    refuse_float64(codec, plan, {buffer.dtype for buffer in buffers}, noun="buffers")
    warm = make_exchange(codec, [parameter.shape for parameter in parameters], place=0, world=1, plan=plan)
    (tried,) = run_in_lockstep([warm.run(torch.ones(warm.elements, device=parameters[0].device))])
    if isinstance(tried, TroubleError) and tried.cause is not None:
        raise tried.cause


def start(request: Request, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    """Start what is asked for; return where the answer will be, and the work."""
    tensor, world = request.tensor, group.size()
    match request:
        case AllReduce(largest=largest):
            operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            return tensor, dist.all_reduce(tensor, operation, group=group, async_op=True)
        case AllToAll(sends=sends, receives=receives):
            arrived = tensor.new_empty(sum(receives))
            work = dist.all_to_all_single(arrived, tensor, list(receives), list(sends), group=group, async_op=True)
            return arrived, work
        case AllGather():
            if tensor.nbytes <= MOST_COPIED_BYTES and tensor.device.type == "cpu":  # fewer hops
                rows = tensor.new_empty(world, tensor.numel())
                copies = tensor.expand(world, -1).contiguous().view(-1)
                return rows, dist.all_to_all_single(rows.view(-1), copies, group=group, async_op=True)
            gathered, work = start_gather(tensor, group)
            return gathered.view(world, -1), work


def given_bytes(request: Request, group: dist.ProcessGroup) -> int:
    """Return the bytes that this rank gives to the network for a request."""
    return int(request_traffic(request, group.size(), group.rank()).given_bytes)


def exchange_now(
    protocol: Generator[Request, torch.Tensor, Result], groups: Sequence[dist.ProcessGroup], sent: Callable[[int], None]
) -> Result:
    """Run a protocol to its end, waiting for each answer; `sent` is told the bytes given to the network."""
    request = next(protocol)
    for group in groups:
        sent(given_bytes(request, group))
        answer, work = start(request, group)
        try:
            work.wait()
        except RuntimeError as error:
            protocol.close()
            raise ConnectionLostError(first_line(error)) from error
        try:
            request = protocol.send(answer)
        except StopIteration as end:
            result: Result = end.value
            return result
    raise ValueError(f"an exchange takes more than {len(groups)} steps")


# -- many, while training goes on --------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, eq=False)
class Underway:
    """Exchanges on their way together: what the processor did for them, when they were on the wire, their bytes."""

    protocol: JoinedProtocol
    finished: list[Finished]  # one for each
    step: int = 0  # whose answer it waits for
    answer: torch.Tensor | None = None
    work: Any = None
    arrived: bool = False
    busy_seconds: float = 0.0
    on_wire: list[tuple[float, float]] = field(default_factory=list)  # from, to
    given_bytes: int = 0
    number: int = 0  # of what this rank has sent, from 1
    began: float = field(default_factory=time.monotonic)

    def sent(self, given: int) -> None:
        """Count bytes that are given to the network."""
        self.given_bytes += given


Finished = Callable[[Underway, Outcome], None]


@dataclass(slots=True, eq=False)
class _State:
    """What the scheduler and its thread share: the thread must not keep the scheduler alive."""

    groups: list[dist.ProcessGroup]
    heartbeats: Heartbeats | None
    timeout_seconds: float
    events: queue.SimpleQueue[tuple[Underway, int] | None] = field(default_factory=queue.SimpleQueue)
    lock: threading.Lock = field(default_factory=threading.Lock)
    underway: list[Underway] = field(default_factory=list)  # in the order in which they were sent
    broken: Exception | None = None  # the first error after which this rank's steps fit no other's
    told: bool = False  # the other ranks hear of it


class ExchangeScheduler:
    """Takes exchanges through their steps on a thread of its own; they must be sent in the same order on all ranks.

    `begin` encodes a vector, `send` sends all that were begun since. `groups` are one for each step. An error
    that this rank alone has in the middle of an exchange ends all of its exchanges: its next step would meet the
    others' earlier one, and give wrong sums. The last of its `heartbeats` says why, and ends the exchanges of the
    others: while something is under way, the thread looks at what is heard of them.

    On a GPU there is no thread: waiting holds up a stream of its own there, and not the processor, so an exchange is
    taken through all its steps when it is sent. (Not run on a GPU yet.)
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        heartbeats: Heartbeats | None = None,
        timeout_seconds: float = math.inf,
    ) -> None:
        self._state = _State(list(groups), heartbeats, timeout_seconds)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._thread: threading.Thread | None = None
        self._finalizer: Any = None
        self._begun: list[BegunExchange] = []  # and not sent yet
        self._finished: list[Finished] = []
        self._busy_seconds = 0.0

    def begin(self, protocol: ExchangeProtocol, finished: Finished) -> None:
        """Encode a vector now, on this thread; call `finished` later, on the other, with the sum or an error.

        If `finished` raises, it is called once more, with what it has raised.
        """
        began = time.perf_counter()
        with self._on_stream():
            self._begun.append(begin_exchange(protocol))
        self._finished.append(finished)
        self._busy_seconds += time.perf_counter() - began

    def send(self) -> None:
        """Send together what was begun since the last time; all ranks send the same ones."""
        underway = Underway(
            protocol=join_exchanges(self._begun), finished=self._finished, busy_seconds=self._busy_seconds
        )
        self._begun, self._finished, self._busy_seconds = [], [], 0.0
        with self._state.lock:
            self._state.underway.append(underway)
        if self._state.heartbeats is not None:
            underway.number = self._state.heartbeats.entered = self._state.heartbeats.entered + 1
        if self._stream is not None:
            with self._on_stream():
                self._run_all(underway)
            return
        if self._thread is None or not self._thread.is_alive():  # none after a fork
            name, given = "paceline-exchanges", (self._state,)
            self._thread = threading.Thread(target=_run, args=given, name=name, daemon=True)
            self._thread.start()
            self._finalizer = weakref.finalize(self, _end, self._state.events, self._thread)
        _advance(self._state, underway)

    def fail(self, error: Exception) -> None:
        """End all exchanges of this rank with an error of its own, and let the other ranks hear of it."""
        self._state.broken = self._state.broken or error
        if self._finished:
            begun = Underway(protocol=join_exchanges(self._begun), finished=self._finished)
            self._begun, self._finished = [], []
            with self._state.lock:
                self._state.underway.append(begun)
        _end_all(self._state)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """On a GPU: in the scheduler's stream, after what the current one has to do."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def _run_all(self, underway: Underway) -> None:
        try:
            outcomes = exchange_now(underway.protocol, self._state.groups, underway.sent)
        except Exception as error:
            self.fail(error)
        else:
            _tell(self._state, underway, outcomes)


def _end(events: queue.SimpleQueue[tuple[Underway, int] | None], thread: threading.Thread) -> None:
    events.put(None)
    if thread is not threading.current_thread():
        thread.join(JOIN_SECONDS)


def _run(state: _State) -> None:
    ended = False
    while not ended:
        try:
            ended = _take_event(state)
        except Exception as error:  # what ends an exchange may fail itself; the next look does it again
            state.broken = state.broken or error


def _take_event(state: _State) -> bool:
    """Do what follows from an arrival, or look around where there is none; return whether it was the last."""
    try:
        event = state.events.get(timeout=LOOK_SECONDS)
    except queue.Empty:
        _look(state)
        return False
    if event is None:
        return True
    underway, step = event
    underway.arrived = underway.arrived or underway.step == step
    _advance_ready(state)
    return False


def _look(state: _State) -> None:
    """End what is under way, if a rank is gone that it waits for, or if the exchanges of this rank have failed."""
    heartbeats = state.heartbeats
    if state.broken is None and heartbeats is not None and state.underway:
        gone = heartbeats.find_gone()
        if gone is not None and not heartbeats.store_lost:  # without a store ranks still hear each other
            state.broken, state.told = ConnectionLostError(gone), True
    if state.broken is not None:
        _end_all(state)
        return
    for underway in list(state.underway):  # whose arrival could not be told
        underway.arrived = underway.arrived or (underway.work is not None and underway.work.is_completed())
    _advance_ready(state)


def _advance_ready(state: _State) -> None:
    while (ready := _next_ready(state)) is not None:
        _advance(state, ready)


def _next_ready(state: _State) -> Underway | None:
    """Return what may take its next step: the earliest step first, for others wait for what comes of it."""
    with state.lock:
        ready, least = [], None
        for each in state.underway:
            if each.arrived and (least is None or each.step < least):
                ready.append(each)
            least = each.step if least is None else min(least, each.step)
        return min(ready, key=lambda each: each.step, default=None)


def _advance(state: _State, underway: Underway) -> None:
    """Take the next step of what is under way, or the first, or end it; raises nothing."""
    started = time.perf_counter()
    try:
        if state.broken is not None:
            left = ConnectionLostError(f"this rank has left the exchanges: {first_line(state.broken)}")
            _tell(state, underway, [left] * len(underway.finished))
            return
        request = _next_request(underway)
        underway.busy_seconds += time.perf_counter() - started
        _start(state, underway, request)
    except StopIteration as end:
        underway.busy_seconds += time.perf_counter() - started
        _tell(state, underway, end.value)
    except Exception as error:
        state.broken = state.broken or error
        _end_all(state)


def _tell(state: _State, underway: Underway, outcomes: Sequence[Outcome]) -> None:
    """Tell those who wait for these exchanges what each came to; what fails in here can be called again."""
    while True:
        with state.lock:  # two threads may end the same exchange: the script's, and the one beside it
            left = len(underway.finished)
            finished = underway.finished.pop(0) if left else None
        if finished is None:
            break
        try:
            finished(underway, outcomes[-left])
        except Exception as error:
            log.exception("the end of an exchange could not be told")
            with contextlib.suppress(Exception):
                finished(underway, error)
    with state.lock:
        if underway in state.underway:
            state.underway.remove(underway)
    underway.work = underway.answer = None  # they hold payloads


def _end_all(state: _State) -> None:
    """End all that is under way with the first error of this rank, once the other ranks can hear of it."""
    if not state.told and state.heartbeats is not None:
        named = _name_lost(state, state.heartbeats) if isinstance(state.broken, ConnectionLostError) else ""
        if named:
            state.broken = ConnectionLostError(named)
        else:
            state.heartbeats.stop(reason_of(state.broken))
    state.told = True
    for underway in list(state.underway):
        for group in state.groups:
            never_destroy(group)  # gloo's destructor would wait for what is under way
        _tell(state, underway, [state.broken or ConnectionLostError("ended")] * len(underway.finished))


def _name_lost(state: _State, heartbeats: Heartbeats) -> str:
    """Say in words which rank is gone, or does not come; "" if all are alive and have come."""
    number = min((each.number for each in state.underway), default=0)
    began = min((each.began for each in state.underway), default=0.0)
    looked, interval = time.monotonic(), heartbeats.interval_seconds
    while True:
        gone = heartbeats.find_gone(after_seconds=LOST_BEATS * interval)
        if gone is not None:
            return gone
        now, late = time.monotonic(), heartbeats.behind(number)
        if late and now - began >= state.timeout_seconds:
            did_not = f"{name_ranks(late)} did not come in {state.timeout_seconds:g} s"
            if now - looked > 2 * interval and all(heartbeats.silent_seconds(rank) < 1.5 * interval for rank in late):
                return f"{did_not}, and is alive"
        if now - looked > (LOST_BEATS + 2) * interval:
            return did_not if late and now - began >= state.timeout_seconds else ""
        time.sleep(LOST_LOOK_SECONDS)


def _next_request(underway: Underway) -> Request:
    if underway.work is None:
        return next(underway.protocol)
    try:
        underway.work.wait()  # it is over; raises what it has failed with
    except RuntimeError as error:
        underway.protocol.close()
        raise ConnectionLostError(first_line(error)) from error
    answer, underway.answer = underway.answer, None
    assert answer is not None
    underway.step, underway.arrived = underway.step + 1, False
    return underway.protocol.send(answer)


def _start(state: _State, underway: Underway, request: Request) -> None:
    group = state.groups[underway.step]
    underway.sent(given_bytes(request, group))
    started = time.perf_counter()
    try:
        underway.answer, underway.work = start(request, group)
    except RuntimeError as error:
        raise ConnectionLostError(first_line(error)) from error
    then = functools.partial(_arrived, state.events, underway, underway.step, started)
    PendingCollective(underway.work, request.tensor.device, then)


def _arrived(
    events: queue.SimpleQueue[tuple[Underway, int] | None], underway: Underway, step: int, started: float
) -> None:
    underway.on_wire.append((started, time.perf_counter()))
    events.put((underway, step))
