"""What a payload says of itself: which codec, which version of it, how many elements, which parameters.

    0        2         3        4          8             12             16
    | "pl"   | version | codec  | elements | parameter 1 | parameter 2  | the codec's own bytes ...

All numbers are little-endian. A payload comes from outside: whatever it says is checked before anything is allocated
for it, and a `PayloadError` says what is wrong.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

VERSION = 1
HEADER_BYTES = 16
MOST_ELEMENTS = 2**32 - 1
MOST_UNASKED = 2**24  # elements of a vector that its payload does not pay for with bytes, unless they are expected

_HEADER = struct.Struct("<2sBBIII")
_MAGIC = b"pl"


class PayloadError(ValueError):
    """Bytes that are no payload of this codec, in one line.

    >>> raise PayloadError("a payload begins with 'pl'")
    Traceback (most recent call last):
    paceline.codecs.payload.PayloadError: a payload begins with 'pl'
    """


@dataclass(frozen=True, slots=True)
class Header:
    """The first bytes of a payload. The parameters mean what the codec says they mean.

    >>> header = Header(codec=4, elements=1000, first=7, second=512)
    >>> read_header(header.payload(body_bytes=3)) == header
    True
    """

    codec: int
    elements: int
    first: int = 0
    second: int = 0

    def payload(self, body_bytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """A payload that begins with this header; the body is yet to be filled."""
        if self.elements > MOST_ELEMENTS:
            raise ValueError(f"a payload holds at most {MOST_ELEMENTS:,} elements (this vector has {self.elements:,})")
        payload = torch.empty(HEADER_BYTES + body_bytes, dtype=torch.uint8, device=device)
        packed = _HEADER.pack(_MAGIC, VERSION, self.codec, self.elements, self.first, self.second)
        payload[:HEADER_BYTES] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        return payload


def read_header(payload: torch.Tensor) -> Header:
    """The header of a payload.

    >>> read_header(torch.zeros(20, dtype=torch.uint8))
    Traceback (most recent call last):
    paceline.codecs.payload.PayloadError: a payload begins with b'pl' (this one with b'\\x00\\x00')
    """
    if not isinstance(payload, torch.Tensor):
        raise PayloadError(f"a payload is a flat uint8 tensor (this is {type(payload).__name__}); torch.frombuffer?")
    if payload.dtype is not torch.uint8 or payload.dim() != 1:
        raise PayloadError(
            f"a payload is a flat uint8 tensor (this one is {payload.dtype}, {payload.dim()}-dimensional)"
        )
    if payload.numel() < HEADER_BYTES:
        raise PayloadError(f"a payload has at least {HEADER_BYTES} bytes (this one has {payload.numel()})")
    magic, version, codec, elements, first, second = _HEADER.unpack(bytes(payload[:HEADER_BYTES].tolist()))
    if magic != _MAGIC:
        raise PayloadError(f"a payload begins with {_MAGIC!r} (this one with {magic!r})")
    if version != VERSION:
        raise PayloadError(f"this payload is of version {version}, and this paceline reads version {VERSION}")
    return Header(codec=codec, elements=elements, first=first, second=second)


def opened(
    payload: torch.Tensor, codec: int, expected_length: int | None, out: torch.Tensor | None = None
) -> tuple[Header, torch.Tensor]:
    """The header and the body of a payload that must be of one codec, and of one length if one is expected.

    >>> opened(Header(codec=1, elements=3).payload(12), codec=1, expected_length=4)
    Traceback (most recent call last):
    paceline.codecs.payload.PayloadError: a vector of 4 elements was expected (this one has 3)
    """
    header = read_header(payload)
    if header.codec != codec:
        raise PayloadError(f"this payload is of codec number {header.codec}, and this codec has number {codec}")
    for expected in (expected_length, None if out is None else out.numel()):
        if expected is not None and header.elements != expected:
            raise PayloadError(f"a vector of {expected:,} elements was expected (this one has {header.elements:,})")
    body = payload[HEADER_BYTES:]
    if not body.is_contiguous() or body.data_ptr() % 8 or body.storage_offset() % 8:
        body = body.clone()  # words are read from it, and torch counts them from the beginning of its storage
    return header, body


def check_bytes(body: torch.Tensor, wanted: int) -> None:
    """Refuse a body that has not just the bytes it must have.

    >>> check_bytes(torch.zeros(5, dtype=torch.uint8), 8)
    Traceback (most recent call last):
    paceline.codecs.payload.PayloadError: the payload's body must have 8 bytes (it has 5)
    """
    if body.numel() != wanted:
        raise PayloadError(f"the payload's body must have {wanted:,} bytes (it has {body.numel():,})")


def check_unasked(elements: int, expected_length: int | None, out: torch.Tensor | None = None) -> None:
    """Refuse a long vector out of few bytes, unless its length was expected: anybody can claim one.

    >>> check_unasked(2**31, None)
    Traceback (most recent call last):
    paceline.codecs.payload.PayloadError: the payload says 2,147,483,648 elements; give expected_length to allow it
    """
    if expected_length is None and out is None and elements > MOST_UNASKED:
        raise PayloadError(f"the payload says {elements:,} elements; give expected_length to allow it")


def placed(elements: int, out: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Where to decode to: `out`, if it fits, or new memory."""
    if out is None:
        return torch.empty(elements, dtype=torch.float32, device=device)
    if out.dtype is not torch.float32 or out.dim() != 1 or not out.is_contiguous():
        raise ValueError(f"out must be a flat float32 tensor (it is {out.dtype}, {out.dim()}-dimensional)")
    if out.numel() != elements:
        raise PayloadError(f"a vector of {out.numel():,} elements was expected (this one has {elements:,})")
    return out
