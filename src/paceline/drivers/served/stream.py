"""One worker's stream, seen from the server: which message may come when, and how long it may take.

    opened --Hello--> joining --Ready--> member --> ended
      |  hello_seconds   |  joining_seconds  |  silence_seconds, stall_seconds

One task reads, one task writes; the server asks `overdue` now and then. A gradient comes as one Gradient message and
Chunks; the last one gives it to the server (`arrived`), which calls `send_model`, often only when the round closes.

A slow stream keeps no other waiting, and takes little memory: a short queue of small messages, and the newest model (or
the changes that lead to it, as long as they are smaller than the model).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import grpc
import torch

from paceline.drivers.served.coordinator import ReceivedGradient
from paceline.drivers.served.messages import (
    Assembly,
    Beat,
    Chunk,
    Goodbye,
    Gradient,
    Hello,
    Leave,
    Message,
    ProtocolError,
    Ready,
    Sizes,
    Welcome,
    decode,
    encode,
)
from paceline.drivers.served.settings import Limits

MOST_HELD = 2  # a late gradient and a fresh one; there is never a reason for a third
MOST_QUEUED = 16


class StreamServer(Protocol):
    """What a stream needs of its server."""

    limits: Limits
    sizes: Sizes

    def clock(self) -> float:
        """Return the seconds of a clock that always runs."""

    def admit(self, stream: WorkerStream, hello: Hello) -> Welcome:
        """Give a new worker a seat, or raise `StreamEnd`."""

    def ready(self, stream: WorkerStream, ready: Ready) -> None:
        """Let a worker that has its model take part."""

    def arrived(self, stream: WorkerStream, received: ReceivedGradient) -> None:
        """Take a whole gradient."""

    def decoded(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the vector of a payload; ProtocolError if it is none of the model's."""

    def count_bytes(self, *, sent: int = 0, received: int = 0) -> None:
        """Count what went over the network."""

    def fail(self, error: BaseException) -> None:
        """End the run, which itself failed."""


