"""The protocol between server and workers, version 6: its messages, and how they are cut into frames.

A message is one frame, and a vector is the body of one frame or of several:

    kind (1 byte) | header length (4 bytes) | body length (4 bytes) | header (JSON) | body (raw bytes)

All numbers are little-endian. A frame's body is at most `MOST_BODY_BYTES`: between two frames of a large vector there
is room for a Goodbye.

    worker                                server
      Hello(protocol, wish)          ->
                                     <-   Welcome(worker, shard, recipe, ...)      or Goodbye(reason)
      Ready(signature)               ->
                                     <-   Model(version, samples) + body, Chunk ...
      Gradient(version, draw) + body ->
      Chunk ...                      ->
      Taken(slot)                    ->   <-  Taken(slot)          shared memory may be used again
      Beat(progress)  now and then   ->   <-  Beat                 silence means death
      Leave(reason)                  ->   <-  Goodbye(reason, what to do)

Frames of our own, and no gRPC, which carried the messages at first. A bare exchange of the same bytes, without any of
our code, took three times gloo's all-reduce in every setting tried (chunks of 64 KiB to 44 MB, event loop and threads,
buffer sizes, zero-copy sending). It copies each message four times on its way and keeps it whole at both ends, which
was 4 models of memory for each worker. It also hides the bytes that have come until their message is whole, so on a
slow link nothing tells a peer that sends from one that is dead. A frame is nine bytes and a body that goes straight
between the socket and the tensor, and every byte is a sign of life. What gRPC did besides is little: TLS 1.3 is
Python's `ssl`, flow control is TCP's, and pings are the Beats.

Nothing is ever unpickled. Whatever arrives is checked before it is used: sizes first, then types, then ranges. The
receiver never allocates by what a message says: the sizes follow from the model, and a message that says other sizes is
refused before its first byte is kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import nn

from paceline.decoding import Between, Blocks, Count, DecodingError, Line, WorkerNumber, is_line, parse_object
from paceline.decoding import decode as decode_fields
from paceline.errors import PacelineError
from paceline.traces.journal import Loss, LossVariance, Threads

PROTOCOL = 6
MOST_HEADER_BYTES = 64 * 1024
MOST_WELCOME_BYTES = 1024 * 1024
MOST_BODY_BYTES = 4 * 1024 * 1024

_PREFIX = struct.Struct("<BII")
PREFIX_BYTES = _PREFIX.size
_ALIGNED = 16
_MOST_TENSOR_CHARACTERS = 128 * 1024  # of 6 bytes each at the most, so that a Welcome has room for them
_SLOTS = 15
_SECONDS = 1e9  # a generation: whoever computes with times and losses need not fear for the range of a float


class ProtocolError(PacelineError, ValueError):
    """A message that breaks the protocol, in one line.

    >>> raise ProtocolError("no message has kind 77")
    Traceback (most recent call last):
    paceline.drivers.served.messages.ProtocolError: no message has kind 77
    """


Duration: TypeAlias = Annotated[float, Between(0, _SECONDS)]
Slot: TypeAlias = Annotated[int, Between(0, _SLOTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message on a stream. Its kind and its `protocol` keep their place in every later version.

    `wish`: the number the worker had before, if it had one. `token`: that it may join, where keys do not say so
    (`admission.py`).
    """

    KIND: ClassVar[int] = 1
    protocol: Count
    wish: WorkerNumber | None
    threads: Threads
    host: Line
    token: Line = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The worker's number and all it must know; `recipe` is empty if the server was started by a script.

    `handover`: where a worker on the server's machine asks for shared memory, and with which token (`handover.py`).
    `tensors`: the model's, in words, so that a worker with another model can say what differs.
    `first_sample`: where its first batch begins, if workers have batches by their speed.
    `data`: a sketch of the server's data (`paceline.data.sketch`), which the worker's must fit; empty for a script's.
    """

    KIND: ClassVar[int] = 2
    protocol: Count
    worker: WorkerNumber
    shard: WorkerNumber
    first_draw: Count
    blocks: Blocks
    codec: Line
    seed: Annotated[int, Between(0, 2**63)]
    signature: Line
    silence_seconds: Annotated[float, Between(1e-3, _SECONDS)]
    handover: Line = ""
    tensors: tuple[Line, ...] = ()
    first_sample: Count = 0
    recipe: dict[str, Any]
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The worker has the model and its data, and waits for parameters; `handover`: it has the shared memory too."""

    KIND: ClassVar[int] = 3
    signature: Line
    handover: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The parameters (encoded) and the buffers (float32) of one version: the body, continued in chunks.

    `since`: the payload is what changed since that version, the last one sent; None: it is the whole. `more`: so many
    changes follow at once, and nobody is to work with this version. `slot`: the body lies there, in shared memory.

    `samples`: how many the batch shall have that the worker begins with this version; 0: as many as the recipe, or the
    script, says. Where it begins is the worker's to count: of several models that it was sent while it was busy the
    worker takes the last, so that the server does not know which of them the batch before was of.
    """

    KIND: ClassVar[int] = 4
    version: Count
    since: Count | None
    more: Count
    payload_bytes: Count
    buffer_bytes: Count
    slot: Slot | None = None
    samples: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """A gradient (encoded) and the change of the buffers (float32): the body, continued in chunks.

    `work_seconds`: computing. `held_seconds`: from having the whole model to sending this; the other times say what
    happened in it, and how the model came (`times.py`). No bytes at all: the gradient is not finite, and cannot be
    sent. `slot`: the body lies there, in shared memory. `samples`: how many losses are in `loss_mean`. `batch_samples`:
    the size of the whole batch; 0: the worker does not say it.
    """

    KIND: ClassVar[int] = 5
    version: Count
    draw: Count
    blocks_done: Blocks
    blocks: Blocks
    work_seconds: Duration
    held_seconds: Duration
    samples: Count
    loss_mean: Loss | None
    loss_variance: LossVariance | None
    payload_bytes: Count
    buffer_bytes: Count
    slot: Slot | None = None
    input_seconds: Duration = 0.0
    forward_seconds: Duration = 0.0
    backward_seconds: Duration = 0.0
    behind_seconds: Duration = 0.0
    processor_seconds: Duration | None = None
    down_seconds: Duration = 0.0
    down_bytes: Count = 0
    batch_samples: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """More of the body that was begun."""

    KIND: ClassVar[int] = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A sign of life; `progress` changes when work gets on."""

    KIND: ClassVar[int] = 7
    progress: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The worker goes, and says so."""

    KIND: ClassVar[int] = 8
    reason: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The server ends the stream: training is over, or come back with a new stream, or stay away."""

    KIND: ClassVar[int] = 9
    what: Literal["over", "return", "refused"]
    reason: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What lay in a slot of shared memory is taken over: whoever wrote it may write the next."""

    KIND: ClassVar[int] = 10
    slot: Slot


Message: TypeAlias = Hello | Welcome | Ready | Model | Gradient | Chunk | Beat | Leave | Goodbye | Taken
KINDS: dict[int, type[Message]] = {kind.KIND: kind for kind in get_args(Message)}
FROM_WORKERS = frozenset({Hello, Ready, Gradient, Chunk, Taken, Beat, Leave})
FROM_SERVER = frozenset({Welcome, Model, Chunk, Taken, Beat, Goodbye})
_OTHER_PROTOCOLS = (  # how others begin -> what they are
    (rb"PRI |\0\0.\x04\0{5}", "speaks gRPC, as paceline did before: install the same paceline on both"),
    (rb"\x16\x03", "speaks TLS, and this side has no keys"),
)


def encode(message: Message, body: bytes | memoryview = b"") -> bytes:
    """Return a message and its body as one frame.

    >>> decode(encode(Beat(progress=3)))[0]
    Beat(progress=3)
    """
    return frame_head(message, len(body)) + body


def frame_head(message: Message, body_bytes: int = 0) -> bytes:
    """Return all of a frame but its body.

    >>> frame_head(Chunk(), 7).hex()
    '060000000007000000'
    """
    values = {each.name: getattr(message, each.name) for each in dataclasses.fields(message)}
    header = json.dumps(values, allow_nan=False, separators=(",", ":")).encode() if values else b""
    return _PREFIX.pack(message.KIND, len(header), body_bytes) + header


def decode(frame: bytes) -> tuple[Message, memoryview]:
    """Return the message in a whole frame and its body, not copied; ProtocolError if there is none.

    >>> decode(b"GET / HTTP/1.1")
    Traceback (most recent call last):
    paceline.drivers.served.messages.ProtocolError: no message has kind 71: it does not speak paceline
    """
    kind, header_bytes, body_bytes = parse_prefix(frame[:PREFIX_BYTES])
    end = PREFIX_BYTES + header_bytes
    if len(frame) != end + body_bytes:
        raise ProtocolError(f"a {kind.__name__} says {end + body_bytes} bytes (it has {len(frame)})")
    return parse_header(kind, frame[PREFIX_BYTES:end]), memoryview(frame)[end:]


def parse_prefix(prefix: bytes) -> tuple[type[Message], int, int]:
    """Return a frame's kind, and the sizes of its header and its body; ProtocolError if no frame can have them.

    >>> parse_prefix(frame_head(Beat(progress=3))[:PREFIX_BYTES])
    (<class 'paceline.drivers.served.messages.Beat'>, 14, 0)
    """
    if len(prefix) < PREFIX_BYTES:
        raise ProtocolError(f"a message has at least {PREFIX_BYTES} bytes (this one has {len(prefix)})")
    number, header_bytes, body_bytes = _PREFIX.unpack(prefix)
    kind = KINDS.get(number)
    if kind is None:
        what = next((what for sign, what in _OTHER_PROTOCOLS if re.match(sign, prefix)), "does not speak paceline")
        raise ProtocolError(f"no message has kind {number}: it {what}")
    most = MOST_WELCOME_BYTES if kind is Welcome else MOST_HEADER_BYTES
    if header_bytes > most:
        raise ProtocolError(f"the header of a {kind.__name__} is at most {most} bytes (it says {header_bytes})")
    if body_bytes and kind not in (Model, Gradient, Chunk):
        raise ProtocolError(f"a {kind.__name__} has no body (this one says {body_bytes} bytes)")
    if body_bytes > MOST_BODY_BYTES:
        raise ProtocolError(f"the body of a frame is at most {MOST_BODY_BYTES} bytes (this one says {body_bytes})")
    return kind, header_bytes, body_bytes


def parse_header(kind: type[Message], header: bytes) -> Message:
    """Return the message of a header.

    >>> parse_header(Beat, b'{"progress":3}')
    Beat(progress=3)
    """
    if kind is Chunk and not header:
        return Chunk()
    return _message(kind, header)


def _message(kind: type[Message], header: bytes) -> Message:
    try:
        values = parse_object(header)
        if kind in (Hello, Welcome) and values.get("protocol") != PROTOCOL:  # the rest may look different there
            raise ProtocolError(
                f"the other side speaks protocol {values.get('protocol')!r:.20}, this one speaks {PROTOCOL}: "
                "install the same paceline on both"
            )
        message: Message = decode_fields(kind, values)
        return message
    except DecodingError as error:
        raise ProtocolError(f"the header of a {kind.__name__}: {error}") from None


# -- vectors ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a model's messages: the encoded vector (at most) and the buffers.

    >>> Sizes(most_payload_bytes=400, buffer_bytes=8).most_bytes
    408
    """

    most_payload_bytes: int
    buffer_bytes: int

    @property
    def most_bytes(self) -> int:
        """The largest body of a message."""
        return self.most_payload_bytes + self.buffer_bytes


Frame: TypeAlias = tuple[bytes, memoryview]  # all but the body, and the body


def frames(message: Model | Gradient, payload: torch.Tensor, buffers: torch.Tensor) -> Iterator[Frame]:
    """Yield a message and its body as frames; the bodies lie in the memory of the tensors.

    >>> begin = Model(version=0, since=None, more=0, payload_bytes=2, buffer_bytes=0)
    >>> [(len(head), len(body)) for head, body in frames(begin, torch.zeros(2, dtype=torch.uint8), torch.zeros(0))]
    [(103, 2)]
    """
    first: Model | Gradient | Chunk = message
    for part in (payload, buffers.contiguous().view(torch.uint8)):
        body = part.numpy().data if part.numel() else memoryview(b"")
        for start in range(0, len(body), MOST_BODY_BYTES):
            piece = body[start : start + MOST_BODY_BYTES]
            yield frame_head(first, len(piece)), piece
            first = Chunk()
    if first is message:  # it has no body at all
        yield frame_head(message), memoryview(b"")


class Assembly:
    """A body being put together from frames, in memory that was set aside for it.

    With room for a vector of `elements`, the memory begins with that room, and a payload lies at its end: so a codec
    of floats can decode it from the front to the back, without any other memory.

    >>> assembly = Assembly(Sizes(most_payload_bytes=8, buffer_bytes=0))
    >>> assembly.begin(Model(version=0, since=None, more=0, payload_bytes=8, buffer_bytes=0))
    >>> assembly.place(8)[:] = bytes(8)
    >>> assembly.added(8)
    True
    """

    def __init__(self, sizes: Sizes, elements: int = 0) -> None:
        self._sizes, self._elements = sizes, elements
        room = 4 * elements + sizes.buffer_bytes + 4 * _ALIGNED if elements else 0
        self.memory = torch.empty(max(sizes.most_bytes, room), dtype=torch.uint8)
        self._bytes = self.memory.numpy().data
        self._expected: int | None = None
        self._start = self._filled = 0
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
        self._start = (self.memory.numel() - self._expected) // _ALIGNED * _ALIGNED if self._elements else 0

    def place(self, body_bytes: int) -> memoryview:
        """Return the memory for the next part of the body."""
        if self._expected is None:
            raise ProtocolError("a chunk came, but no body had begun")
        end = self._filled + body_bytes
        if end > self._expected or not body_bytes:
            raise ProtocolError(f"a body of {self._expected} bytes got {end}")
        return self._bytes[self._start + self._filled : self._start + end]

    def added(self, body_bytes: int) -> bool:
        """Note that a part has come, and return whether the body is whole."""
        self._filled += body_bytes
        if self._filled == self._expected:
            self._expected = None
            return True
        return False

    @property
    def payload(self) -> torch.Tensor:
        """The encoded vector, in the memory that was set aside."""
        return self.memory[self._start : self._start + self._payload_bytes]

    @property
    def buffers(self) -> torch.Tensor:
        """A copy of the buffers."""
        begin = self._start + self._payload_bytes
        return self.memory[begin : begin + self._sizes.buffer_bytes].clone().view(torch.float32)

    @property
    def vector(self) -> torch.Tensor:
        """The room for the decoded vector."""
        return self.memory[: 4 * self._elements].view(torch.float32)


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


