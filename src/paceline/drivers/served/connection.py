"""One connection of a worker to the server: models come in, gradients and signs of life go out.

    an event loop in a thread of its own, with two tasks:
      reader    Model  -> `begun_version` at its first byte (the round has closed), staged when whole
                Goodbye, or the end of the stream -> `end`
      writer    messages from the queue, a gradient cut into frames as they go; if there is none, now and then a Beat
                with the progress made: blocks computed, bytes received

A connection is never mended: when it is lost, the worker makes a new one. Its thread has ended when it is closed, which
the interpreter's end does for whoever forgets: a thread that comes back from an operation of torch's to an interpreter
that is no more ends the process with "terminate called without an active exception".

A model comes whole or as changes:

    Model(since=None)   whole: the parameters themselves
    Model(since=7)      what changed since version 7, which must be the one that came before
"""

from __future__ import annotations

import asyncio
import atexit
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from paceline.codecs import Codec
from paceline.codecs.naming import decoder_of, inner_of
from paceline.drivers.served.handover import Slot, WorkerSlots
from paceline.drivers.served.messages import (
    FROM_SERVER,
    Assembly,
    Beat,
    Chunk,
    Frame,
    Goodbye,
    Hello,
    Message,
    Model,
    ProtocolError,
    Ready,
    Sizes,
    Taken,
    Welcome,
    encode,
)
from paceline.drivers.served.security import parse_address
from paceline.drivers.served.transport import Wire, WireClosed, read_message
from paceline.errors import PacelineError
from paceline.training.outgoing import whole_codec_of
from paceline.workers.flat import FlatModel

Out = bytes | Iterable[Frame]
ENDED_WITHIN_SECONDS = 60.0  # it computes for as long as one frame takes, and waits for nothing
FLUSHED_WITHIN_SECONDS = 1.0
PROGRESS_BYTES = 64 * 1024  # as many received are progress


class ServerUnreachableError(PacelineError, ConnectionError):
    """No server could be reached, for as long as the worker was to try.

    >>> raise ServerUnreachableError("no server at 10.0.0.7:29400 for 60 s: nothing listens there")
    Traceback (most recent call last):
    paceline.drivers.served.connection.ServerUnreachableError: no server at 10.0.0.7:29400 for 60 s: ...
    """


class WorkerRefused(PacelineError, ConnectionRefusedError):  # noqa: N818 - what happened, in the past tense
    """The server refuses this worker; a new connection would not help.

    >>> raise WorkerRefused("its model is another one")
    Traceback (most recent call last):
    paceline.drivers.served.connection.WorkerRefused: its model is another one
    """


class ConnectionLost(PacelineError, ConnectionError):  # noqa: N818 - what happened, in the past tense
    """The connection is gone; a new one may be tried.

    >>> raise ConnectionLost("the server said nothing for 15 s")
    Traceback (most recent call last):
    paceline.drivers.served.connection.ConnectionLost: the server said nothing for 15 s
    """


class TrainingOver(PacelineError, ConnectionError):  # noqa: N818 - an end, not a fault
    """The server has nothing more to do.

    >>> raise TrainingOver("all rounds are done")
    Traceback (most recent call last):
    paceline.drivers.served.connection.TrainingOver: all rounds are done
    """


ENDS = {"refused": WorkerRefused, "over": TrainingOver, "return": ConnectionLost}  # by what a Goodbye says


class IncomingModel:
    """The model as it comes to a worker: put together from frames, and summed where it comes as changes.

    One thread fills it; whoever loads it waits until it is whole.

    >>> from paceline.codecs import Identity
    >>> incoming = IncomingModel(Identity(), elements=1, buffers=0)
    >>> payload = Identity().encode(torch.ones(1))
    >>> incoming.begin(Model(version=0, since=None, more=0, payload_bytes=payload.numel(), buffer_bytes=0))
    >>> incoming.place(payload.numel())[:] = payload.numpy().data
    >>> incoming.added(payload.numel()).version
    0
    """

    def __init__(self, codec: Codec, *, elements: int, buffers: int) -> None:
        self._whole_codec = whole_codec_of(codec)
        whole = self._whole_codec.most_bytes(elements)
        most = max(codec.most_bytes(elements), whole)
        self.whole_sizes = Sizes(most_payload_bytes=whole, buffer_bytes=4 * buffers)
        self._assembly = Assembly(Sizes(most_payload_bytes=most, buffer_bytes=4 * buffers))
        comes_whole = inner_of(codec).suits_parameters
        self._held: torch.Tensor | None = None if comes_whole else torch.zeros(elements)
        self._buffers = torch.zeros(0)
        self._body: Assembly | Slot = self._assembly  # where the newest model lies, if it came whole
        self._version: int | None = None
        self._message: Model | None = None

    def begin(self, message: Model) -> None:
        """Expect the body of a model."""
        if message.since is not None and (self._held is None or message.since != self._version):
            raise ProtocolError(f"a change since version {message.since} came, and version {self._version} is held")
        self._assembly.begin(message)
        self._body = self._assembly
        self._message = message

    def taken_from(self, slot: Slot, message: Model) -> bool:
        """Take a whole model out of shared memory; return False if it stays there until it is loaded."""
        self._version = message.version
        if self._held is None:
            self._body = slot
            return False
        self._decode_whole(slot.payload, self._held)
        self._buffers = slot.buffers
        return True

    def _decode_whole(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        try:
            self._whole_codec.decode(payload, out=out)
        except ValueError as error:
            raise ProtocolError(f"the server sent another model: {error}") from None

    def place(self, body_bytes: int) -> memoryview:
        """Return the memory for the next part of the body."""
        return self._assembly.place(body_bytes)

    def added(self, body_bytes: int) -> Model | None:
        """Note that a part has come; once the model is whole, take it in and return its message."""
        if not self._assembly.added(body_bytes) or self._message is None:
            return None
        message, payload = self._message, self._assembly.payload
        self._version = message.version
        if self._held is not None:
            if message.since is None:
                self._decode_whole(payload, self._held)
            else:
                try:
                    self._held += decoder_of(payload).decode(payload, expected_length=self._held.numel())
                except ValueError as error:
                    raise ProtocolError(f"the server sent another change: {error}") from None
            self._buffers = self._assembly.buffers
        return message

    def load(self, model: FlatModel) -> None:
        """Load the newest parameters and buffers into a model."""
        if self._held is not None:
            model.load(self._held, self._buffers)
            return
        self._decode_whole(self._body.payload, model.parameters)
        model.load_buffers(self._body.buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedModel:
    """A model that is whole: since when, and how long its bytes took from the first to the last.

    `down_bytes` are those on the connection: none for a model in shared memory.
    """

    message: Model
    whole_since: float
    down_seconds: float = 0.0
    down_bytes: int = 0


class ServerConnection:
    """A connection to the server, from its opening to its loss."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        credentials: ssl.SSLContext | None = None,
        answer_seconds: float = 15.0,
        silence_seconds: float = 15.0,
        met_before: bool = False,
    ) -> None:
        self._address, self._credentials, self._met = address, credentials, met_before
        self._news = threading.Condition()
        self._silence_seconds = silence_seconds
        self._wire: Wire | None = None
        self._welcome: Welcome | None = None
        self._incoming: IncomingModel | None = None
        self._slots: WorkerSlots | None = None
        self._staged: StagedModel | None = None
        self._down_since: float | None = None  # the first byte of the model that is coming
        self._down_bytes = 0
        self.begun_version = -1
        self.progress = 0
        self.end: Exception | None = None  # why the connection is of no use any more
        self._began = time.monotonic()
        self._queue: deque[Out] = deque([encode(hello)])
        self._wake = asyncio.Event()
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._talking = self._loop.create_task(self._talk(answer_seconds))
        self._thread = threading.Thread(target=self._run, name="paceline-connection", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self.welcome = self._wait_welcome(answer_seconds)
        self._silence_seconds = max(self.welcome.silence_seconds, 1.0)

    # -- for the worker ---------------------------------------------------------------------------------------

    def ready(self, signature: str, incoming: IncomingModel, slots: WorkerSlots | None = None) -> None:
        """Tell the server that model and data are there; from now on models come."""
        self._incoming, self._slots = incoming, slots
        self.say(Ready(signature=signature, handover=slots is not None))

    def free_slot(self) -> tuple[int, Slot] | None:
        """Return a slot of shared memory for a gradient, if there is one: it is the server's from then on."""
        with self._news:
            if self._slots is None or not self._slots.free:
                return None
            number = min(self._slots.free)
            self._slots.free.discard(number)
            return number, self._slots.gradients[number]

    def keep_slot(self, number: int) -> None:
        """Take back a slot that nothing was written to."""
        with self._news:
            if self._slots is not None:
                self._slots.free.add(number)

    def send(self, frames: Iterable[Frame], sent: Callable[[], None]) -> None:
        """Queue a message of several frames; `sent` is called when the last has been taken."""

        def counted() -> Iterable[Frame]:
            yield from frames
            sent()

        self._put(counted())

    def say(self, message: Message) -> None:
        """Queue a small message."""
        self._put(encode(message))

    def _put(self, item: Out) -> None:
        def put() -> None:
            self._queue.append(item)
            self._wake.set()

        self._in_loop(put)

    def _in_loop(self, work: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: `end` says why
            self._loop.call_soon_threadsafe(work)

    def take_model(self, load: Callable[[IncomingModel], None]) -> StagedModel:
        """Wait for a whole model, load it, and return what is known of it.

        Raises ConnectionLost if the server is gone, TrainingOver or WorkerRefused if it says so.
        """
        with self._news:
            while True:
                self._raise_if_over()
                staged = self._staged
                if staged is not None and self._incoming is not None:
                    load(self._incoming)
                    self._staged = None
                    self._give_back(staged)
                    return staged
                self._news.wait(0.5)
                self._in_loop(self._look)  # bytes that the system still holds back
                silent_seconds = time.monotonic() - self._heard
                if silent_seconds > self._silence_seconds:
                    raise ConnectionLost(f"the server said nothing for {silent_seconds:.0f} s")

    def close(self) -> None:
        """Close the connection, after what is queued has gone out or a second has passed; once more does no harm."""
        self._in_loop(self._close)
        self._thread.join(ENDED_WITHIN_SECONDS)
        self._slots = self._incoming = None  # whoever keeps the error of this connection shall not keep its memory
        atexit.unregister(self.close)  # not before: a Ctrl-C may end the waiting, and then the interpreter's end waits

    def _close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._wire is None:
            self._talking.cancel()
        else:
            self._loop.call_later(FLUSHED_WITHIN_SECONDS, self._talking.cancel)

    # -- waiting -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._wire is not None:
            self._wire.wake_for_any_byte()

    @property
    def sent_bytes(self) -> int:
        """How many bytes the system has taken."""
        return self._wire.sent_bytes if self._wire is not None else 0

    @property
    def seconds(self) -> float:
        """How long the server has been heard of."""
        return self._heard - self._began

    @property
    def _heard(self) -> float:
        return self._wire.heard if self._wire is not None else self._began

    def _wait_welcome(self, seconds: float) -> Welcome:
        deadline = time.monotonic() + seconds
        try:
            with self._news:
                while self._welcome is None:
                    self._raise_if_over()
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise ConnectionLost(f"no answer within {seconds:g} s")
                    self._news.wait(left)
                return self._welcome
        except BaseException:
            self.close()
            raise

    def _raise_if_over(self) -> None:
        if self.end is not None:
            raise self.end

    # -- in the connection's own thread ------------------------------------------------------------------------

    def _run(self) -> None:
        end: Exception = ConnectionLost("the connection is closed")
        try:
            self._loop.run_until_complete(self._talking)
        except asyncio.CancelledError:
            pass
        except ProtocolError as error:
            end = ProtocolError(f"the connection cannot be used: {error}")
        except OSError as error:
            welcomed = self._welcome is not None
            end = ConnectionLost(
                why_lost(error, tls=self._credentials is not None, welcomed=welcomed, met_before=self._met)
            )
        except Exception as error:  # of a codec, say: the worker's own thread raises it
            end = ProtocolError(f"the connection cannot be used: {type(error).__name__}: {error}")
        finally:
            self._finish(end)
            self._loop.close()

    async def _talk(self, answer_seconds: float) -> None:
        host, port = parse_address(self._address)
        name = None if self._credentials is None else host
        async with asyncio.timeout(answer_seconds):
            _, wire = await self._loop.create_connection(Wire, host, port, ssl=self._credentials, server_hostname=name)
        self._wire = wire
        reading, writing = (asyncio.create_task(work) for work in (self._read(wire), self._write(wire)))
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():  # the last word may be on its way
                await asyncio.wait({reading}, timeout=FLUSHED_WITHIN_SECONDS)
            for task in (reading, writing):
                if task.done():
                    task.result()
        finally:
            for task in (reading, writing):
                task.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)
            await wire.farewell(0.0)

    async def _write(self, wire: Wire) -> None:
        while True:
            while self._queue:
                item = self._queue.popleft()
                for frame in [(item,)] if isinstance(item, bytes) else item:
                    await wire.write(*frame)
            if self._closing:
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(self._silence_seconds / 4):
                    await self._wake.wait()
            except TimeoutError:
                wire.wake_for_any_byte()
                if self._welcome is not None:
                    progress = self.progress + wire.received_bytes // PROGRESS_BYTES
                    self._queue.append(encode(Beat(progress=progress)))

    async def _read(self, wire: Wire) -> None:
        while True:
            message, body_bytes = await read_message(wire, FROM_SERVER)
            match message:
                case Welcome():
                    with self._news:
                        self._welcome = message
                        self._news.notify_all()
                case Model():
                    with self._news:  # whoever loads the staged model is done with it, or comes too late for it
                        self._give_back(self._staged)
                        self._staged = None
                        self.begun_version = message.version
                    if self._down_since is None:  # else it is one of several changes
                        self._down_since, self._down_bytes = time.monotonic(), 0
                    if message.slot is not None:
                        self._take_slot(message, message.slot, body_bytes)
                        continue
                    self._expected().begin(message)
                    await self._add(wire, body_bytes)
                case Taken() if self._slots is not None and message.slot < len(self._slots.gradients):
                    with self._news:
                        self._slots.free.add(message.slot)
                case Chunk():
                    await self._add(wire, body_bytes)
                case Beat():
                    pass
                case Goodbye():
                    who = f"the server at {self._address} refused this worker: " if message.what == "refused" else ""
                    self._finish(ENDS[message.what](who + message.reason))
                    return
                case _:
                    raise ProtocolError(f"a {type(message).__name__} is out of place here")

    async def _add(self, wire: Wire, body_bytes: int) -> None:
        incoming = self._expected()
        await wire.read_into(incoming.place(body_bytes))
        self._down_bytes += body_bytes
        message = incoming.added(body_bytes)
        if message is not None and not message.more:
            self._stage(message)

    def _take_slot(self, message: Model, number: int, body_bytes: int) -> None:
        if self._slots is None or number >= len(self._slots.models) or body_bytes or message.since is not None:
            raise ProtocolError(f"a model in slot {number} of shared memory cannot be")
        slot = self._slots.models[number]
        slot.begin(message)
        if self._expected().taken_from(slot, message):
            self.say(Taken(slot=number))
            message = replace(message, slot=None)
        self._stage(message)

    def _stage(self, message: Model) -> None:
        now, since, self._down_since = time.monotonic(), self._down_since, None
        down_seconds = 0.0 if since is None or not self._down_bytes else now - since
        with self._news:
            self._staged = StagedModel(
                message=message, whole_since=now, down_seconds=down_seconds, down_bytes=self._down_bytes
            )
            self._news.notify_all()

    def _give_back(self, model: StagedModel | None) -> None:
        if model is not None and model.message.slot is not None:
            self.say(Taken(slot=model.message.slot))

    def _expected(self) -> IncomingModel:
        if self._incoming is None:
            raise ProtocolError("a model came before it was asked for")
        return self._incoming

    def _finish(self, end: Exception) -> None:
        with self._news:
            self.end = self.end or end
            self._news.notify_all()


def why_lost(error: OSError, *, tls: bool, welcomed: bool, met_before: bool = False) -> str:
    """Return why a connection failed, in our words or else in the system's.

    A server that hangs up on a stranger may want other keys; one that was met before is ending, or was killed.

    >>> why_lost(ConnectionRefusedError(111, "Connect call failed"), tls=False, welcomed=False)
    'nothing listens there'
    """
    cause = error.__cause__ if isinstance(error, WireClosed) and error.__cause__ is not None else error
    text = str(cause)
    if isinstance(cause, ConnectionRefusedError) or "Errno 111" in text:
        return "nothing listens there"
    if isinstance(cause, socket.gaierror):
        return "there is no such host"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return "the server's certificate is not of the same CA, or not for this host name"
    if "WRONG_VERSION_NUMBER" in text:
        return "the server does not speak TLS: leave the keys out"
    if not welcomed and isinstance(cause, WireClosed | ssl.SSLError | ConnectionResetError):
        if met_before:
            return "it hung up before it answered"
        if tls:
            return "it hung up: are the keys of the same CA? (`paceline keys` made both?)"
        return "it hung up: does the server want TLS keys?"
    if isinstance(cause, TimeoutError):
        return "it does not answer"
    return (
        str(error) if isinstance(error, WireClosed) else (cause.strerror if isinstance(cause, OSError) else "") or text
    )
