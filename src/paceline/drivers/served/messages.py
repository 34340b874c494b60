"""The protocol between server and workers, version 2: its messages, and how they are cut into frames.

A message is one frame, and a vector is the body of one frame or of several:

    kind (1 byte) | header length (4 bytes, little-endian) | header (JSON) | body (raw little-endian bytes)

    worker                                server
      Hello(protocol, wish)          ->
                                     <-   Welcome(worker, shard, recipe, ...)      or Goodbye(reason)
      Ready(signature)               ->
                                     <-   Model(version) + body, Chunk ...
      Gradient(version, draw) + body ->
      Chunk ...                      ->
      Beat(progress)  now and then   ->   <-  Beat                 silence means death
      Leave(reason)                  ->   <-  Goodbye(reason, what to do)

Nothing is ever unpickled. Whatever arrives is checked before it is used: sizes first, then types, then ranges. The
receiver never allocates by what a message says: the sizes follow from the model, and a message that says other sizes is
refused before its first byte is kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import nn

from paceline.decoding import DecodingError, bounded, must_be, parse_object, read_fields, read_with
from paceline.errors import PacelineError
from paceline.traces.journal import MOST_THREADS

PROTOCOL = 2
MOST_HEADER_BYTES = 64 * 1024
MOST_WELCOME_BYTES = 1024 * 1024
CHUNK_BYTES = 4 * 1024 * 1024

_PREFIX = struct.Struct("<BI")
_COUNT = 2**53
_SECONDS = 1e9  # a generation: whoever computes with times and losses need not fear for the range of a float
_LOSS = 3.5e38  # what a float32 can be


class ProtocolError(PacelineError, ValueError):
    """A message that breaks the protocol, in one line.

    >>> raise ProtocolError("no message has kind 77")
    Traceback (most recent call last):
    paceline.drivers.served.messages.ProtocolError: no message has kind 77
    """


def _line(value: Any) -> str:
    """Read a text that goes into a log, as a part of a line."""
    if isinstance(value, str) and len(value) <= 4096 and value.isprintable():
        return value
    raise must_be("a line of at most 4096 printable characters", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message on a stream. Its kind and its `protocol` keep their place in every later version.

    `wish`: the number the worker had before, if it had one.
    """

    KIND: ClassVar[int] = 1
    protocol: int = bounded(0, _COUNT)
    wish: int | None = bounded(0, 1_000_000)
    threads: int = bounded(1, MOST_THREADS)
    host: str = read_with(_line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The worker's number and all it must know; `recipe` is empty if the server was started by a script."""

    KIND: ClassVar[int] = 2
    protocol: int = bounded(0, _COUNT)
    worker: int = bounded(0, 1_000_000)
    shard: int = bounded(0, 1_000_000)
    first_draw: int = bounded(0, _COUNT)
    blocks: int = bounded(1, 1_000_000)
    codec: str = read_with(_line)
    seed: int = bounded(0, 2**63)
    signature: str = read_with(_line)
    silence_seconds: float = bounded(1e-3, _SECONDS)
    recipe: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The worker has the model and its data, and waits for parameters."""

    KIND: ClassVar[int] = 3
    signature: str = read_with(_line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The parameters (encoded) and the buffers (float32) of one version: the body, continued in chunks.

    `since`: the payload is what changed since that version, the last one sent; None: it is the whole. `more`: so many
    changes follow at once, and nobody is to work with this version.
    """

    KIND: ClassVar[int] = 4
    version: int = bounded(0, _COUNT)
    since: int | None = bounded(0, _COUNT)
    more: int = bounded(0, _COUNT)
    payload_bytes: int = bounded(0, _COUNT)
    buffer_bytes: int = bounded(0, _COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """A gradient (encoded) and the change of the buffers (float32): the body, continued in chunks.

    `work_seconds`: computing. `held_seconds`: from having the whole model to sending this. No bytes at all: the
    gradient is not finite, and cannot be sent.
    """

    KIND: ClassVar[int] = 5
    version: int = bounded(0, _COUNT)
    draw: int = bounded(0, _COUNT)
    blocks_done: int = bounded(1, 1_000_000)
    blocks: int = bounded(1, 1_000_000)
    work_seconds: float = bounded(0, _SECONDS)
    held_seconds: float = bounded(0, _SECONDS)
    samples: int = bounded(0, _COUNT)
    loss_mean: float | None = bounded(-_LOSS, _LOSS)
    loss_variance: float | None = bounded(0, _LOSS)
    payload_bytes: int = bounded(0, _COUNT)
    buffer_bytes: int = bounded(0, _COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """More of the body that was begun."""

    KIND: ClassVar[int] = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A sign of life; `progress` changes when work gets on."""

    KIND: ClassVar[int] = 7
    progress: int = bounded(0, _COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The worker goes, and says so."""

    KIND: ClassVar[int] = 8
    reason: str = read_with(_line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The server ends the stream: training is over, or come back with a new stream, or stay away."""

    KIND: ClassVar[int] = 9
    what: Literal["over", "return", "refused"]
    reason: str = read_with(_line)


Message: TypeAlias = Hello | Welcome | Ready | Model | Gradient | Chunk | Beat | Leave | Goodbye
KINDS: dict[int, type[Message]] = {kind.KIND: kind for kind in get_args(Message)}


def encode(message: Message, body: bytes | memoryview = b"") -> bytes:
    """Return a message as one frame.

    >>> decode(encode(Beat(progress=3)))[0]
    Beat(progress=3)
    """
    values = {each.name: getattr(message, each.name) for each in dataclasses.fields(message)}
    header = json.dumps(values, allow_nan=False, separators=(",", ":")).encode() if values else b""
    return b"".join((_PREFIX.pack(message.KIND, len(header)), header, body))


def decode(frame: bytes) -> tuple[Message, memoryview]:
    """Return the message in a frame and its body, not copied; ProtocolError if there is none.

    >>> decode(b"GET / HTTP/1.1")
    Traceback (most recent call last):
    paceline.drivers.served.messages.ProtocolError: no message has kind 71
    """
    if len(frame) < _PREFIX.size:
        raise ProtocolError(f"a message has at least {_PREFIX.size} bytes (this one has {len(frame)})")
    number, header_bytes = _PREFIX.unpack_from(frame)
    kind = KINDS.get(number)
    if kind is None:
        raise ProtocolError(f"no message has kind {number}")
    most = MOST_WELCOME_BYTES if kind is Welcome else MOST_HEADER_BYTES
    if header_bytes > min(most, len(frame) - _PREFIX.size):
        raise ProtocolError(f"the header of a {kind.__name__} says {header_bytes} bytes, more than there can be")
    end = _PREFIX.size + header_bytes
    message = Chunk() if kind is Chunk else _message(kind, frame[_PREFIX.size : end])
    return message, memoryview(frame)[end:]


def _message(kind: type[Message], header: bytes) -> Message:
    try:
        values = parse_object(header)
        if kind in (Hello, Welcome) and values.get("protocol") != PROTOCOL:  # the rest may look different there
            raise ProtocolError(
                f"the other side speaks protocol {values.get('protocol')!r:.20}, this one speaks {PROTOCOL}: "
                "install the same paceline on both"
            )
        return read_fields(kind, values)
    except DecodingError as error:
        raise ProtocolError(f"the header of a {kind.__name__}: {error}") from None


# -- vectors ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a model's messages: the encoded vector (at most) and the buffers.

    >>> Sizes(most_payload_bytes=400, buffer_bytes=8).most_message_bytes
    65944
    """

    most_payload_bytes: int
    buffer_bytes: int

    @property
    def chunk_bytes(self) -> int:
        """The largest body of a frame."""
        return min(CHUNK_BYTES, self.most_payload_bytes + self.buffer_bytes)

    @property
    def most_message_bytes(self) -> int:
        """The largest frame that a peer may send."""
        return self.chunk_bytes + MOST_HEADER_BYTES


def frames(message: Model | Gradient, payload: torch.Tensor, buffers: torch.Tensor) -> Iterator[bytes]:
    """Yield a message and its body as frames; one copy of the body is made in all.

    >>> begin = Model(version=0, since=None, more=0, payload_bytes=2, buffer_bytes=0)
    >>> [len(frame) for frame in frames(begin, torch.zeros(2, dtype=torch.uint8), torch.zeros(0))]
    [77]
    """
    body = payload.numpy().data
    tail = buffers.contiguous().view(torch.uint8).numpy().data if buffers.numel() else memoryview(b"")
    if len(body) + len(tail) <= CHUNK_BYTES:
        yield encode(message, bytes(body) + bytes(tail) if tail else body)
        return
    first: Model | Gradient | Chunk = message
    for part in (body, tail):
        for start in range(0, len(part), CHUNK_BYTES):
            yield encode(first, part[start : start + CHUNK_BYTES])
            first = Chunk()


class Assembly:
    """A body being put together from frames, in memory that was set aside for it.

    >>> assembly = Assembly(Sizes(most_payload_bytes=8, buffer_bytes=0))
    >>> assembly.begin(Model(version=0, since=None, more=0, payload_bytes=8, buffer_bytes=0))
    >>> assembly.add(memoryview(bytes(8)))
    True
    """

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._memory = torch.empty(sizes.most_payload_bytes + sizes.buffer_bytes, dtype=torch.uint8)
        self._bytes = self._memory.numpy().data
        self._expected: int | None = None
        self._filled = 0
        self._payload_bytes = 0

    def begin(self, message: Model | Gradient) -> None:
        """Expect the body of a message; ProtocolError if its sizes are not the model's."""
        kind = type(message).__name__
        if self._expected is not None:
            raise ProtocolError(f"a {kind} began before the body of the one before was whole")
        if message.payload_bytes > self._sizes.most_payload_bytes or message.payload_bytes < 1:
            raise ProtocolError(
                f"the payload of a {kind} must be between 1 and {self._sizes.most_payload_bytes} bytes "
                f"(payload_bytes={message.payload_bytes})"
            )
        if message.buffer_bytes != self._sizes.buffer_bytes:
            raise ProtocolError(
                f"the buffers of a {kind} must be {self._sizes.buffer_bytes} bytes "
                f"(buffer_bytes={message.buffer_bytes})"
            )
        self._payload_bytes = message.payload_bytes
        self._expected, self._filled = message.payload_bytes + message.buffer_bytes, 0

    def add(self, body: memoryview) -> bool:
        """Add a part of the body, and return whether the body is whole."""
        if self._expected is None:
            raise ProtocolError("a chunk came, but no body had begun")
        end = self._filled + len(body)
        if end > self._expected or not len(body):
            raise ProtocolError(f"a body of {self._expected} bytes got {end}")
        self._bytes[self._filled : end] = body
        self._filled = end
        if end == self._expected:
            self._expected = None
            return True
        return False

    @property
    def payload(self) -> torch.Tensor:
        """The encoded vector, in the memory that was set aside."""
        return self._memory[: self._payload_bytes]

    @property
    def buffers(self) -> torch.Tensor:
        """A copy of the buffers."""
        end = self._payload_bytes + self._sizes.buffer_bytes
        return self._memory[self._payload_bytes : end].clone().view(torch.float32)


def model_signature(module: nn.Module) -> str:
    """Return a digest of a network, which must be the same on both sides: names, shapes and kinds of its tensors.

    Weights that are trained do not count, since they travel; frozen ones do not travel, so their values count.

    >>> model_signature(nn.Linear(2, 3)) == model_signature(nn.Linear(2, 3))
    True
    >>> model_signature(nn.Linear(2, 3)) == model_signature(nn.Linear(3, 2))
    False
    """
    parts = [
        f"{kind} {name} {tuple(tensor.shape)} {tensor.dtype} {getattr(tensor, 'requires_grad', False)}"
        for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
        for name, tensor in tensors
    ]
    digest = hashlib.sha256("\n".join(parts).encode())
    for parameter in module.parameters():
        if not parameter.requires_grad:
            digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
