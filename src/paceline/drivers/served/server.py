"""The parameter server's network side: gRPC streams of workers in front of a `Coordinator`.

    WorkerStream  -- admit, ready, arrived -->  Server  -- joined, gradient, left -->  Coordinator
    WorkerStream  <-- send_model -------------  Server  <-- to_send -----------------  Coordinator

Everything runs in one event loop, so nothing here needs a lock. Work that takes long (measuring the model, writing a
checkpoint) is done elsewhere, on copies; see `run.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
import torch

from paceline.drivers.served.coordinator import Coordinator, ReceivedGradient, microseconds
from paceline.drivers.served.membership import NoSeatError, Seat
from paceline.drivers.served.messages import PROTOCOL, Hello, Model, ProtocolError, Ready, Sizes, Welcome, frames
from paceline.drivers.served.settings import ServerSettings
from paceline.drivers.served.stream import StreamEnd, WorkerStream
from paceline.drivers.served.transport import METHOD, server_options

log = logging.getLogger("paceline.served")

CHECK_SECONDS = 0.25
MOST_CHANGES = 16  # that wait for one worker: one so far behind is better off with the whole
REFUSALS_AT_ONCE, REFUSALS_PER_SECOND = 200, 5.0


class RefusalLimiter:
    """Says which refusals are logged: the first ones, then so many a second; counts the others.

    Strangers must not fill the log at the pace they choose.

    >>> limiter = RefusalLimiter()
    >>> sum(limiter.allows(0.0) for _ in range(1000)), limiter.allows(1.0), limiter.take_suppressed()
    (200, True, 800)
    """

    def __init__(self) -> None:
        self._left = float(REFUSALS_AT_ONCE)
        self._seen_seconds = 0.0
        self._suppressed = 0

    def allows(self, clock: float) -> bool:
        """Return whether one more refusal may be logged now."""
        more = REFUSALS_PER_SECOND * max(0.0, clock - self._seen_seconds)
        self._left, self._seen_seconds = min(REFUSALS_AT_ONCE, self._left + more), clock
        allowed = self._left >= 1
        self._left -= allowed
        self._suppressed += not allowed
        return allowed

    def take_suppressed(self) -> int:
        """Return how many were not logged since this was called last."""
        count, self._suppressed = self._suppressed, 0
        return count


class Server:
    """Connects workers that come and go with a coordinator.

    `changed` is called after everything that may have moved the run on.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        settings: ServerSettings,
        *,
        signature: str,
        started_seconds: float = 0.0,
    ) -> None:
        self.coordinator, self.limits = coordinator, settings.limits
        model = coordinator.train_state.model
        self.sizes = Sizes(
            most_payload_bytes=coordinator.codec.most_bytes(model.parameters.numel()),
            buffer_bytes=4 * model.buffers.numel(),
        )
        self.changed: Callable[[], None] = lambda: None
        self.failure: BaseException | None = None
        self._settings, self.signature = settings, signature
        self._started_seconds = started_seconds
        self._began: float | None = None
        self._opened = time.monotonic()
        self._streams: set[WorkerStream] = set()
        self._members: dict[int, WorkerStream] = {}
        self._seats: dict[WorkerStream, Seat] = {}
        self._frames: dict[tuple[int, int | None, int], tuple[bytes, ...]] = {}
        self._refusals = RefusalLimiter()
        self._warned_of_nobody = False
        self._grpc: Any = None
        self._checking: asyncio.Task[None] | None = None
        self._closing: tuple[str, str] | None = None

    def now(self) -> float:
        """Return the seconds of the run, in whole microseconds: its clock starts with its first round."""
        if self._began is None:
            if not self.coordinator.begun:
                return self._started_seconds
            self._began = time.monotonic()
        return microseconds(self._started_seconds + time.monotonic() - self._began)

    def clock(self) -> float:
        """Return the seconds of a clock that always runs, for deadlines."""
        return time.monotonic()

    async def open(self, address: str, credentials: Any = None) -> int:
        """Listen, and return the port."""
        self._grpc = grpc.aio.server(
            options=server_options(self.sizes, self.limits),
            maximum_concurrent_rpcs=self.coordinator.seats.most + self.limits.most_strangers,
        )
        handlers = {METHOD.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(self._work)}
        service = METHOD.strip("/").partition("/")[0]
        self._grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        try:
            if credentials is None:
                port: int = self._grpc.add_insecure_port(address)
            else:
                port = self._grpc.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: is the port in use? ({str(error).splitlines()[0]})") from None
        await self._grpc.start()
        self._opened = self.clock()
        self._checking = asyncio.create_task(self._check_deadlines())
        return port

    async def close(self, what: str, reason: str) -> None:
        """Say goodbye to everybody and stop listening."""
        self._closing = what, reason  # whoever comes back now is told the same
        last = set(self._streams)
        for stream in last:
            stream.end(StreamEnd(what, reason))
        deadline = time.monotonic() + self.limits.farewell_seconds
        while last & self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if self._checking is not None:
            self._checking.cancel()
        await self._grpc.stop(grace=0.2)

    # -- streams -----------------------------------------------------------------------------------------------

    async def _work(self, _: Any, context: Any) -> None:
        stream = WorkerStream(self, context)
        self._make_room()
        self._streams.add(stream)
        end = StreamEnd("return", "its connection was lost")
        try:
            end = await stream.serve()
        finally:
            self._streams.discard(stream)
            try:
                self._ended(stream, end)
            except Exception as error:
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End a run that itself failed (an optimiser, a schedule): strategy and model may disagree from now on."""
        self.failure = self.failure or error
        self.coordinator.stop()
        self.changed()

    def _make_room(self) -> None:
        """Of too many streams without a worker, end the one that is silent longest: they must not keep a worker out."""
        strangers = [stream for stream in self._streams if stream not in self._seats]
        if len(strangers) >= self.limits.most_strangers:
            oldest = min(strangers, key=lambda stream: stream.opened)
            oldest.end(StreamEnd("return", "too many connections that have not said who they are", refused=True))

    def _ended(self, stream: WorkerStream, end: StreamEnd) -> None:
        seat = self._seats.pop(stream, None)
        if end.refused:
            self._refused(stream, end.reason)
        if seat is None:
            return
        if self._members.get(seat.worker) is stream:
            del self._members[seat.worker]
            if not self.coordinator.over:
                log.info("worker %d left: %s", seat.worker, end.reason)
            self.coordinator.left(seat.worker, end.reason, self.now())
            if self.coordinator.begun and not self.coordinator.alive and not self.coordinator.over:
                log.warning("no worker is left: waiting for one to come")
            self._act()
        else:
            self.coordinator.seats.release(seat.worker)

    def _refused(self, stream: WorkerStream, reason: str) -> None:
        if stream.worker is None and not self._refusals.allows(self.clock()):
            return
        who = f"worker {stream.worker}" if stream.worker is not None else stream.peer
        more = f" (and {count} more like it)" if (count := self._refusals.take_suppressed()) else ""
        log.warning("refused %s: %s%s", who, reason, more)
        self.coordinator.refused(reason, worker=stream.worker, peer=stream.peer, now=self.now())

    def admit(self, stream: WorkerStream, hello: Hello) -> Welcome:
        """Give a new worker a seat; `StreamEnd` if there is none, or nothing to do."""
        if self._closing is not None:
            raise StreamEnd(*self._closing)
        if self.coordinator.done:
            raise StreamEnd("over", "training is over")
        for former, seat in self._seats.items():
            # It came back before its old stream was missed: it gets its own number again, a moment later.
            if seat.worker == hello.wish and former.host and former.host == hello.host:
                former.end(StreamEnd("return", "it came back on a new connection"))
                raise StreamEnd("return", "its old connection is being ended: come again")
        try:
            seat = self.coordinator.seats.take(hello.wish)
        except NoSeatError as error:
            raise StreamEnd("return", str(error), refused=True) from None
        self._seats[stream] = seat
        return Welcome(
            protocol=PROTOCOL,
            worker=seat.worker,
            shard=seat.shard,
            first_draw=seat.first_draw,
            blocks=self._settings.blocks,
            codec=self._settings.codec,
            seed=self._settings.seed,
            signature=self.signature,
            silence_seconds=self.limits.silence_seconds,
            recipe=dict(self._settings.recipe),
        )

    def ready(self, stream: WorkerStream, ready: Ready) -> None:
        """Let a worker that has its model take part."""
        if ready.signature != self.signature:
            raise ProtocolError("its model is another one: names, shapes or kinds of its parameters differ")
        seat = self._seats[stream]
        stream.member = True
        self._members[seat.worker] = stream
        log.info("worker %d joined from %s (shard %d)", seat.worker, stream.host or stream.peer, seat.shard)
        self.coordinator.joined(seat, threads=stream.threads, host=stream.host, now=self.now())
        self._act()

    def arrived(self, stream: WorkerStream, received: ReceivedGradient) -> None:
        """Give a whole gradient to the coordinator."""
        self._check_blocks(received.message.blocks)
        member = self.coordinator.members[received.worker]
        self.coordinator.gradient(received, now=self.now())
        stream.owes = member.owes
        if member.bad_in_a_row:
            log.warning("worker %d sent a gradient that is not finite: refused", received.worker)
            if member.bad_in_a_row >= self.limits.most_bad_gradients:
                raise StreamEnd("refused", f"it sent {member.bad_in_a_row} gradients in a row that are not finite")
        self._act()

    def _check_blocks(self, blocks: int) -> None:
        """Refuse a gradient of blocks that no worker has: a recipe says how many, and a script's batch has no more."""
        most = self._settings.blocks
        if blocks > most or (blocks < most and self._settings.recipe):
            raise ProtocolError(f"a batch has {most} blocks here (blocks={blocks})")

    def decoded(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the vector of a payload."""
        elements = self.coordinator.train_state.model.parameters.numel()
        try:
            return self.coordinator.codec.decode(payload, expected_length=elements)
        except ValueError as error:
            raise ProtocolError(str(error)) from None

    def count_bytes(self, *, sent: int = 0, received: int = 0) -> None:
        """Count what went over the network."""
        self.coordinator.sent_bytes += sent
        self.coordinator.received_bytes += received

    # -- models --------------------------------------------------------------------------------------------------

    def _act(self) -> None:
        """Send the model to the workers that the coordinator wants to have it."""
        workers, self.coordinator.to_send = self.coordinator.to_send, []
        for worker in workers:
            stream, member = self._members.get(worker), self.coordinator.members[worker]
            if stream is None or self.coordinator.over:
                continue
            member.sent(self.coordinator.train_state.version, self.now())
            self._deliver(stream)
        self.changed()

    def _deliver(self, stream: WorkerStream) -> None:
        """Send the model: as the changes since the version that the worker was last sent, or whole if that is smaller.

        A new worker, and one for which too many changes wait already, gets the whole model.
        """
        train_state = self.coordinator.train_state
        changes = train_state.outgoing.changes_since(stream.promised) if stream.promised is not None else []
        newest, buffers, backlog = train_state.version, self.sizes.buffer_bytes, stream.backlog_bytes
        waiting = sum(backlog) + sum(payload.numel() + buffers for _, payload in changes)
        few = len(backlog) + len(changes) <= MOST_CHANGES
        if changes and few and waiting < train_state.outgoing.whole_bytes + buffers:
            messages = [self._model_frames(version, payload, more=newest - version) for version, payload in changes]
            stream.send_model(newest, messages, whole=False)
        else:
            stream.send_model(newest, [self._model_frames(newest)], whole=True)

    def _model_frames(self, version: int, change: torch.Tensor | None = None, *, more: int = 0) -> tuple[bytes, ...]:
        """Return a model as frames, whole or as the change from the version before; made once for all workers."""
        since = None if change is None else version - 1
        key = version, since, more
        if key not in self._frames:
            train_state = self.coordinator.train_state
            buffers, payload = train_state.model.buffers, train_state.outgoing.whole() if change is None else change
            sizes = {"payload_bytes": payload.numel(), "buffer_bytes": 4 * buffers.numel()}
            begin = Model(version=version, since=since, more=more, **sizes)
            newest = train_state.version
            self._frames = {made: of for made, of in self._frames.items() if made[0] + made[2] == newest}
            self._frames[key] = tuple(frames(begin, payload, buffers))
        return self._frames[key]

    # -- deadlines --------------------------------------------------------------------------------------------

    async def _check_deadlines(self) -> None:
        before = self.clock()
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            now = self.clock()
            busy = now - before - CHECK_SECONDS
            if busy > CHECK_SECONDS:
                for stream in self._streams:
                    stream.extend_deadlines(busy)
            before = now
            for stream in tuple(self._streams):
                if (end := stream.overdue(now)) is not None:
                    stream.end(end)
            try:
                self._begin_if_patience_is_out(now)
            except Exception as error:
                self.fail(error)

    def _begin_if_patience_is_out(self, clock: float) -> None:
        coordinator = self.coordinator
        if coordinator.begun or clock - self._opened <= self.limits.gather_seconds:
            return
        if not coordinator.alive and not self._warned_of_nobody:
            self._warned_of_nobody = True
            log.warning("nobody has come for %g s: the first to come begins", self.limits.gather_seconds)
        if coordinator.alive:
            log.warning("begins with %d of %d workers", len(coordinator.alive), coordinator.wait_for)
            coordinator.begin(self.now())
            self._act()
