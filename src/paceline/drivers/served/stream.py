"""One worker's stream, seen from the server: what it may say when, and how long it may take.

    opened --Hello--> joining --Ready--> member --> gone
      |  hello_seconds   |  joining_seconds  |  silence_seconds, stall_seconds

One task reads, one task writes; a watchman asks `overdue` now and then. Nobody else is kept waiting by a slow stream:
what is to be sent is one small queue and the newest model (or the changes that lead to it, as long as they are smaller
than the model), nothing piles up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import grpc
import torch

from paceline.drivers.served.frames import Assembly, Sizes, memory_for
from paceline.drivers.served.limits import Limits
from paceline.drivers.served.members import Received
from paceline.drivers.served.messages import (
    Beat,
    Chunk,
    Goodbye,
    Gradient,
    Hello,
    Leave,
    Message,
    ProtocolError,
    Ready,
    Welcome,
    decode,
    encode,
)

MOST_HELD = 2  # a late gradient and a fresh one; there is never a reason for a third
MOST_QUEUED = 16


class House(Protocol):
    """What a stream asks of its server."""

    limits: Limits
    sizes: Sizes

    def clock(self) -> float:
        """Seconds on a clock that always runs."""

    def admit(self, stream: Stream, hello: Hello) -> Welcome:
        """Give a newcomer a seat."""

    def ready(self, stream: Stream, ready: Ready) -> None:
        """It has its model, and takes part."""

    def arrived(self, stream: Stream, received: Received) -> None:
        """Its gradient is in."""

    def decoded(self, payload: torch.Tensor) -> torch.Tensor:
        """The vector of a payload; ProtocolError if it is none of the model's."""

    def traffic(self, *, sent: int = 0, received: int = 0) -> None:
        """Bytes went over the wire."""

    def broken(self, error: BaseException) -> None:
        """The run itself failed."""


