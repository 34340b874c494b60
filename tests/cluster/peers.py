"""Peers that are not workers: streams spoken by hand, raw bytes, and workers that do one thing wrong.

peer = Peer(cluster.address)          # a connection, with TLS or without, that says what it is told to say
peer.join()                           # Hello, Welcome, Ready, Model
peer.say(peer.gradient(version=77))
peer.goodbye()                        # what the server says at the end
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import select
import socket
import ssl
import struct
import threading
import time

import torch

from paceline.codecs import Identity
from paceline.codecs.payload import HEADER_BYTES
from paceline.drivers.served.admission import Credential
from paceline.drivers.served.job import work
from paceline.drivers.served.messages import (
    PREFIX_BYTES,
    PROTOCOL,
    Beat,
    Goodbye,
    Gradient,
    Hello,
    Model,
    Ready,
    Welcome,
    decode,
    encode,
    parse_prefix,
)
from paceline.drivers.served.worker import Worker
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data, make_training
from paceline.traces.journal import WorkerJoined
from tests.cluster.harness import Cluster
from tests.waiting import Late, until

ANSWER_SECONDS = 30.0


def hello(**changes):
    """A Hello as a worker says it."""
    return dataclasses.replace(Hello(protocol=PROTOCOL, wish=None, threads=1, host="a peer of a test"), **changes)


class Visited(Cluster):
    """A cluster that peers of a test join too: they, and the test itself, are no processes of its own."""

    @property
    def pids(self):
        found = {}
        for record in self.records:
            if isinstance(record, WorkerJoined):
                found[record.worker] = int(record.host.rpartition("pid ")[2]) if "pid " in record.host else 0
        return {number: pid for number, pid in found.items() if pid not in (0, os.getpid())}


class Peer:
    """A stream to the server that says what it is told to say. `reads=False` never takes what the server sends."""

    def __init__(self, address, *, credentials=None, reads=True):
        self._heard = queue.SimpleQueue()
        self._beating = threading.Event()
        self._lock = threading.Lock()  # TLS is for one thread at a time
        self.ended = None
        self.welcome = self.model = None
        self._credential = Credential(address, None)
        self._socket = connect(address)
        self._tls = credentials is not None
        self._reader = threading.Thread(target=self._read, daemon=True)
        try:
            if self._tls:
                host = address.rsplit(":", 1)[0]
                self._socket = credentials.wrap_socket(self._socket, server_hostname=host)
        except OSError as error:
            self._end(error)
        else:
            if reads:
                self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _end(self, error):
        self.ended = "closed" if error is None else f"{type(error).__name__}: {error}"
        self._heard.put(None)

    def _read(self):
        held = bytearray()
        try:
            while piece := self._receive():
                held += piece
                while (frame := _first_frame(held)) is not None:
                    del held[: len(frame)]
                    self._heard.put(decode(frame))
            self._end(None)
        except OSError as error:
            self._end(error)

    def _receive(self):
        """The next bytes, whenever they come."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            if not (self._tls and self._socket.pending()):
                poll.poll()
            with self._lock, contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
                self._socket.setblocking(False)
                return self._socket.recv(65536)

    def say(self, message, body=b""):
        if isinstance(message, Hello) and not message.token:  # it is of the server's user, unless it says otherwise
            message = dataclasses.replace(message, token=self._credential.find()[1])
        self.say_bytes(encode(message, body))

    def say_bytes(self, frame):
        """A frame as it is, whatever it is; nothing, once the server has closed."""
        left = memoryview(frame)
        while left and self.ended is None:
            try:
                with self._lock:
                    self._socket.setblocking(False)
                    left = left[self._socket.send(left) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                select.select([], [], [], 0.005)
            except OSError:
                return

    def hear(self, *kinds, seconds=ANSWER_SECONDS):
        """The next message of these kinds, with its body; whatever else comes before is let go."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                heard = self._heard.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise Late(f"no {' or '.join(kind.__name__ for kind in kinds)} within {seconds:g} s") from None
            assert heard is not None, f"the stream ended ({self.ended})"
            if isinstance(heard[0], kinds):
                return heard

    def greet(self, **changes):
        """Hello, and the Welcome that comes back."""
        self.say(hello(**changes))
        self.welcome, _ = self.hear(Welcome)
        return self.welcome

    def join(self, **changes):
        """Become a member; returns the first model."""
        self.greet(**changes)
        self.say(Ready(signature=self.welcome.signature))
        return self.next_model()

    def next_model(self):
        """The next model that comes."""
        self.model, _ = self.hear(Model)
        return self.model

    def gradient(self, **changes):
        """The announcement of a gradient at the last model heard of."""
        plain = Gradient(
            version=self.model.version,
            draw=self.welcome.first_draw,
            blocks_done=self.welcome.blocks,
            blocks=self.welcome.blocks,
            work_seconds=0.01,
            held_seconds=0.01,
            samples=0,
            loss_mean=None,
            loss_variance=None,
            payload_bytes=self.model.payload_bytes,
            buffer_bytes=self.model.buffer_bytes,
        )
        return dataclasses.replace(plain, **changes)

    @property
    def zeros(self):
        """The body of a gradient: zeros, as identity encodes them."""
        elements = (self.model.payload_bytes - HEADER_BYTES) // 4
        return Identity().encode(torch.zeros(elements)).numpy().tobytes() + bytes(self.model.buffer_bytes)

    def beat(self, seconds=0.3, *, progress=lambda: 0):
        """Give signs of life until closed."""

        def beats():
            while not self._beating.wait(seconds):
                self.say(Beat(progress=progress()))

        threading.Thread(target=beats, daemon=True).start()

    def goodbye(self, *, seconds=ANSWER_SECONDS):
        """What the server says at the end."""
        message, _ = self.hear(Goodbye, seconds=seconds)
        return message

    def until_ended(self, *, seconds=ANSWER_SECONDS):
        """How the stream ended."""
        return until(lambda: self.ended, "the stream ends", seconds=seconds)

    def close(self):
        self._beating.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._reader.is_alive():
            self._reader.join(5)
        self._socket.close()


def _first_frame(held):
    """The first whole frame of what was heard, if there is one."""
    if len(held) < PREFIX_BYTES:
        return None
    _, header_bytes, body_bytes = parse_prefix(bytes(held[:PREFIX_BYTES]))
    end = PREFIX_BYTES + header_bytes + body_bytes
    return bytes(held[:end]) if len(held) >= end else None


def _messages(connection):
    """All that is said on a connection, message by message."""
    held = bytearray()
    while piece := connection.recv(65536):
        held += piece
        while (frame := _first_frame(held)) is not None:
            del held[: len(frame)]
            yield decode(frame)[0]


# -- one bad worker among good ones ---------------------------------------------------------------------------------


class BadWorker(Worker):
    """A real worker, except that `spoil(worker)` may do something to its gradient before it goes out."""

    def __init__(self, address, spoil):
        super().__init__(address, None, patience_seconds=20)
        self._spoil = spoil
        self.sends = 0

    @property
    def gradient(self):
        return self._held().gradient

    @property
    def connection(self):
        return self._connection

    def send(self, losses=None):
        self.sends += 1
        self._spoil(self)
        super().send(losses)


class Working(threading.Thread):
    """A bad worker at work, in a thread of the test; `error` says how it ended."""

    def __init__(self, address, spoil):
        super().__init__(daemon=True)
        self._worker, self.error, self._going = BadWorker(address, spoil), None, True
        self.number = None
        self.start()

    @property
    def sends(self):
        return self._worker.sends

    def run(self):
        try:
            with self._worker as worker:
                recipe = Recipe.from_document(worker.welcome.recipe)
                self.number = worker.number
                training = make_training(recipe, load_data(recipe))
                worker.hold(training.module)
                worker.ready()
                work(worker, training.module, training, self._stop_if_asked)
        except _Stopped:
            self.error = "stopped"
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def _stop_if_asked(self, worker, draw, samples):
        if not self._going:
            raise _Stopped
        return 0.0

    def stop(self):
        """Leave, and wait until it has."""
        self._going = False
        self.join(30)
        assert not self.is_alive()


class _Stopped(Exception):  # noqa: N818 - asked for
    pass


def poison(value, *, at):
    """Spoil the gradients with these numbers in the order of sending (1 is the first); they count from joining."""

    def spoil(worker):
        if worker.sends in at:
            worker.gradient[7] = value

    return spoil


# -- raw bytes -----------------------------------------------------------------------------------------------------


def connect(address, *, seconds=10.0):
    """A TCP connection that has said nothing."""
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=seconds)


def closed_by_peer(connection):
    """Whether the other side has closed; what it said before is let go."""
    connection.setblocking(False)
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class RawFrames:
    """A connection that is spoken byte by byte: for what `encode` cannot be made to say."""

    def __init__(self, address):
        self._peer = Peer(address)
        self.sent = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._peer.close()

    @property
    def over(self):
        """Whether the server has ended the connection."""
        return self._peer.ended is not None

    def announce(self, kind, header_bytes=0, body_bytes=0):
        """The beginning of a frame, which says what it likes about its sizes."""
        self._peer.say_bytes(struct.pack("<BII", kind, header_bytes, body_bytes))

    def data(self, piece):
        """Send bytes; False once the server has ended the connection."""
        self._peer.say_bytes(piece)
        self.sent += len(piece)
        return not self.over

    def goodbye(self):
        """What the server says at the end."""
        return self._peer.goodbye()


# -- a server that is none ------------------------------------------------------------------------------------------


class FakeServer:
    """Answers every Hello with the same frame; for workers that must not believe everything."""

    def __init__(self, answer):
        self._answer, self.hellos = answer, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with contextlib.suppress(OSError):
            for frame in self._work(_messages(connection)):
                connection.sendall(frame)

    def _work(self, heard):
        """Answer once, and hear on until the worker goes."""
        next(heard)
        self.hellos += 1
        yield self._answer
        for _ in heard:
            pass

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error):
        for each in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def welcome(**changes):
    """A Welcome as a server says it."""
    plain = Welcome(
        protocol=PROTOCOL, worker=0, shard=0, first_draw=0, blocks=4, codec="identity", seed=0, signature="",
        silence_seconds=15.0, recipe=Recipe().to_document(),
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def vector(elements, value=0.0):
    """The bytes of a float32 vector."""
    return torch.full((elements,), value).numpy().tobytes()
