"""identity, bfloat16 and float16: every element as a float, of four bytes or of two.

    identity    the vector as it is
    bfloat16    the upper half of each float32: eight bits of precision at half the bytes. A finite number above about
                3.39e38 would round to infinity; it becomes the largest bfloat16 instead.
    float16     eleven bits of precision, and a small range: numbers below 2**-14 lose digits, those up to 2**-25 become
                zero, and a vector with one beyond 65,504 is refused.

Such numbers can be added up on their way, by an all-reduce of the same type. With 16 bits each of N ranks rounds once,
and so does every addition:

    |total - sum g|  <=  ((1 + u)**N - 1) sum |g|        u = 2**-8 for bfloat16, 2**-11 for float16, 2**-24 for identity

In float16 each rank sends g / N, so that the sum is a mean and stays in range; a number is then lost up to N 2**-25 on
each rank, so N**2 2**-25 more may be missing.

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
    NotFiniteError,
    PayloadError,
    StatelessCodec,
    check_bytes,
    flat_vector,
    open_payload,
    output_vector,
    refuse_not_finite,
)
from paceline.codecs.requests import Adding, AllReduce

BLOCK = 2**18  # elements
_LARGEST_BFLOAT16 = torch.finfo(torch.bfloat16).max
_LARGEST_FLOAT16 = torch.finfo(torch.float16).max


class Floats(StatelessCodec):
    """Every element as a float of one type."""

    __slots__ = ()

    NUMBER: ClassVar[int]
    DTYPE: ClassVar[torch.dtype]
    suits_parameters: ClassVar[bool] = True
    fixed_size: ClassVar[bool] = True
    plans: ClassVar[tuple[str, ...]] = ("all-reduce", "gather", "two-step")

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
        self._cast(vector, payload[HEADER_BYTES:].view(self.DTYPE), checked=checked)
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

    def add_up(
        self,
        vector: torch.Tensor,
        world: int,
        generator: torch.Generator | None = None,
        *,
        out: torch.Tensor | None = None,
        rest: torch.Tensor | None = None,
    ) -> Adding:
        """Add up the vectors of all ranks in this type; NotFiniteError on all ranks if the sum leaves its range.

        Float64 is added up in float64 where this type is float32.
        """
        vector, divisor = flat_vector(vector, keeps_float64=self.DTYPE is torch.float32), self._divisor(world)
        dtype = torch.float64 if vector.dtype is torch.float64 else self.DTYPE
        floats = torch.empty(vector.numel() + world, dtype=dtype, device=vector.device)
        floats[vector.numel() :] = 0
        self._cast(vector, floats[: vector.numel()], divisor)
        answer = yield AllReduce(floats)
        if rest is not None:
            rest.zero_()
        return self._total(answer[: vector.numel()], divisor, out)

    def most_bytes(self, elements: int) -> int:
        return HEADER_BYTES + self.DTYPE.itemsize * elements

    def _divisor(self, world: int) -> int:
        """Return by what every vector is divided before so many are added up."""
        return 1

    def _cast(self, vector: torch.Tensor, floats: torch.Tensor, divisor: int = 1, *, checked: bool = False) -> None:
        """Fill in the floats of a vector; NotFiniteError if it is not finite, and not `checked`."""
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
                floats.clamp_(-_LARGEST_BFLOAT16, _LARGEST_BFLOAT16)

    def _total(self, floats: torch.Tensor, factor: int, out: torch.Tensor | None) -> torch.Tensor:
        """Return a sum of floats as float32, or float64, times a factor; NotFiniteError if it is not finite.

        Every rank has the same sum, so all of them raise.
        """
        in_place = out is None and self.DTYPE is torch.float32 and factor == 1
        dtype = torch.float64 if floats.dtype is torch.float64 else torch.float32
        total, sums = floats if in_place else output_vector(floats.numel(), out, floats.device, dtype), []
        for start in range(0, floats.numel(), BLOCK):
            part = slice(start, start + BLOCK)
            if not in_place:
                total[part].copy_(floats[part])
            if factor != 1:
                total[part].mul_(factor)
            sums.append(total[part].sum())
        if sums and not bool(torch.isfinite(torch.stack(sums)).all()):
            bad = ~torch.isfinite(floats)
            count, name = int(bad.sum()), str(floats.dtype).removeprefix("torch.")
            if count:
                raise NotFiniteError(
                    f"the sum of all ranks' gradients is beyond {name}: {count:,} of {floats.numel():,} elements, "
                    f"the first is number {int(bad.to(torch.uint8).argmax())}; clip the gradient, and skip this step"
                )
        return total


@dataclass(frozen=True, slots=True)
class Identity(Floats):
    """Sends float32 as it is: the codec that changes nothing.

    >>> vector = torch.tensor([1.0, -2.0])
    >>> Identity().decode(Identity().encode(vector))
    tensor([ 1., -2.])
    """

    NUMBER: ClassVar[int] = 1
    DTYPE: ClassVar[torch.dtype] = torch.float32
    adds_exactly: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class BFloat16(Floats):
    """Sends two bytes for each element, with the range of float32 and 8 bits of precision.

    >>> vector = torch.tensor([1.0, 0.1])
    >>> BFloat16().decode(BFloat16().encode(vector))
    tensor([1.0000, 0.1001])
    """

    NUMBER: ClassVar[int] = 2
    DTYPE: ClassVar[torch.dtype] = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Float16(Floats):
    """Sends two bytes for each element, with three more bits of precision than bfloat16, for numbers up to 65,504.

    >>> Float16().decode(Float16().encode(torch.tensor([1.0, 0.1, 2.0**-26])))
    tensor([1.0000, 0.1000, 0.0000])
    >>> Float16().encode(torch.tensor([1.0, -70_000.0]))
    Traceback (most recent call last):
    paceline.codecs.payload.NotFiniteError: float16 carries numbers up to 65,504 (element number 1 is -70000.0); ...
    """

    NUMBER: ClassVar[int] = 7
    DTYPE: ClassVar[torch.dtype] = torch.float16
    suits_parameters: ClassVar[bool] = False  # one beyond its range would end the run, and changes cost no more

    def decode(
        self, payload: torch.Tensor, *, expected_length: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the floats; PayloadError if they are not finite."""
        vector, finite = self.decode_and_check(payload, expected_length=expected_length, out=out)
        if not finite:
            raise PayloadError("the payload's numbers must be finite")
        return vector

    def _divisor(self, world: int) -> int:
        return world

    def _cast(self, vector: torch.Tensor, floats: torch.Tensor, divisor: int = 1, *, checked: bool = False) -> None:
        """Fill in the floats of a vector, divided; NotFiniteError if a number of the vector is beyond their range."""
        ends, room = [], torch.empty_like(vector[:BLOCK])
        for start in range(0, vector.numel(), BLOCK):
            block, into = vector[start : start + BLOCK], floats[start : start + BLOCK]
            ends.append(torch.stack(torch.aminmax(block)))
            into.copy_(block if divisor == 1 else torch.div(block, divisor, out=room[: block.numel()]))
        if ends and not bool((torch.stack(ends).abs() <= _LARGEST_FLOAT16).all()):  # NaN is not
            refuse_not_finite(vector)
            place = int((vector.abs() > _LARGEST_FLOAT16).to(torch.uint8).argmax())
            raise NotFiniteError(
                f"float16 carries numbers up to 65,504 (element number {place} is {vector[place].item()}); "
                "take bfloat16, or clip the gradient"
            )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two vectors share memory."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes
