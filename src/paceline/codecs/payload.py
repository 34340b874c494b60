"""What all codecs share: the vectors that may be encoded, the payload's header, and a base for codecs without a memory.

A payload says which codec made it, in which version, how many elements it holds, and two parameters of the codec:

    0        2         3        4          8             12             16
    | "pl"   | version | codec  | elements | parameter 1 | parameter 2  | the codec's own bytes ...

    codec               number   parameters                       its own bytes
    identity            1                                         float32
    bfloat16            2                                         bfloat16
    one-bit             3                                         two means, a bit for each element
    qsgd, sparsifier    4        levels, norm, lossless; bucket   norms, then coded levels
    top-k               5        how many                         positions, values
    power-sgd           6        rank; how many tensors           their shapes, then P and Q of each
    float16             7                                         float16, all finite
    int8-sum            8        0; bucket                        scales (float32), then a level from -127 to 127 for
                                                                  each element (int8)

All numbers are little-endian. A payload comes from outside: whatever it says is checked before anything is allocated
for it, and a `PayloadError` says what is wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from paceline.errors import PacelineError

VERSION = 1
HEADER_BYTES = 16
MOST_ELEMENTS = 2**32 - 1
MOST_CLAIMED = 2**24  # elements that few bytes may claim, unless so many are expected

_HEADER = struct.Struct("<2sBBIII")
_MAGIC = b"pl"


class PayloadError(PacelineError, ValueError):
    """Bytes that are no payload of this codec, in one line.

    >>> raise PayloadError("a payload begins with 'pl'")
    Traceback (most recent call last):
    paceline.codecs.payload.PayloadError: a payload begins with 'pl'
    """


class NotFiniteError(PacelineError, ValueError):
    """A vector with numbers that no codec can carry.

    >>> raise NotFiniteError("the gradient is not finite")
    Traceback (most recent call last):
    paceline.codecs.payload.NotFiniteError: the gradient is not finite
    """


class StatelessCodec:
    """A codec that treats every gradient for itself: it remembers nothing.

    Unless a codec says otherwise it is unbiased, what it sends can stand for changes, not for parameters, and payloads
    are gathered, of whole vectors or of shards: they are not added up on their way.

    >>> StatelessCodec().state_dict()
    {}
    """

    __slots__ = ()

    biased: ClassVar[bool] = False
    suits_parameters: ClassVar[bool] = False
    plans: ClassVar[tuple[str, ...]] = ("gather", "two-step")
    adds_exactly: ClassVar[bool] = False
    sum_steps: ClassVar[int] = 1  # all-reduces of an `add_up`

    def fresh(self, shapes: Sequence[torch.Size] | None = None) -> Self:
        """Return this codec: without a memory it can serve any number of senders."""
        return self

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise if the state holds the memory of another codec."""
        if state:
            raise ValueError(f"{type(self).__name__} has no memory, and this state has {', '.join(state)}")


# -- vectors --------------------------------------------------------------------------------------------------------


def flat_vector(gradient: torch.Tensor, *, keeps_float64: bool = False) -> torch.Tensor:
    """Return a gradient as one float32 vector, which shares its memory where that is possible.

    With `keeps_float64` a gradient in float64 stays in float64.

    >>> flat_vector(torch.ones(2, 3, dtype=torch.float64))
    tensor([1., 1., 1., 1., 1., 1.])
    >>> flat_vector(torch.ones(2, dtype=torch.int64))
    Traceback (most recent call last):
    ValueError: a gradient is made of real floating-point numbers (this one is torch.int64)
    """
    if not isinstance(gradient, torch.Tensor):
        raise ValueError(f"a gradient is a torch tensor (this is {type(gradient).__name__})")
    if not gradient.is_floating_point():
        raise ValueError(f"a gradient is made of real floating-point numbers (this one is {gradient.dtype})")
    kept = keeps_float64 and gradient.dtype is torch.float64
    return gradient.detach().reshape(-1).to(torch.float64 if kept else torch.float32).contiguous()