def tensors_of(module: nn.Module) -> tuple[str, ...]:
    """Return a model's tensors in words, in order.

    >>> tensors_of(nn.Linear(2, 3))
    ('parameter weight (3, 2) float32', 'parameter bias (3,) float32')
    """
    parameters = tuple(
        f"parameter {name} {tuple(tensor.shape)} {_kind(tensor)}{'' if tensor.requires_grad else ' frozen'}"
        for name, tensor in module.named_parameters()
    )
    buffers = (f"buffer {name} {tuple(tensor.shape)} {_kind(tensor)}" for name, tensor in module.named_buffers())
    return (*parameters, *buffers)


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def tensors_to_send(module: nn.Module) -> tuple[str, ...]:
    """Return a model's tensors for a Welcome; of a model that has too many, or names that no line holds, none."""
    lines = tensors_of(module)
    return lines if sum(map(len, lines)) <= _MOST_TENSOR_CHARACTERS and all(map(is_line, lines)) else ()


def model_difference(here: tuple[str, ...], there: tuple[str, ...]) -> str:
    """Return how two models differ whose signatures do; of the one `there` perhaps nothing is known.

    >>> model_difference(tensors_of(nn.Linear(2, 3)), tensors_of(nn.Linear(2, 3, bias=False)))
    'the first difference is parameter bias (3,) float32 here, nothing there'
    >>> model_difference(("parameter weight (2, 2) float32",), ())
    'names, shapes or kinds of its parameters differ'
    """
    if not there:
        return "names, shapes or kinds of its parameters differ"
    for mine, other in itertools.zip_longest(here, there, fillvalue="nothing"):
        if mine != other:
            return f"the first difference is {mine} here, {other} there"
    return "the values of its frozen parameters differ, and frozen parameters do not travel"