class StreamEnd(Exception):  # noqa: N818 - an end, not a fault
    """How a stream ends: what the worker is told to do (see `Goodbye`), why, and whether that counts as a refusal.

    >>> StreamEnd("refused", "two Hellos").reason
    'two Hellos'
    """

    def __init__(self, what: str, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.what, self.reason, self.refused = what, reason, refused


class WorkerStream:
    """A worker's stream, from opening to end: `serve` returns how it ended."""

    def __init__(self, server: StreamServer, context: Any) -> None:
        self._server, self._context = server, context
        self.peer = str(context.peer())
        self.worker: int | None = None
        self.threads, self.host = 1, ""
        self.member = False  # whether it has said Ready
        self.owes = False  # whether it was sent a model, and has not answered with that model's gradient
        self._delivering = False  # whether the model that it owes a gradient for is still being written
        self.opened = server.clock()
        self._heard = self._moved = self.opened  # the last message from it; the last progress in what it owes
        self._progress = -1  # of the last Beat
        self._queue: deque[bytes] = deque()  # small messages to write
        self._models: deque[Sequence[bytes]] = deque()  # models, or changes of one, to write: each as frames
        self.promised: int | None = None  # the newest version that was given to `send_model`
        self._wake = asyncio.Event()
        self._goodbye: Goodbye | None = None
        self._reading: asyncio.Task[StreamEnd] | None = None
        self._end: StreamEnd | None = None
        self._free: list[Assembly] = []
        self._held = 0
        self._incoming: tuple[Gradient, Assembly] | None = None

    # -- what the server asks ----------------------------------------------------------------------------------

    @property
    def backlog_bytes(self) -> list[int]:
        """The sizes of the models, or changes of one, that wait to be sent after the one that is being sent."""
        return [sum(map(len, frames)) for frames in self._models]

    def send_model(self, version: int, messages: Sequence[Sequence[bytes]], *, whole: bool) -> None:
        """Send a model, as frames: after what is being sent, and, if it is a whole one, instead of what comes next."""
        if whole:
            self._models.clear()
        self._models.extend(messages)
        self.promised = version
        if not self.owes:  # a worker that owes a gradient already gets no more time because of a newer model
            self.owes = self._delivering = True
            self._moved = self._server.clock()
        self._wake.set()

    def end(self, end: StreamEnd) -> None:
        """End the stream, and tell the worker why."""
        if self._end is None:
            self._end = end
            if self._reading is not None:
                self._reading.cancel()

    def overdue(self, now: float) -> StreamEnd | None:
        """Return why the stream must end, if it must."""
        limits = self._server.limits
        if self.worker is None:
            late = now - self.opened > limits.hello_seconds
            return StreamEnd("refused", f"said nothing for {limits.hello_seconds:g} s", refused=True) if late else None
        if now - self._heard > limits.silence_seconds:
            return StreamEnd("return", f"silent for {limits.silence_seconds:g} s")
        if not self.member:
            late = now - self.opened > limits.joining_seconds
            return StreamEnd("return", f"not ready after {limits.joining_seconds:g} s") if late else None
        if self.owes and now - self._moved > limits.stall_seconds:
            return StreamEnd("return", f"no progress for {limits.stall_seconds:g} s (server.stall_seconds)")
        return None

    def extend_deadlines(self, seconds: float) -> None:
        """Forgive the worker a time in which the server itself was busy."""
        self.opened, self._heard, self._moved = (at + seconds for at in (self.opened, self._heard, self._moved))

    # -- reading and writing -----------------------------------------------------------------------------------

    async def serve(self) -> StreamEnd:
        """Read and write until the stream ends, and return how it ended."""
        self._reading = asyncio.create_task(self._read())
        writing = asyncio.create_task(self._write())
        # A peer may go while it is written to; the reader sees it too.
        writing.add_done_callback(lambda task: task.cancelled() or task.exception())
        end = StreamEnd("return", "its connection was lost")
        try:
            await asyncio.wait({self._reading})
            end = self._end or (end if self._reading.cancelled() else self._result(self._reading))
            self._goodbye = Goodbye(what=end.what, reason=" ".join(end.reason.split())[:1000])  # type: ignore[arg-type]
            self._wake.set()
            await asyncio.wait({writing}, timeout=self._server.limits.farewell_seconds)
            return end
        except asyncio.CancelledError:  # gRPC ends the handler when the peer is gone
            return self._end or end
        finally:
            self._reading.cancel()
            writing.cancel()

    def _result(self, reading: asyncio.Task[StreamEnd]) -> StreamEnd:
        error = reading.exception()
        if error is None:
            return reading.result()
        self._server.fail(error)  # not the peer's fault: the run itself failed
        return StreamEnd("return", "the server failed")

    async def _read(self) -> StreamEnd:
        most_bytes = self._server.sizes.most_message_bytes
        try:
            while True:
                frame = await self._next()
                if frame is grpc.aio.EOF:
                    return StreamEnd("return", "it closed its stream")
                self._server.count_bytes(received=len(frame))
                self._heard = self._server.clock()
                if len(frame) > most_bytes:
                    raise ProtocolError(f"a message has at most {most_bytes} bytes (this one has {len(frame)})")
                self._handle(*decode(frame))
        except StreamEnd as end:
            return end
        except ProtocolError as error:
            return StreamEnd("refused", str(error), refused=True)

    async def _next(self) -> Any:
        try:
            return await self._context.read()
        except Exception as error:  # whatever gRPC raises when a peer goes, or sends more than it may
            raise StreamEnd("return", f"its connection was lost ({type(error).__name__})") from None

    async def _write(self) -> None:
        beat = encode(Beat(progress=0))
        while self._goodbye is None:
            try:
                await asyncio.wait_for(self._wake.wait(), self._server.limits.beat_seconds)
            except TimeoutError:
                self._enqueue(beat)
            self._wake.clear()
            while (self._queue or self._models) and self._goodbye is None:
                await self._write_queued()
                await self._write_model()
        await self._write_queued()
        await self._put(encode(self._goodbye))

    async def _write_queued(self) -> None:
        while self._queue:
            await self._put(self._queue.popleft())

    async def _write_model(self) -> None:
        if not self._models:
            return
        for frame in self._models.popleft():
            await self._put(frame)
            if self._delivering:
                self._moved = self._server.clock()
            if self._goodbye is not None:
                break
        self._delivering = self._delivering and bool(self._models)

    async def _put(self, frame: bytes) -> None:
        await self._context.write(frame)
        self._server.count_bytes(sent=len(frame))

    def _enqueue(self, frame: bytes) -> None:
        if len(self._queue) < MOST_QUEUED:
            self._queue.append(frame)
            self._wake.set()

    # -- messages ----------------------------------------------------------------------------------------------

    def _handle(self, message: Message, body: memoryview) -> None:
        if len(body) and not isinstance(message, Gradient | Chunk):
            raise ProtocolError(f"a {type(message).__name__} has no body (this one has {len(body)} bytes)")
        match message:
            case Hello() if self.worker is None:
                welcome = self._server.admit(self, message)
                self.worker, self.threads, self.host = welcome.worker, message.threads, message.host
                self._enqueue(encode(welcome))
            case Ready() if self.worker is not None and not self.member:
                self._server.ready(self, message)
            case Gradient() if self.member and self.worker is not None:
                self._begin_gradient(message, body, self.worker)
            case Chunk() if self._incoming is not None and self.worker is not None:
                self._add(body, *self._incoming, self.worker)
            case Beat() if self.worker is not None:
                # Whoever sends its gradient has computed it: only the gradient gets it further.
                if message.progress != self._progress and self._incoming is None:
                    self._progress, self._moved = message.progress, self._server.clock()
            case Leave() if self.worker is not None:
                raise StreamEnd("return", f"it left ({message.reason[:200]})" if message.reason else "it left")
            case _:
                raise ProtocolError(f"a {type(message).__name__} is out of place here")

    def _begin_gradient(self, message: Gradient, body: memoryview, worker: int) -> None:
        if self._incoming is not None:
            raise ProtocolError("a Gradient began before the body of the one before was whole")
        if self._held >= MOST_HELD:
            raise ProtocolError(f"more than {MOST_HELD} gradients of one worker are held")
        if message.payload_bytes:
            assembly = self._free.pop() if self._free else Assembly(self._server.sizes)
            assembly.begin(message)
            self._incoming = message, assembly
            self._add(body, message, assembly, worker)
            return
        if message.buffer_bytes or len(body):
            raise ProtocolError("a Gradient that is not finite has no body")
        self._moved = self._server.clock()
        self._server.arrived(self, ReceivedGradient(worker=worker, message=message))

    def _add(self, body: memoryview, message: Gradient, assembly: Assembly, worker: int) -> None:
        whole = assembly.add(body)
        if whole or len(body) >= self._server.sizes.chunk_bytes:  # a body that trickles in gets nowhere
            self._moved = self._server.clock()
        if not whole:
            return
        self._incoming = None
        self._held += 1

        def release() -> None:
            self._held -= 1
            self._free.append(assembly)

        received = ReceivedGradient(
            worker=worker,
            message=message,
            vector=self._server.decoded(assembly.payload),
            buffer_changes=assembly.buffers,
            release=release,
        )
        self._server.arrived(self, received)
