"""One worker's stream, seen from the server: which message may come when, and how long it may take.

    opened --Hello--> joining --Ready--> member --> ended
      |  hello_seconds   |  joining_seconds  |  silence_seconds, stall_seconds

One task reads, one task writes; the server asks `overdue` now and then. A gradient comes as one Gradient message and
Chunks; the last one gives it to the server (`arrived`), which calls `send_model`, often only when the round closes.

Every byte that comes is a sign of life. It is progress too, if others come with it: `TRICKLE_BYTES` within
`stall_seconds`. So a slow link only takes its time, and a peer that sends a byte now and then gets nowhere.

A slow stream keeps no other waiting, and takes little memory: a short queue of small messages, and the newest model (or
the changes that lead to it, as long as they are smaller than the model), which it shares with all other streams.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from paceline.drivers.served.coordinator import ReceivedGradient
from paceline.drivers.served.handover import GradientSlots, Slot
from paceline.drivers.served.messages import (
    FROM_WORKERS,
    Assembly,
    Beat,
    Chunk,
    Goodbye,
    Gradient,
    Hello,
    Leave,
    Message,
    Model,
    ProtocolError,
    Ready,
    Taken,
    Welcome,
    encode,
    frames,
)
from paceline.drivers.served.settings import Limits
from paceline.drivers.served.transport import Wire, WireClosed, read_message

MOST_HELD = 2  # a late gradient and a fresh one; there is never a reason for a third
MOST_QUEUED = 16
TRICKLE_BYTES = 64 * 1024


@dataclass(slots=True, eq=False)
class ModelMessage:
    """A model, or a change of one, on its way out; its memory is shared by all streams that send it.

    `users` counts them: until there is none its memory is not used again. `message.slot` is for streams whose workers
    share memory with the server; the others send the same bytes.
    """

    message: Model
    payload: torch.Tensor
    buffers: torch.Tensor
    users: int = 0

    @property
    def bytes(self) -> int:
        """Its size, but for the frames' heads."""
        return self.message.payload_bytes + self.message.buffer_bytes


class StreamServer(Protocol):
    """What a stream needs of its server."""

    limits: Limits

    def clock(self) -> float:
        """Return the seconds of a clock that always runs."""

    def admit(self, stream: WorkerStream, hello: Hello) -> Welcome:
        """Give a new worker a seat, or raise `StreamEnd`."""

    def ready(self, stream: WorkerStream, ready: Ready) -> None:
        """Let a worker that has its model take part."""

    def arrived(self, stream: WorkerStream, received: ReceivedGradient) -> None:
        """Take a whole gradient."""

    def assembly(self) -> Assembly:
        """Return memory for one more gradient."""

    async def decoded(
        self, worker: int, message: Gradient, body: Assembly | Slot, release: Callable[[], None] | None = None
    ) -> ReceivedGradient:
        """Return a gradient that is whole; ProtocolError if it is none of the model's.

        `release` is called when the body's memory is not needed any more.
        """

    def count(self, sent: int, received: int) -> None:
        """Count bytes that came and went."""

    def fail(self, error: BaseException) -> None:
        """End the run, which itself failed."""


class StreamEnd(Exception):  # noqa: N818 - an end, not a fault
    """How a stream ends: what the worker is told to do (see `Goodbye`), why, and whether that counts as a refusal.

    `stalled`: the worker was there, and had not got any further for `stall_seconds`.

    >>> StreamEnd("refused", "two Hellos").reason
    'two Hellos'
    """

    def __init__(self, what: str, reason: str, *, refused: bool = False, stalled: bool = False) -> None:
        super().__init__(reason)
        self.what, self.reason, self.refused, self.stalled = what, reason, refused, stalled


class WorkerStream:
    """A worker's stream, from opening to end: `serve` returns how it ended."""

    def __init__(self, server: StreamServer, peer: str) -> None:
        self._server, self.peer = server, peer
        self._wire: Wire | None = None  # until TLS is agreed on
        self.worker: int | None = None
        self.threads, self.host = 1, ""
        self.token = ""  # that let it in
        self.member = False  # whether it has said Ready
        self.owes = False  # whether it was sent a model, and has not answered with that model's gradient
        self._delivering = False  # whether the model that it owes a gradient for is still being written
        self.opened = server.clock()
        self._moved = self.opened  # the last progress in what it owes
        self._moved_bytes = 0  # what had come by then
        self._progress = -1  # of the last Beat
        self._queue: deque[bytes] = deque()  # small messages to write
        self._models: deque[tuple[ModelMessage, int]] = deque()  # models, or changes of one, to write, with `samples`
        self.invited: asyncio.Future[GradientSlots] | None = None  # to share memory with the server
        self._slots: GradientSlots | None = None
        self._lent: dict[int, ModelMessage] = {}  # models in shared memory, by slot, that the worker has not taken yet
        self.promised: int | None = None  # the newest version that was given to `send_model`
        self._wake = asyncio.Event()
        self._goodbye: Goodbye | None = None
        self.opening: asyncio.Task[Wire] | None = None  # agrees on TLS
        self._reading: asyncio.Task[StreamEnd] | None = None
        self.ended: StreamEnd | None = None  # why the server ended it, if it did
        self._held = 0
        self._incoming: tuple[Gradient, Assembly] | None = None
        self._incoming_since = 0.0  # its first byte

    # -- what the server asks ----------------------------------------------------------------------------------

    @property
    def backlog_bytes(self) -> list[int]:
        """The sizes of the models, or changes of one, that wait to be sent after the one that is being sent."""
        return [model.bytes for model, _ in self._models]

    @property
    def shares_memory(self) -> bool:
        """Whether the worker is on the server's machine, and vectors lie in shared memory."""
        return self._slots is not None

    def least_round_trip_seconds(self) -> float | None:
        """Return the least round trip that the system has seen on the connection; None where it does not tell."""
        return None if self._wire is None else self._wire.least_round_trip_seconds()

    def send_model(self, version: int, messages: Sequence[ModelMessage], *, whole: bool, samples: int = 0) -> None:
        """Send a model: after what is being sent, and, if it is a whole one, instead of what comes next.

        `samples` is what this worker is asked for: all streams share the rest of a message.
        """
        if whole:
            self._forget_models()
        for model in messages:
            model.users += 1
        self._models.extend((model, samples) for model in messages)
        self.promised = version
        if not self.owes:  # a worker that owes a gradient already gets no more time because of a newer model
            self.owes = self._delivering = True
            self._moved = self._server.clock()
        self._wake.set()

    def _forget_models(self) -> None:
        while self._models:
            self._models.pop()[0].users -= 1

    def end(self, end: StreamEnd) -> None:
        """End the stream, and tell the worker why."""
        if self.ended is None:
            self.ended = end
            if self._reading is not None:
                self._reading.cancel()
            elif self.opening is not None:
                self.opening.cancel()

    def overdue(self, now: float) -> StreamEnd | None:
        """Return why the stream must end, if it must."""
        limits, wire = self._server.limits, self._wire
        if self.worker is None or wire is None:
            late = now - self.opened > limits.hello_seconds
            return StreamEnd("refused", f"said nothing for {limits.hello_seconds:g} s", refused=True) if late else None
        if now - wire.heard > limits.beat_seconds:
            wire.wake_for_any_byte()
        if now - wire.heard > limits.silence_seconds:
            return StreamEnd("return", f"silent for {limits.silence_seconds:g} s")
        if not self.member:
            late = now - self.opened > limits.joining_seconds
            return StreamEnd("return", f"not ready after {limits.joining_seconds:g} s") if late else None
        if self._incoming is not None and wire.received_bytes - self._moved_bytes >= TRICKLE_BYTES:
            self._progressed(wire.heard)
        if self.owes and now - self._moved > limits.stall_seconds:
            reason = f"no progress for {limits.stall_seconds:g} s (server.stall_seconds)"
            return StreamEnd("return", reason, stalled=True)
        return None

    def extend_deadlines(self, seconds: float) -> None:
        """Forgive the worker a time in which the server itself was busy."""
        self.opened += seconds
        self._moved += seconds
        if self._wire is not None:
            self._wire.heard += seconds

    def _progressed(self, now: float) -> None:
        self._moved = now
        self._moved_bytes = self._wire.received_bytes if self._wire is not None else 0

    # -- reading and writing -----------------------------------------------------------------------------------

    async def serve(self, wire: Wire) -> StreamEnd:
        """Read and write until the stream ends, and return how it ended."""
        self._wire = wire
        self._reading = asyncio.create_task(self._read(wire))
        if self.ended is not None:  # in the moment between the handshake's end and now
            self._reading.cancel()
        writing = asyncio.create_task(self._write(wire))
        try:
            await asyncio.wait({self._reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            failed = self._writer_failed(writing)
            if failed:
                self._reading.cancel()
            await asyncio.wait({self._reading})
            lost = StreamEnd("return", "its connection was lost")
            end = self.ended or (lost if self._reading.cancelled() else self._result(self._reading))
            self._goodbye = Goodbye(what=end.what, reason=" ".join(end.reason.split())[:1000])  # type: ignore[arg-type]
            self._wake.set()
            await asyncio.wait({writing}, timeout=self._server.limits.farewell_seconds)
            if not failed:
                self._writer_failed(writing)
            return end
        finally:
            self._reading.cancel()
            writing.cancel()
            await asyncio.gather(self._reading, writing, return_exceptions=True)
            self._forget_models()
            for model in self._lent.values():
                model.users -= 1
            self._lent = {}
            if self.invited is not None:
                self.invited.cancel()
            # Whatever still refers to this stream (the traceback of its end does) shall not keep its memory.
            self.invited = self._slots = self._incoming = None

    def _result(self, reading: asyncio.Task[StreamEnd]) -> StreamEnd:
        error = reading.exception()
        if error is None:
            return reading.result()
        self._server.fail(error)  # not the peer's fault: the run itself failed
        return StreamEnd("return", "the server failed")

    def _writer_failed(self, writing: asyncio.Task[None]) -> bool:
        """Whether the writer has ended with an error, which is the run's; a peer that is gone is seen by the reader."""
        error = writing.exception() if writing.done() and not writing.cancelled() else None
        if error is None or isinstance(error, WireClosed):
            return False
        self.ended = self.ended or StreamEnd("return", "the server failed")
        self._server.fail(error)
        return True

    async def _read(self, wire: Wire) -> StreamEnd:
        try:
            while True:
                await self._handle(wire, *await read_message(wire, FROM_WORKERS))
        except StreamEnd as end:
            return end
        except WireClosed as error:
            return StreamEnd("return", f"its connection was lost ({error})")
        except ProtocolError as error:
            return StreamEnd("refused", str(error), refused=True)

    async def _write(self, wire: Wire) -> None:
        beat = encode(Beat(progress=0))
        while self._goodbye is None:
            try:
                await asyncio.wait_for(self._wake.wait(), self._server.limits.beat_seconds)
            except TimeoutError:
                self._enqueue(beat)
            self._wake.clear()
            while (self._queue or self._models) and self._goodbye is None:
                await self._write_queued(wire)
                await self._write_model(wire)
        await self._write_queued(wire)
        await wire.write(encode(self._goodbye))

    async def _write_queued(self, wire: Wire) -> None:
        while self._queue:
            await wire.write(self._queue.popleft())

    async def _write_model(self, wire: Wire) -> None:
        if not self._models:
            return
        model, samples = self._models.popleft()
        if self._slots is not None and model.message.slot is not None:
            if (before := self._lent.get(model.message.slot)) is not None:  # it gets the same once more
                before.users -= 1
            self._lent[model.message.slot] = model
            await wire.write(encode(replace(model.message, samples=samples)))
            self._server.count(model.bytes, 0)
        else:
            try:
                await self._write_body(wire, model, samples)
            finally:
                model.users -= 1
        self._delivering = self._delivering and bool(self._models)

    async def _write_body(self, wire: Wire, model: ModelMessage, samples: int) -> None:
        message = replace(model.message, slot=None, samples=samples)
        for frame in frames(message, model.payload, model.buffers):
            await wire.write(*frame)
            if self._delivering:
                self._progressed(self._server.clock())
            if self._goodbye is not None:
                break

    def _enqueue(self, frame: bytes) -> None:
        if len(self._queue) < MOST_QUEUED:
            self._queue.append(frame)
            self._wake.set()

    # -- messages ----------------------------------------------------------------------------------------------

    async def _handle(self, wire: Wire, message: Message, body_bytes: int) -> None:
        match message:
            case Hello() if self.worker is None:
                welcome = self._server.admit(self, message)
                self.worker, self.threads, self.host = welcome.worker, message.threads, message.host
                self._enqueue(encode(welcome))
            case Ready() if self.worker is not None and not self.member:
                if message.handover:
                    self._slots = self._shared_slots()
                self._server.ready(self, message)
            case Gradient() if self.member and self.worker is not None:
                await self._gradient(wire, message, body_bytes, self.worker)
            case Chunk() if self._incoming is not None and self.worker is not None:
                await self._body(wire, body_bytes, self.worker)
            case Beat() if self.worker is not None:
                # Whoever sends its gradient has computed it: only the gradient gets it further.
                if message.progress != self._progress and self._incoming is None:
                    self._progress = message.progress
                    self._progressed(self._server.clock())
            case Taken() if message.slot in self._lent:
                self._lent.pop(message.slot).users -= 1
            case Leave() if self.worker is not None:
                raise StreamEnd("return", f"it left ({message.reason[:200]})" if message.reason else "it left")
            case _:
                raise ProtocolError(f"a {type(message).__name__} is out of place here")

    async def _gradient(self, wire: Wire, message: Gradient, body_bytes: int, worker: int) -> None:
        if self._incoming is not None:
            raise ProtocolError("a Gradient began before the body of the one before was whole")
        if self._held >= MOST_HELD:
            raise ProtocolError(f"more than {MOST_HELD} gradients of one worker are held")
        if message.slot is not None:
            await self._slot(message, message.slot, body_bytes, worker)
            return
        if message.payload_bytes:
            assembly = self._server.assembly()
            assembly.begin(message)
            self._incoming, self._incoming_since = (message, assembly), self._server.clock()
            await self._body(wire, body_bytes, worker)
            return
        if message.buffer_bytes or body_bytes:
            raise ProtocolError("a Gradient that is not finite has no body")
        self._progressed(self._server.clock())
        self._server.arrived(self, ReceivedGradient(worker=worker, message=message))

    async def _body(self, wire: Wire, body_bytes: int, worker: int) -> None:
        assert self._incoming is not None
        message, assembly = self._incoming
        await wire.read_into(assembly.place(body_bytes))
        if not assembly.added(body_bytes):
            return
        self._incoming, now = None, self._server.clock()
        self._progressed(now)
        up_seconds = now - self._incoming_since
        received = await self._server.decoded(worker, message, assembly)
        received.up_seconds, received.up_bytes = up_seconds, message.payload_bytes + message.buffer_bytes
        await self._arrived(received)

    def _shared_slots(self) -> GradientSlots:
        if self.invited is None or not self.invited.done():
            raise ProtocolError("it has not asked for shared memory, and says that it has it")
        return self.invited.result()

    async def _slot(self, message: Gradient, number: int, body_bytes: int, worker: int) -> None:
        """Take a gradient that lies in shared memory."""
        if self._slots is None or body_bytes:
            raise ProtocolError("a Gradient in shared memory has no body, and comes from a worker that shares memory")
        slots, slot = self._slots, self._slots.take(message, number)
        self._progressed(self._server.clock())

        def release() -> None:
            slots.release(number)
            self._enqueue(encode(Taken(slot=number)))

        await self._arrived(await self._server.decoded(worker, message, slot, release))

    async def _arrived(self, received: ReceivedGradient) -> None:
        self._held += 1
        release = received.release

        def released() -> None:
            self._held -= 1
            release()

        received.release = released
        self._server.arrived(self, received)
