"""One connection of a worker to the server: models come in, gradients and signs of life go out.

    reader thread:    Model  -> `begun_version` at its first byte (the round has closed), staged when whole
                      Goodbye, or the end of the stream -> `end`
    sender (gRPC's):  frames from the queue, a gradient cut into frames as they go
    beat thread:      a sign of life, with the progress made

A connection is never mended: when it is lost, the worker makes a new one. All three threads have ended when it is
closed, which the interpreter's end does for whoever forgets: a thread that comes back from an operation of torch's to
an interpreter that is no more ends the process with "terminate called without an active exception".

A model comes whole or as changes:

    Model(since=None)   whole: the parameters themselves
    Model(since=7)      what changed since version 7, which must be the one that came before
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
import torch

from paceline.codecs import Codec
from paceline.codecs.naming import decoder_of, inner_of
from paceline.drivers.served.messages import (
    Assembly,
    Beat,
    Chunk,
    Goodbye,
    Hello,
    Message,
    Model,
    ProtocolError,
    Ready,
    Sizes,
    Welcome,
    decode,
    encode,
)
from paceline.drivers.served.transport import METHOD, worker_options
from paceline.errors import PacelineError
from paceline.training.outgoing import whole_codec_of
from paceline.workers.flat import FlatModel

Out = bytes | Iterable[bytes] | None
ENDED_WITHIN_SECONDS = 60.0  # they compute for as long as one frame takes, and wait for nothing


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
    >>> incoming.add(memoryview(payload.numpy())).version
    0
    """

    def __init__(self, codec: Codec, *, elements: int, buffers: int) -> None:
        self._whole_codec = whole_codec_of(codec)
        most = max(codec.most_bytes(elements), self._whole_codec.most_bytes(elements))
        self._assembly = Assembly(Sizes(most_payload_bytes=most, buffer_bytes=4 * buffers))
        comes_whole = inner_of(codec).suits_parameters
        self._held: torch.Tensor | None = None if comes_whole else torch.zeros(elements)
        self._buffers = torch.zeros(0)
        self._version: int | None = None
        self._message: Model | None = None

    def begin(self, message: Model) -> None:
        """Expect the body of a model."""
        if message.since is not None and (self._held is None or message.since != self._version):
            raise ProtocolError(f"a change since version {message.since} came, and version {self._version} is held")
        self._assembly.begin(message)
        self._message = message

    def add(self, body: memoryview) -> Model | None:
        """Add a part of the body; once the model is whole, take it in and return its message."""
        if not self._assembly.add(body) or self._message is None:
            return None
        message, payload = self._message, self._assembly.payload
        self._version = message.version
        if self._held is not None:
            try:
                if message.since is None:
                    self._whole_codec.decode(payload, out=self._held)
                else:
                    self._held += decoder_of(payload).decode(payload, expected_length=self._held.numel())
            except ValueError as error:
                raise ProtocolError(f"the server sent another model: {error}") from None
            self._buffers = self._assembly.buffers
        return message

    def load(self, model: FlatModel) -> None:
        """Load the newest parameters and buffers into a model."""
        if self._held is not None:
            model.load(self._held, self._buffers)
            return
        try:
            self._whole_codec.decode(self._assembly.payload, out=model.parameters)
        except ValueError as error:
            raise ProtocolError(f"the server sent another model: {error}") from None
        model.load_buffers(self._assembly.buffers)


