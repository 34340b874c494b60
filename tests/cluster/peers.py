"""Peers that are not workers: streams spoken by hand, raw HTTP/2, raw TCP, and workers that do one thing wrong.

peer = Peer(cluster.address)          # a gRPC stream that says what it is told to say
peer.join()                           # Hello, Welcome, Ready, Model
peer.say(peer.gradient(version=77))
peer.goodbye()                        # what the server says at the end
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import socket
import struct
import threading
import time

import grpc
import torch

from paceline.codecs import Identity
from paceline.codecs.payload import HEADER_BYTES
from paceline.drivers.served.job import work
from paceline.drivers.served.messages import (
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
)
from paceline.drivers.served.transport import METHOD
from paceline.drivers.served.worker import Worker
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data, make_training
from paceline.traces.journal import WorkerJoined
from tests.cluster.harness import Cluster, Late, until

ANSWER_SECONDS = 30.0
_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_OWN = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]


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

    def __init__(self, address, *, credentials=None, reads=True, metadata=()):
        options = [*_UNLIMITED, *_OWN]
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=options)
        self._out = queue.SimpleQueue()
        self._heard = queue.SimpleQueue()
        self._beating = threading.Event()
        self.ended = None
        self.welcome = self.model = None
        self._call = self._channel.stream_stream(METHOD)(iter(self._out.get, None), metadata=metadata)
        self._reader = threading.Thread(target=self._read, daemon=True)
        if reads:
            self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _read(self):
        try:
            for frame in self._call:
                self._heard.put(decode(frame))
            self.ended = "closed"
        except grpc.RpcError as error:
            self.ended = f"{error.code().name}: {error.details()}"
        self._heard.put(None)

    def say(self, message, body=b""):
        self._out.put(encode(message, body))

    def say_bytes(self, frame):
        """A frame as it is, whatever it is."""
        self._out.put(frame)

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
        self._out.put(None)
        self._call.cancel()
        self._channel.close()
        if self._reader.is_alive():
            self._reader.join(5)


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

    def _stop_if_asked(self, worker, draw):
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


DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8


class RawHTTP2:
    """An HTTP/2 connection with one gRPC stream, byte by byte: for what no gRPC library can be made to send."""

    def __init__(self, address):
        self._socket = connect(address)
        self._lock = threading.Lock()
        self.over = threading.Event()
        self._window = {0: 65535, 1: 65535}
        self._credit = threading.Condition()
        self.sent = 0
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._frame(SETTINGS, 0, 0)
        fields = [
            (":method", "POST"), (":scheme", "http"), (":path", METHOD), (":authority", address),
            ("content-type", "application/grpc"), ("te", "trailers"),
        ]  # fmt: skip
        self._frame(HEADERS, 4, 1, b"".join(_literal(name) + _literal(value, b"") for name, value in fields))
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.over.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def data(self, piece, *, seconds=5.0):
        """Send bytes of the stream, as far as the server's windows let; False once it has ended the stream."""
        deadline = time.monotonic() + seconds
        while piece and not self.over.is_set():
            with self._credit:
                room = min(16384, *self._window.values())
                if room <= 0:
                    if time.monotonic() > deadline:
                        return False
                    self._credit.wait(0.1)
                    continue
                part, piece = piece[:room], piece[room:]
                for stream in self._window:
                    self._window[stream] -= len(part)
            try:
                self._frame(DATA, 0, 1, part)
            except OSError:
                self.over.set()
            self.sent += len(part)
        return not self.over.is_set()

    def announce(self, length):
        """The prefix of a gRPC message that says how long it is."""
        return self.data(struct.pack(">BI", 0, length))

    def _frame(self, kind, flags, stream, payload=b""):
        with self._lock:
            self._socket.sendall(
                struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload
            )

    def _read(self):
        self._socket.settimeout(None)
        try:
            with self._socket.makefile("rb") as lines:
                while header := lines.read(9):
                    length, (kind, flags, stream) = int.from_bytes(header[:3]), struct.unpack(">BBI", header[3:])
                    self._hear(kind, flags, stream, lines.read(length))
        except (OSError, ValueError, struct.error):
            pass
        self.over.set()

    def _hear(self, kind, flags, stream, payload):
        if kind == SETTINGS and not flags & 1:
            settings = dict(struct.iter_unpack(">HI", payload))
            with self._credit:
                self._window[1] += settings.get(4, 65535) - 65535
                self._credit.notify_all()
            self._frame(SETTINGS, 1, 0)
        elif kind == PING and not flags & 1:
            self._frame(PING, 1, 0, payload)
        elif kind == WINDOW_UPDATE:
            with self._credit:
                self._window[stream] += int.from_bytes(payload)
                self._credit.notify_all()
        elif kind in (RST_STREAM, GOAWAY) or (kind == HEADERS and flags & 1):
            self.over.set()


def _literal(text, first=b"\0"):
    """A name (after HPACK's 'literal, not indexed') or a value."""
    return first + bytes([len(text)]) + text.encode()


# -- a server that is none ------------------------------------------------------------------------------------------


class FakeServer:
    """Answers every Hello with the same frame; for workers that must not believe everything."""

    def __init__(self, answer):
        from concurrent.futures import ThreadPoolExecutor

        self._answer, self.hellos = answer, 0
        self._over = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(8))
        handlers = {METHOD.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(self._work)}
        service = METHOD.strip("/").partition("/")[0]
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def _work(self, frames, context):
        next(frames)
        self.hellos += 1
        yield self._answer
        while context.is_active() and not self._over.wait(0.1):
            pass

    def __enter__(self):
        self._server.start()
        return self

    def __exit__(self, *error):
        self._over.set()
        self._server.stop(0).wait(5)


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
