"""identity and bfloat16: every element as a float, of four bytes or of two.

    identity    the vector as it is
    bfloat16    the upper half of each float32: eight bits of precision at half the bytes. A finite number above about
                3.39e38 would round to infinity; it becomes the largest bfloat16 instead.

Where we differ: bfloat16 rounds to the nearest, ties to even; cutting the lower half off, as in the lecture, would make
every number smaller in magnitude, and the error twice as large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.codecs.payload import (
    HEADER_BYTES,
    Header,
    StatelessCodec,
    check_bytes,
    flat_vector,
    open_payload,
    output_vector,
    refuse_not_finite,
)

BLOCK = 2**18  # elements
_LARGEST = torch.finfo(torch.bfloat16).max


class Floats(StatelessCodec):
    """Every element as a float of one type."""

    __slots__ = ()

    NUMBER: ClassVar[int]
    DTYPE: ClassVar[torch.dtype]
    suits_parameters: ClassVar[bool] = True
    fixed_size: ClassVar[bool] = True

    def encode(
        self,
        gradient: torch.Tensor,
        generator: torch.Generator | None = None,
        *,
        out: torch.Tensor | None = None,
        checked: bool = False,
    ) -> torch.Tensor:
        """Return the vector's bytes: in `out` if that is given. A vector that is `checked` is known to be finite."""
        vector = flat_vector(gradient)
        header = Header(codec=self.NUMBER, elements=vector.numel())
        payload = header.payload(self.DTYPE.itemsize * vector.numel(), vector.device, out)
        floats = payload[HEADER_BYTES:].view(self.DTYPE)
        rounds = self.DTYPE is not torch.float32
        sums = []  # of each block while it is in the processor's cache: all are finite if every number is
        for start in range(0, vector.numel(), BLOCK):
            part = slice(start, start + BLOCK)
            floats[part].copy_(vector[part])
            if rounds or not checked:
                sums.append(floats[part].sum())
        if sums and not bool(torch.isfinite(torch.stack(sums)).all()):  # rare: then it is looked at closely
            refuse_not_finite(vector)
            if rounds:
                floats.clamp_(-_LARGEST, _LARGEST)
        return payload

    def decode(
        self, payload: torch.Tensor, *, expected_length: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the floats: in `out` if that is given; else float32 shares the payload's memory.

        The payload may lie at the end of a longer memory that begins with `out`: blocks are read before they are
        written over.
        """
        return self.decode_and_check(payload, expected_length=expected_length, out=out, check=False)[0]

    def decode_and_check(
        self,
        payload: torch.Tensor,
        *,
        expected_length: int | None = None,
        out: torch.Tensor | None = None,
        check: bool = True,
    ) -> tuple[torch.Tensor, bool]:
        """Return what `decode` does, and whether all is finite: each block is looked at while it is at hand."""
        header, body = open_payload(payload, self.NUMBER, expected_length, out)
        check_bytes(body, self.DTYPE.itemsize * header.elements)
        vector, sums = body.view(self.DTYPE), []
        in_place = out is None and self.DTYPE is torch.float32
        found = vector if in_place else output_vector(header.elements, out, body.device)
        for start in range(0, header.elements, BLOCK):
            part = slice(start, start + BLOCK)
            if not in_place:
                found[part].copy_(vector[part].clone() if _overlap(found[part], vector[part]) else vector[part])
            if check:
                sums.append(found[part].sum())
        if sums and not bool(torch.isfinite(torch.stack(sums)).all()):
            return found, bool(torch.isfinite(found).all())
        return found, True

    def most_bytes(self, elements: int) -> int:
        return HEADER_BYTES + self.DTYPE.itemsize * elements


@dataclass(frozen=True, slots=True)
class Identity(Floats):
    """The null codec.

    >>> vector = torch.tensor([1.0, -2.0])
    >>> Identity().decode(Identity().encode(vector))
    tensor([ 1., -2.])
    """

    NUMBER: ClassVar[int] = 1
    DTYPE: ClassVar[torch.dtype] = torch.float32


@dataclass(frozen=True, slots=True)
class BFloat16(Floats):
    """Two bytes an element.

    >>> vector = torch.tensor([1.0, 0.1])
    >>> BFloat16().decode(BFloat16().encode(vector))
    tensor([1.0000, 0.1001])
    """

    NUMBER: ClassVar[int] = 2
    DTYPE: ClassVar[torch.dtype] = torch.bfloat16


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two vectors share memory."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes
