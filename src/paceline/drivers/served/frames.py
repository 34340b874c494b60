"""A vector on the wire: cut into frames to send, put together again as frames come.

The receiver never allocates by what a message says: the sizes follow from the model, and a message that says other
sizes is refused before its first byte is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paceline.drivers.served.messages import MOST_HEADER_BYTES, Chunk, Gradient, Model, ProtocolError, encode

CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a model's messages weigh: encoded vector (at most) and buffers.

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
    """A message and its body as frames; one copy of the body is made in all.

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
    """A body being put together in memory that was set aside for it.

    >>> sizes = Sizes(most_payload_bytes=8, buffer_bytes=0)
    >>> assembly = Assembly(sizes, torch.empty(8, dtype=torch.uint8))
    >>> assembly.begin(Model(version=0, since=None, more=0, payload_bytes=8, buffer_bytes=0))
    >>> assembly.add(memoryview(bytes(8)))
    True
    """

    def __init__(self, sizes: Sizes, memory: torch.Tensor) -> None:
        self._sizes = sizes
        self._memory = memory
        self._bytes = memory.numpy().data
        self._expected: int | None = None
        self._filled = 0
        self._payload_bytes = 0

    @property
    def under_way(self) -> bool:
        """Whether a body has begun and is not whole."""
        return self._expected is not None

    def begin(self, message: Model | Gradient) -> None:
        """A message whose body is to come; refused if its sizes are not the model's."""
        kind = type(message).__name__
        if self.under_way:
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
        """Take a part of the body; True once it is whole."""
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


def memory_for(sizes: Sizes) -> torch.Tensor:
    """Memory for one body."""
    return torch.empty(sizes.most_payload_bytes + sizes.buffer_bytes, dtype=torch.uint8)


def with_sizes(message: Gradient, payload: torch.Tensor, buffers: torch.Tensor) -> Gradient:
    """The message with the sizes of its body."""
    return dataclasses.replace(message, payload_bytes=payload.numel(), buffer_bytes=4 * buffers.numel())
