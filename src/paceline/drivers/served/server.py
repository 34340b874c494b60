"""The parameter server's front: gRPC streams in, a conductor behind, a watchman beside.

Everything runs in one event loop, so nothing here needs a lock. Work that takes long (measuring the model, writing a
checkpoint) is done elsewhere, on copies; see `run.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import torch

from paceline.drivers.served.conductor import Conductor
from paceline.drivers.served.frames import Sizes, frames
from paceline.drivers.served.limits import Limits
from paceline.drivers.served.members import Received, microseconds
from paceline.drivers.served.messages import PROTOCOL, Hello, Model, ProtocolError, Ready, Welcome
from paceline.drivers.served.refusals import Refusals
from paceline.drivers.served.roster import NoRoom, Seat
from paceline.drivers.served.stream import Gone, Stream
from paceline.drivers.served.transport import METHOD, server_options

log = logging.getLogger("paceline.served")

WATCH_SECONDS = 0.25
MOST_CHANGES = 16  # that wait for one worker: one so far behind is better off with the whole


class Server:
    """Serves a conductor to workers that come and go.

    `changed` is called after everything that may have moved the run on.
    """

    def __init__(
        self,
        conductor: Conductor,
        *,
        sizes: Sizes,
        signature: str,
        codec: str,
        seed: int,
        blocks: int,
        limits: Limits,
        recipe: dict[str, Any],
        started_seconds: float = 0.0,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.conductor, self.sizes, self.limits = conductor, sizes, limits
        self.port = 0
        self.failure: BaseException | None = None
        self._signature, self._codec, self._seed, self._blocks, self._recipe = signature, codec, seed, blocks, recipe
        self._started_seconds = started_seconds
        self._began: float | None = None
        self._opened = time.monotonic()
        self.changed = changed
        self._streams: set[Stream] = set()
        self._members: dict[int, Stream] = {}
        self._seats: dict[Stream, Seat] = {}
        self._frames: dict[tuple[int, int | None, int], tuple[bytes, ...]] = {}
        self._refusals = Refusals()
        self._nobody_told = False
        self._grpc: Any = None
        self._watchman: asyncio.Task[None] | None = None
        self._closing: tuple[str, str] | None = None

    def now(self) -> float:
        """Seconds of the run, in whole microseconds: its clock starts with its first round."""
        if self._began is None:
            if not self.conductor.begun:
                return self._started_seconds
            self._began = time.monotonic()
        return microseconds(self._started_seconds + time.monotonic() - self._began)

    def clock(self) -> float:
        """Seconds on a clock that always runs, for deadlines."""
        return time.monotonic()

    async def open(self, address: str, credentials: Any = None) -> int:
        """Listen; returns the port."""
        self._grpc = grpc.aio.server(
            options=server_options(self.sizes, self.limits),
            maximum_concurrent_rpcs=self.conductor.roster.most + self.limits.most_strangers,
        )
        handlers = {METHOD.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(self._work)}
        service = METHOD.strip("/").partition("/")[0]
        self._grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        try:
            if credentials is None:
                self.port = self._grpc.add_insecure_port(address)
            else:
                self.port = self._grpc.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: is the port in use? ({str(error).splitlines()[0]})") from None
        await self._grpc.start()
        self._opened = self.clock()
        self._watchman = asyncio.create_task(self._watch())
        return self.port

    async def close(self, what: str, reason: str) -> None:
        """Say goodbye to everybody and stop listening."""
        self._closing = what, reason  # whoever comes back now is told the same
        last = set(self._streams)
        for stream in last:
            stream.dismiss(Gone(what, reason))
        deadline = time.monotonic() + self.limits.farewell_seconds
        while last & self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if self._watchman is not None:
            self._watchman.cancel()
        await self._grpc.stop(grace=0.2)

    # -- streams -----------------------------------------------------------------------------------------------

    async def _work(self, _: Any, context: Any) -> None:
        stream = Stream(self, context)
        self._make_room()
        self._streams.add(stream)
        fate = Gone("return", "its connection was lost")
        try:
            fate = await stream.serve()
        finally:
            self._streams.discard(stream)
            with self._failing_loudly():
                self._ended(stream, fate)

    def broken(self, error: BaseException) -> None:
        """The run itself failed (an optimiser, a schedule): strategy and model may disagree from now on, so it ends."""
        self.failure = self.failure or error
        self.conductor.stop()
        self.changed()

    @contextmanager
    def _failing_loudly(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.broken(error)

    def _make_room(self) -> None:
        """Of too many strangers the one who has been silent longest goes: they do not keep a worker out."""
        strangers = [stream for stream in self._streams if stream not in self._seats]
        if len(strangers) >= self.limits.most_strangers:
            oldest = min(strangers, key=lambda stream: stream.opened)
            oldest.dismiss(Gone("return", "too many connections that have not said who they are", refused=True))

    def _ended(self, stream: Stream, fate: Gone) -> None:
        seat = self._seats.pop(stream, None)
        if fate.refused:
            self._refused(stream, fate.reason)
        if seat is None:
            return
        if self._members.get(seat.worker) is stream:
            del self._members[seat.worker]
            if not self.conductor.over:
                log.info("worker %d left: %s", seat.worker, fate.reason)
            self.conductor.left(seat.worker, fate.reason, self.now())
            if self.conductor.begun and not self.conductor.alive and not self.conductor.over:
                log.warning("no worker is left: waiting for one to come")
            self._act()
        else:
            self.conductor.roster.leave(seat.worker)

    def _refused(self, stream: Stream, reason: str) -> None:
        if stream.worker is None and not self._refusals.may_tell(self.clock()):
            return
        who = f"worker {stream.worker}" if stream.worker is not None else stream.peer
        untold = f" (and {count} more like it)" if (count := self._refusals.untold()) else ""
        log.warning("refused %s: %s%s", who, reason, untold)
        self.conductor.refused(reason, worker=stream.worker, peer=stream.peer, now=self.now())

    def admit(self, stream: Stream, hello: Hello) -> Welcome:
        """Give a newcomer a seat."""
        if self._closing is not None:
            raise Gone(*self._closing)
        if self.conductor.done:
            raise Gone("over", "training is over")
        self._end_former(hello)
        try:
            seat = self.conductor.roster.seat(hello.wish)
        except NoRoom as error:
            raise Gone("return", str(error), refused=True) from None
        self._seats[stream] = seat
        return Welcome(
            protocol=PROTOCOL,
            worker=seat.worker,
            shard=seat.shard,
            first_draw=seat.first_draw,
            blocks=self._blocks,
            codec=self._codec,
            seed=self._seed,
            signature=self._signature,
            silence_seconds=self.limits.silence_seconds,
            recipe=self._recipe,
        )

    def _end_former(self, hello: Hello) -> None:
        """A worker that comes back before its old stream was missed gets its own number again, a moment later."""
        for stream, seat in self._seats.items():
            if seat.worker == hello.wish and stream.host and stream.host == hello.host:
                stream.dismiss(Gone("return", "it came back on a new connection"))
                raise Gone("return", "its old connection is being ended: come again")

    def ready(self, stream: Stream, ready: Ready) -> None:
        """It has its model, and takes part."""
        if ready.signature != self._signature:
            raise ProtocolError("its model is another one: names, shapes or kinds of its parameters differ")
        seat = self._seats[stream]
        stream.member = True
        self._members[seat.worker] = stream
        log.info("worker %d joined from %s (shard %d)", seat.worker, stream.host or stream.peer, seat.shard)
        self.conductor.joined(seat, threads=stream.threads, host=stream.host, now=self.now())
        self._act()

    def arrived(self, stream: Stream, received: Received) -> None:
        """A gradient is in."""
        member = self.conductor.members[received.worker]
        self.conductor.gradient(received, now=self.now())
        stream.owes = member.owes
        if member.bad_in_a_row:
            log.warning("worker %d sent a gradient that is not finite: refused", received.worker)
            if member.bad_in_a_row >= self.limits.most_bad_gradients:
                raise Gone("refused", f"it sent {member.bad_in_a_row} gradients in a row that are not finite")
        self._act()

    def decoded(self, payload: torch.Tensor) -> torch.Tensor:
        """The vector of a payload."""
        elements = self.conductor.trainee.model.parameters.numel()
        try:
            return self.conductor.codec.decode(payload, expected_length=elements)
        except ValueError as error:
            raise ProtocolError(str(error)) from None

    def traffic(self, *, sent: int = 0, received: int = 0) -> None:
        """Bytes went over the wire."""
        self.conductor.sent_bytes += sent
        self.conductor.received_bytes += received

    # -- what the conductor asks -------------------------------------------------------------------------------

    def _act(self) -> None:
        workers, self.conductor.to_send = self.conductor.to_send, []
        for worker in workers:
            stream, member = self._members.get(worker), self.conductor.members[worker]
            if stream is None or self.conductor.over:
                continue
            member.sent(self.conductor.trainee.version, self.now())
            self._deliver(stream)
        self.changed()

    def _deliver(self, stream: Stream) -> None:
        """Send the model: as changes to whoever follows, whole to whoever is new or too far behind."""
        trainee = self.conductor.trainee
        changes = trainee.outgoing.chain(stream.promised) if stream.promised is not None else []
        buffers = self.sizes.buffer_bytes
        waiting = stream.backlog_bytes + sum(payload.numel() + buffers for _, payload in changes)
        few = stream.backlog + len(changes) <= MOST_CHANGES
        if changes and few and waiting < trainee.outgoing.whole_bytes + buffers:
            newest = trainee.version
            messages = [self._model_frames(version, payload, more=newest - version) for version, payload in changes]
            stream.send_model(trainee.version, messages, whole=False)
        else:
            stream.send_model(trainee.version, [self._model_frames(trainee.version)], whole=True)

    def _model_frames(self, version: int, change: torch.Tensor | None = None, *, more: int = 0) -> tuple[bytes, ...]:
        """A model as frames, whole or as the change from the version before; made once for all workers."""
        since = None if change is None else version - 1
        key = version, since, more
        if key not in self._frames:
            trainee = self.conductor.trainee
            buffers, payload = trainee.model.buffers, trainee.outgoing.whole() if change is None else change
            sizes = {"payload_bytes": payload.numel(), "buffer_bytes": 4 * buffers.numel()}
            begin = Model(version=version, since=since, more=more, **sizes)
            newest = trainee.version
            self._frames = {made: of for made, of in self._frames.items() if made[0] + made[2] == newest}
            self._frames[key] = tuple(frames(begin, payload, buffers))
        return self._frames[key]

    # -- the watchman ------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        before = self.clock()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = self.clock()
            busy = now - before - WATCH_SECONDS
            if busy > WATCH_SECONDS:
                for stream in self._streams:
                    stream.excuse(busy)
            before = now
            for stream in tuple(self._streams):
                fate = stream.overdue(now)
                if fate is not None:
                    stream.dismiss(fate)
            with self._failing_loudly():
                self._begin_if_patience_is_out(now)

    def _begin_if_patience_is_out(self, clock: float) -> None:
        conductor = self.conductor
        if conductor.begun or clock - self._opened <= self.limits.gather_seconds:
            return
        if not conductor.alive and not self._nobody_told:
            self._nobody_told = True
            log.warning("nobody has come for %g s: the first to come begins", self.limits.gather_seconds)
        if conductor.alive:
            log.warning("begins with %d of %d workers", len(conductor.alive), conductor.wait_for)
            conductor.begin(self.now())
            self._act()