class Gone(Exception):  # noqa: N818 - an end, not a fault
    """A stream ends; what is said to the worker, and what is written down.

    >>> Gone("refused", "two Hellos").reason
    'two Hellos'
    """

    def __init__(self, what: str, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.what, self.reason, self.refused = what, reason, refused


class Stream:
    """A worker's stream, from opening to end: `serve` returns how it ended."""

    def __init__(self, house: House, context: Any) -> None:
        self._house, self._context = house, context
        self.peer = str(context.peer())
        self.worker: int | None = None
        self.threads, self.host = 1, ""
        self.member = self.owes = self._delivering = False
        self.opened = self._heard = self._moved = house.clock()
        self._progress = -1
        self._queue: deque[bytes] = deque()
        self._models: deque[Sequence[bytes]] = deque()
        self.promised: int | None = None
        self._wake = asyncio.Event()
        self._farewell: Goodbye | None = None
        self._reading: asyncio.Task[Gone] | None = None
        self._fate: Gone | None = None
        self._free: list[torch.Tensor] = []
        self._held = 0
        self._assembly: Assembly | None = None
        self._gradient: Gradient | None = None
        self._memory: torch.Tensor | None = None

    # -- from outside ------------------------------------------------------------------------------------------

    @property
    def backlog(self) -> int:
        """How many models, or changes of one, wait to be sent after the one that is being sent."""
        return len(self._models)

    @property
    def backlog_bytes(self) -> int:
        """What they weigh."""
        return sum(len(frame) for frames in self._models for frame in frames)

    def send_model(self, version: int, messages: Sequence[Sequence[bytes]], *, whole: bool) -> None:
        """Send a model, as frames: after what is being sent, and, if it is a whole one, instead of what comes next."""
        if whole:
            self._models.clear()
        self._models.extend(messages)
        self.promised = version
        if not self.owes:  # one who owed work before this round is no less stalled for getting more of it
            self.owes = self._delivering = True
            self._moved = self._house.clock()
        self._wake.set()

    def dismiss(self, fate: Gone) -> None:
        """End the stream, and tell the worker why."""
        if self._fate is None:
            self._fate = fate
            if self._reading is not None:
                self._reading.cancel()

    def overdue(self, now: float) -> Gone | None:
        """Why the stream must end, if it must."""
        limits = self._house.limits
        if self.worker is None:
            late = now - self.opened > limits.hello_seconds
            return Gone("refused", f"said nothing for {limits.hello_seconds:g} s", refused=True) if late else None
        if now - self._heard > limits.silence_seconds:
            return Gone("return", f"silent for {limits.silence_seconds:g} s")
        if not self.member:
            late = now - self.opened > limits.joining_seconds
            return Gone("return", f"not ready after {limits.joining_seconds:g} s") if late else None
        if self.owes and now - self._moved > limits.stall_seconds:
            return Gone("return", f"no progress for {limits.stall_seconds:g} s (server.stall_seconds)")
        return None

    def excuse(self, seconds: float) -> None:
        """The server itself was busy for so long: nobody else is to blame for it."""
        self.opened, self._heard, self._moved = (at + seconds for at in (self.opened, self._heard, self._moved))

    # -- the life of a stream ----------------------------------------------------------------------------------

    async def serve(self) -> Gone:
        """Read and write until the end; returns how it ended."""
        self._reading = asyncio.create_task(self._read())
        writing = asyncio.create_task(self._write())
        # A peer may go while it is written to; the reader sees it too.
        writing.add_done_callback(lambda task: task.cancelled() or task.exception())
        fate = Gone("return", "its connection was lost")
        try:
            await asyncio.wait({self._reading})
            fate = self._fate or (fate if self._reading.cancelled() else self._outcome(self._reading))
            await self._say_goodbye(fate, writing)
            return fate
        except asyncio.CancelledError:  # gRPC ends the handler when the peer is gone
            return self._fate or fate
        finally:
            self._reading.cancel()
            writing.cancel()

    def _outcome(self, reading: asyncio.Task[Gone]) -> Gone:
        error = reading.exception()
        if error is None:
            return reading.result()
        self._house.broken(error)  # not the peer's fault: the run itself failed
        return Gone("return", "the server failed")

    async def _say_goodbye(self, fate: Gone, writing: asyncio.Task[None]) -> None:
        self._farewell = Goodbye(what=fate.what, reason=" ".join(fate.reason.split())[:1000])  # type: ignore[arg-type]
        self._wake.set()
        await asyncio.wait({writing}, timeout=self._house.limits.farewell_seconds)

    async def _read(self) -> Gone:
        try:
            while True:
                frame = await self._next()
                if frame is grpc.aio.EOF:
                    return Gone("return", "it closed its stream")
                self._house.traffic(received=len(frame))
                self._heard = self._house.clock()
                if len(frame) > (most := self._house.sizes.most_message_bytes):
                    raise ProtocolError(f"a message has at most {most} bytes (this one has {len(frame)})")
                message, body = decode(frame)
                self._hear(message, body)
        except Gone as gone:
            return gone
        except ProtocolError as error:
            return Gone("refused", str(error), refused=True)
        except asyncio.CancelledError:
            raise

    async def _next(self) -> Any:
        try:
            return await self._context.read()
        except Exception as error:  # whatever gRPC raises when a peer goes, or sends more than it may
            raise Gone("return", f"its connection was lost ({type(error).__name__})") from None

    async def _write(self) -> None:
        beat = encode(Beat(progress=0))
        while True:
            try:
                await asyncio.wait_for(self._wake.wait(), self._house.limits.beat_seconds)
            except TimeoutError:
                self._enqueue(beat)
            self._wake.clear()
            while self._queue or self._models:
                if self._farewell is not None:
                    break
                await self._write_queued()
                frames = self._models.popleft() if self._models else None
                for frame in frames or ():
                    await self._put(frame)
                    if self._delivering:
                        self._moved = self._house.clock()
                    if self._farewell is not None:
                        break
                self._delivering = self._delivering and (frames is None or bool(self._models))
            if self._farewell is not None:
                await self._write_queued()
                await self._put(encode(self._farewell))
                return

    async def _write_queued(self) -> None:
        while self._queue:
            await self._put(self._queue.popleft())

    async def _put(self, frame: bytes) -> None:
        await self._context.write(frame)
        self._house.traffic(sent=len(frame))

    def _enqueue(self, frame: bytes) -> None:
        if len(self._queue) < MOST_QUEUED:
            self._queue.append(frame)
            self._wake.set()

    # -- what it says ------------------------------------------------------------------------------------------

    def _hear(self, message: Message, body: memoryview) -> None:
        if len(body) and not isinstance(message, Gradient | Chunk):
            raise ProtocolError(f"a {type(message).__name__} has no body (this one has {len(body)} bytes)")
        match message:
            case Hello() if self.worker is None:
                welcome = self._house.admit(self, message)
                self.worker, self.threads, self.host = welcome.worker, message.threads, message.host
                self._enqueue(encode(welcome))
            case Ready() if self.worker is not None and not self.member:
                self._house.ready(self, message)
            case Gradient() if self.member:
                self._begin_gradient(message, body)
            case Chunk() if self._assembly is not None:
                self._add(body)
            case Beat() if self.worker is not None:
                # Whoever sends its gradient has computed it: only the gradient gets it further.
                if message.progress != self._progress and self._assembly is None:
                    self._progress, self._moved = message.progress, self._house.clock()
            case Leave() if self.worker is not None:
                raise Gone("return", f"it left ({message.reason[:200]})" if message.reason else "it left")
            case _:
                raise ProtocolError(f"a {type(message).__name__} is out of place here")

    def _begin_gradient(self, message: Gradient, body: memoryview) -> None:
        if self._assembly is not None:
            raise ProtocolError("a Gradient began before the body of the one before was whole")
        if self._held >= MOST_HELD:
            raise ProtocolError(f"more than {MOST_HELD} gradients of one worker are held")
        if not message.payload_bytes:
            self._hear_of_none(message, body)
            return
        self._memory = self._free.pop() if self._free else memory_for(self._house.sizes)
        assembly = Assembly(self._house.sizes, self._memory)
        assembly.begin(message)
        self._assembly, self._gradient = assembly, message
        self._add(body)

    def _hear_of_none(self, message: Gradient, body: memoryview) -> None:
        """The worker's gradient is not finite, and so it was not sent."""
        if self.worker is None or message.buffer_bytes or len(body):
            raise ProtocolError("a Gradient that is not finite has no body")
        self._moved = self._house.clock()
        nothing = torch.zeros(0)
        received = Received(
            worker=self.worker, message=message, vector=None, buffer_changes=nothing, release=lambda: None
        )
        self._house.arrived(self, received)

    def _add(self, body: memoryview) -> None:
        assembly, message, memory = self._assembly, self._gradient, self._memory
        if assembly is None or message is None or memory is None or self.worker is None:
            raise ProtocolError("a chunk came, but no body had begun")
        whole = assembly.add(body)
        if whole or len(body) >= self._house.sizes.chunk_bytes:  # a body that trickles in gets nowhere
            self._moved = self._house.clock()
        if not whole:
            return
        self._assembly = self._gradient = self._memory = None
        self._held += 1

        def release() -> None:
            self._held -= 1
            if len(self._free) < MOST_HELD:
                self._free.append(memory)

        received = Received(
            worker=self.worker,
            message=message,
            vector=self._house.decoded(assembly.payload),
            buffer_changes=assembly.buffers,
            release=release,
        )
        self._house.arrived(self, received)