class ServerConnection:
    """A connection to the server, from its opening to its loss."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        credentials: Any = None,
        answer_seconds: float = 15.0,
        silence_seconds: float = 15.0,
    ) -> None:
        options = worker_options(silence_seconds)
        self._address, self._tls = address, credentials is not None
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=options)
        self._out: queue.SimpleQueue[Out] = queue.SimpleQueue()
        self._news = threading.Condition()
        self._closed = threading.Event()
        self._heard = time.monotonic()
        self._silence_seconds = silence_seconds
        self._welcome: Welcome | None = None
        self._incoming: IncomingModel | None = None
        self._staged: Model | None = None
        self.begun_version = -1
        self.whole_since = 0.0
        self.progress = 0
        self.end: Exception | None = None  # why the connection is of no use any more
        self._out.put(encode(hello))
        self._threads: list[threading.Thread] = []
        self._call = self._channel.stream_stream(METHOD)(self._outgoing())
        atexit.register(self.close)
        self._threads.append(self._thread(self._read, "paceline-connection"))
        self.welcome = self._wait_welcome(answer_seconds)
        self._silence_seconds = max(self.welcome.silence_seconds, 1.0)
        self._threads.append(self._thread(self._beat, "paceline-beat"))

    # -- for the worker ---------------------------------------------------------------------------------------

    def ready(self, signature: str, incoming: IncomingModel) -> None:
        """Tell the server that model and data are there; from now on models come."""
        self._incoming = incoming
        self._out.put(encode(Ready(signature=signature)))

    def send(self, frames: Iterable[bytes], sent: Callable[[], None]) -> None:
        """Queue a message of several frames; `sent` is called when the last has been taken."""

        def counted() -> Iterator[bytes]:
            try:
                yield from frames
            except Exception as error:  # in gRPC's thread: the worker's own raises it
                self._finish(ProtocolError(f"the connection cannot be used: {type(error).__name__}: {error}"))
                raise
            sent()

        self._out.put(counted())

    def say(self, message: Message) -> None:
        """Queue a small message."""
        self._out.put(encode(message))

    def take_model(self, load: Callable[[IncomingModel], None]) -> int:
        """Wait for a whole model, load it, and return its version.

        Raises ConnectionLost if the server is gone, TrainingOver or WorkerRefused if it says so.
        """
        with self._news:
            while True:
                self._raise_if_over()
                staged = self._staged
                if staged is not None and self._incoming is not None:
                    load(self._incoming)
                    self._staged = None
                    return staged.version
                self._news.wait(0.5)
                silent_seconds = time.monotonic() - self._heard
                if silent_seconds > self._silence_seconds:
                    raise ConnectionLost(f"the server said nothing for {silent_seconds:.0f} s")

    def close(self) -> None:
        """Close the connection, after what is queued has gone out or a second has passed; once more does no harm."""
        self._closed.set()
        self._out.put(None)
        done = threading.Event()
        self._call.add_done_callback(lambda _: done.set())
        done.wait(1.0)
        self._call.cancel()
        self._channel.close()
        for thread in self._threads:
            thread.join(ENDED_WITHIN_SECONDS)
        atexit.unregister(self.close)

    def _thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    # -- waiting -----------------------------------------------------------------------------------------------

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
            self._call.cancel()
            self.close()
            raise

    def _raise_if_over(self) -> None:
        if self.end is not None:
            raise self.end

    # -- threads -----------------------------------------------------------------------------------------------

    def _outgoing(self) -> Iterator[bytes]:
        self._threads.append(threading.current_thread())  # gRPC's own, which it neither names nor joins
        while (item := self._out.get()) is not None:
            if isinstance(item, bytes):
                yield item
            else:
                yield from item

    def _beat(self) -> None:
        while not self._closed.wait(self.welcome.silence_seconds / 4):
            if self._out.empty():
                self._out.put(encode(Beat(progress=self.progress)))

    def _read(self) -> None:
        end: Exception = ConnectionLost("the server closed the stream")
        try:
            for frame in self._call:
                self._heard = time.monotonic()
                self._handle(*decode(frame))
        except grpc.RpcError as error:
            end = ConnectionLost(why_lost(error, tls=self._tls))
        except ProtocolError as error:
            end = ProtocolError(f"the connection cannot be used: {error}")
        finally:
            self._finish(end)
            self._closed.set()
            self._call.cancel()
            self._out.put(None)

    def _finish(self, end: Exception, *, goodbye: bool = False) -> None:
        with self._news:
            # After a Goodbye the stream ends too; and a send may have failed before the Goodbye was read.
            self.end = end if goodbye else self.end or end
            self._news.notify_all()

    def _handle(self, message: Message, body: memoryview) -> None:
        match message:
            case Welcome():
                with self._news:
                    self._welcome = message
                    self._news.notify_all()
            case Model():
                with self._news:  # whoever loads the staged model is done with it, or comes too late for it
                    self._staged = None
                    self.begun_version = message.version
                self._expected().begin(message)
                self._add(body)
            case Chunk():
                self._add(body)
            case Beat():
                pass
            case Goodbye():
                refusal = f"the server at {self._address} refused this worker: " if message.what == "refused" else ""
                self._finish(ENDS[message.what](refusal + message.reason), goodbye=True)
            case _:
                raise ProtocolError(f"a {type(message).__name__} is out of place here")

    def _add(self, body: memoryview) -> None:
        message = self._expected().add(body)
        if message is not None and not message.more:
            with self._news:
                self._staged, self.whole_since = message, time.monotonic()
                self._news.notify_all()

    def _expected(self) -> IncomingModel:
        if self._incoming is None:
            raise ProtocolError("a model came before it was asked for")
        return self._incoming


CAUSES = (  # what gRPC says -> what it means
    ("connection refused", "nothing listens there"),
    ("name not found", "there is no such host"),
    ("lookup failed", "there is no such host"),
    ("wrong_version_number", "the server does not speak TLS: leave the keys out"),
    ("certificate_verify_failed", "the server's certificate is not of the same CA, or not for this host name"),
)


def why_lost(error: grpc.RpcError, *, tls: bool) -> str:
    """Return why a connection failed, in our words or else in gRPC's."""
    code = error.code().name.lower().replace("_", " ") if hasattr(error, "code") else "lost"
    details = " ".join(str(error.details() or "").split()) if hasattr(error, "details") else ""
    for sign, meaning in CAUSES:
        if sign in details.lower():
            return meaning
    closed = "socket closed" in details.lower() or "handshake" in details.lower()
    if closed and tls:
        return "it hung up: are the keys of the same CA? (`paceline keys` made both?)"
    if closed:
        return "it hung up: does the server want TLS keys?"
    return f"{code}: {details[:300]}" if details else code
