"""What server and workers say to each other: the schema, version 1.

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

Nothing is ever unpickled. Whatever arrives is checked before it is believed: sizes first, then types, then ranges.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import types
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

PROTOCOL = 2
MOST_HEADER_BYTES = 64 * 1024
MOST_WELCOME_BYTES = 1024 * 1024

_PREFIX = struct.Struct("<BI")
_COUNT = 2**53
_SECONDS = 1e9  # a generation: whoever computes with times and losses need not fear for the range of a float
_LOSS = 3.5e38  # what a float32 can be


class ProtocolError(ValueError):
    """A message that breaks the protocol, in one line.

    >>> raise ProtocolError("no message has kind 77")
    Traceback (most recent call last):
    paceline.drivers.served.messages.ProtocolError: no message has kind 77
    """


def _whole(least: int, most: int) -> Any:
    return field(metadata={"least": least, "most": most})


def _real(least: float, most: float) -> Any:
    return field(metadata={"least": least, "most": most})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message on a stream. Its kind and its `protocol` keep their place in every version to come.

    `wish`: the number the worker had before, if it had one.
    """

    KIND: ClassVar[int] = 1
    protocol: int = _whole(0, _COUNT)
    wish: int | None = _whole(0, 1_000_000)
    threads: int = _whole(1, 100_000)
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Who the worker is now, and all it must know; `recipe` is empty if the server was started by a script."""

    KIND: ClassVar[int] = 2
    protocol: int = _whole(0, _COUNT)
    worker: int = _whole(0, 1_000_000)
    shard: int = _whole(0, 1_000_000)
    first_draw: int = _whole(0, _COUNT)
    blocks: int = _whole(1, 1_000_000)
    codec: str
    seed: int = _whole(0, 2**63)
    signature: str
    silence_seconds: float = _real(1e-3, _SECONDS)
    recipe: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The worker has the model and its data, and waits for parameters."""

    KIND: ClassVar[int] = 3
    signature: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The parameters (encoded) and the buffers (float32) of one version: the body, continued in chunks.

    `since`: the payload is what changed since that version, the last one sent; None: it is the whole. `more`: so many
    changes follow at once, and nobody is to work with this version.
    """

    KIND: ClassVar[int] = 4
    version: int = _whole(0, _COUNT)
    since: int | None = _whole(0, _COUNT)
    more: int = _whole(0, _COUNT)
    payload_bytes: int = _whole(0, _COUNT)
    buffer_bytes: int = _whole(0, _COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """A gradient (encoded) and the change of the buffers (float32): the body, continued in chunks.

    `work_seconds`: computing. `held_seconds`: from having the whole model to sending this. No bytes at all: the
    gradient is not finite, and cannot be sent.
    """

    KIND: ClassVar[int] = 5
    version: int = _whole(0, _COUNT)
    draw: int = _whole(0, _COUNT)
    blocks_done: int = _whole(1, 1_000_000)
    blocks: int = _whole(1, 1_000_000)
    work_seconds: float = _real(0, _SECONDS)
    held_seconds: float = _real(0, _SECONDS)
    samples: int = _whole(0, _COUNT)
    loss_mean: float | None = _real(-_LOSS, _LOSS)
    loss_variance: float | None = _real(0, _LOSS)
    payload_bytes: int = _whole(0, _COUNT)
    buffer_bytes: int = _whole(0, _COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """More of the body that was begun."""

    KIND: ClassVar[int] = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """I am alive; `progress` changes when work gets on."""

    KIND: ClassVar[int] = 7
    progress: int = _whole(0, _COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The worker goes, politely."""

    KIND: ClassVar[int] = 8
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The server ends the stream: training is over, or come back with a new stream, or stay away."""

    KIND: ClassVar[int] = 9
    what: Literal["over", "return", "refused"]
    reason: str


Message: TypeAlias = Hello | Welcome | Ready | Model | Gradient | Chunk | Beat | Leave | Goodbye
KINDS: dict[int, type[Message]] = {kind.KIND: kind for kind in get_args(Message)}
_FIELDS = {kind: {each.name: each for each in dataclasses.fields(kind)} for kind in KINDS.values()}
_HINTS = {kind: get_type_hints(kind) for kind in KINDS.values()}


def encode(message: Message, body: bytes | memoryview = b"") -> bytes:
    """A message as one frame.

    >>> decode(encode(Beat(progress=3)))[0]
    Beat(progress=3)
    """
    names = _FIELDS[type(message)]
    header = b""
    if names:
        values = {name: getattr(message, name) for name in names}
        header = json.dumps(values, allow_nan=False, separators=(",", ":")).encode()
    return b"".join((_PREFIX.pack(message.KIND, len(header)), header, body))


def decode(frame: bytes) -> tuple[Message, memoryview]:
    """The message in a frame and its body, not copied; ProtocolError if it is none.

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
    if not _FIELDS[kind]:
        return Chunk(), memoryview(frame)[end:]
    return _message(kind, frame[_PREFIX.size : end]), memoryview(frame)[end:]


def _message(kind: type[Message], header: bytes) -> Message:
    try:
        values = json.loads(header, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ProtocolError(f"the header of a {kind.__name__} is not JSON") from None
    if not isinstance(values, dict):
        raise ProtocolError(f"the header of a {kind.__name__} is not an object")
    if kind in (Hello, Welcome) and values.get("protocol") != PROTOCOL:  # the rest may look different there
        raise ProtocolError(
            f"the other side speaks protocol {values.get('protocol')!r:.20}, this one speaks {PROTOCOL}: "
            "install the same paceline on both"
        )
    names = _FIELDS[kind]
    if values.keys() != names.keys():
        raise ProtocolError(f"a {kind.__name__} has {', '.join(names)} (this one has {list(values)!r:.200})")
    for name, value in values.items():
        _check(kind, name, value)
    return kind(**values)


def _refuse_constant(text: str) -> None:
    raise ValueError(text)


def _check(kind: type[Message], name: str, value: Any) -> None:
    hint, rule = _HINTS[kind][name], _FIELDS[kind][name].metadata
    if not _fits(value, hint):
        raise ProtocolError(f"{name} of a {kind.__name__} is not what it must be ({name}={value!r:.60})")
    if rule and value is not None and not rule["least"] <= value <= rule["most"]:
        raise ProtocolError(
            f"{name} of a {kind.__name__} must be between {rule['least']} and {rule['most']} ({name}={value!r:.60})"
        )


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if get_origin(hint) is dict:
        return isinstance(value, dict)
    if hint is str:
        return isinstance(value, str) and len(value) <= 4096 and value.isprintable()  # it goes into a log, as a line
    return value is None and hint is type(None)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False