def refuse_not_finite(vector: torch.Tensor) -> None:
    """Raise if a number of a vector is not finite. A finite sum rules it out in half the time.

    >>> refuse_not_finite(torch.tensor([1.0, float("nan"), 3.0]))
    Traceback (most recent call last):
    paceline.codecs.payload.NotFiniteError: the gradient is not finite: 1 of 3 elements, the first is number ...
    """
    if bool(torch.isfinite(vector.sum())):
        return
    bad = ~torch.isfinite(vector)
    count = int(bad.sum())
    if count:
        first = int(bad.to(torch.uint8).argmax())
        raise NotFiniteError(
            f"the gradient is not finite: {count:,} of {vector.numel():,} elements, the first is number {first} "
            f"({vector[first].item()}); lower the learning rate or clip, and skip this step"
        )


def output_vector(
    elements: int, out: torch.Tensor | None, device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the vector to decode to: `out`, if it fits, or a new one."""
    if out is None:
        return torch.empty(elements, dtype=dtype, device=device)
    if out.dtype is not dtype or out.dim() != 1 or not out.is_contiguous():
        wanted = str(dtype).removeprefix("torch.")
        raise ValueError(f"out must be a flat {wanted} tensor (it is {out.dtype}, {out.dim()}-dimensional)")
    if out.numel() != elements:
        raise PayloadError(f"a vector of {out.numel():,} elements was expected (this one has {elements:,})")
    return out


# -- payloads -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Header:
    """The first bytes of a payload. What `first` and `second` mean is up to the codec.

    >>> header = Header(codec=4, elements=1000, first=7, second=512)
    >>> read_header(header.payload(body_bytes=3)) == header
    True
    """

    codec: int
    elements: int
    first: int = 0
    second: int = 0

    def payload(
        self, body_bytes: int, device: torch.device | str = "cpu", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a payload that begins with this header, in `out` if that is given; its body is yet to be filled."""
        if self.elements > MOST_ELEMENTS:
            raise ValueError(f"a payload holds at most {MOST_ELEMENTS:,} elements (this vector has {self.elements:,})")
        wanted = HEADER_BYTES + body_bytes
        payload = torch.empty(wanted, dtype=torch.uint8, device=device) if out is None else out[:wanted]
        packed = _HEADER.pack(_MAGIC, VERSION, self.codec, self.elements, self.first, self.second)
        payload[:HEADER_BYTES] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        return payload


def read_header(payload: torch.Tensor) -> Header:
    """Return the header of a payload.

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


def open_payload(
    payload: torch.Tensor, codec: int, expected_length: int | None, out: torch.Tensor | None = None
) -> tuple[Header, torch.Tensor]:
    """Return the header and the body of a payload, which must be of this codec, and of the length that is expected.

    >>> open_payload(Header(codec=1, elements=3).payload(12), codec=1, expected_length=4)
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
    """Raise unless a body has just the bytes that it must have.

    >>> check_bytes(torch.zeros(5, dtype=torch.uint8), 8)
    Traceback (most recent call last):
    paceline.codecs.payload.PayloadError: the payload's body must have 8 bytes (it has 5)
    """
    if body.numel() != wanted:
        raise PayloadError(f"the payload's body must have {wanted:,} bytes (it has {body.numel():,})")


def check_claim(elements: int, expected_length: int | None, out: torch.Tensor | None = None) -> None:
    """Raise if few bytes claim to be a long vector, unless its length was expected.

    >>> check_claim(2**31, None)
    Traceback (most recent call last):
    paceline.codecs.payload.PayloadError: the payload says 2,147,483,648 elements; give expected_length to allow it
    """
    if expected_length is None and out is None and elements > MOST_CLAIMED:
        raise PayloadError(f"the payload says {elements:,} elements; give expected_length to allow it")
