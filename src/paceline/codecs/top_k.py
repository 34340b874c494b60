"""top-k: the elements of largest magnitude as they are, and zero for all others.

    g:        0.1   -3     0.2    2     -0.3      fraction = 0.4: 2 of 5
    sent:     at 1: -3,  at 3: 2
    decoded:  0     -3     0      2      0

ceil(fraction * n) elements are kept, exactly those a full sort would give; of equal magnitudes the first ones. Eight
bytes each: a position and a value. It is biased, for small elements never travel: use it with error feedback.

On the CPU the largest are found by radix select. The bit pattern of a float's magnitude, as a whole number, orders as
the magnitude does: no comparison of floats, and a number that is not finite is larger than all others. With the 31 bits
in three digits (11, 10 and 10 bits):

1. `digit_counts`: how many elements have which first digit. That of the k-th largest is the floor. In a long vector a
   sample is counted: a floor too low costs time, one too high is noticed, and neither changes the result.
2. `at_least`: the places of all elements from the floor on, in ascending order. In a usual gradient few more than k.
3. `kept_from`: among these, the other two digits of the k-th largest; then all above it, and the first of its equals.

The first two read the whole vector, in threads.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017; with error feedback: Stich et al.,
"Sparsified SGD with Memory", 2018. Ours: the selection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from paceline.codecs.layout import UNIT
from paceline.codecs.machine_code import call, in_threads, kernel
from paceline.codecs.payload import (
    HEADER_BYTES,
    Header,
    PayloadError,
    StatelessCodec,
    check_bytes,
    check_claim,
    flat_vector,
    open_payload,
    output_vector,
    refuse_not_finite,
)

MAGNITUDE = np.uint32(0x7FFFFFFF)
NOT_FINITE = np.uint32(0x7F800000)  # from this bit pattern on
FIRST_SHIFT = np.uint32(20)
DIGITS = 2048
LANES = 4

Array = Any  # numpy's, as numba sees it

u32 = np.uint32
_STRIDE = 61  # a prime: rows of a weight are not as long
_LEAST_SAMPLED = 2**17  # elements; fewer are counted at once


@dataclass(frozen=True, slots=True)
class TopK(StatelessCodec):
    """Sends the `fraction` of elements whose magnitudes are largest, with their positions.

    >>> codec = TopK(fraction=0.4)
    >>> codec.decode(codec.encode(torch.tensor([0.1, -3.0, 0.2, 2.0, -0.3])))
    tensor([ 0., -3.,  0.,  2.,  0.])
    """

    NUMBER: ClassVar[int] = 5
    biased: ClassVar[bool] = True
    fixed_size: ClassVar[bool] = True

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be above 0, and 1 at most (fraction={self.fraction})")

    def kept(self, elements: int) -> int:
        """Return how many of so many elements travel.

        >>> TopK(fraction=0.01).kept(101)
        2
        """
        return min(elements, max(1, math.ceil(self.fraction * elements)))

    def encode(self, gradient: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return the positions and values of the largest elements."""
        vector = flat_vector(gradient)
        kept = self.kept(vector.numel())
        payload = Header(codec=self.NUMBER, elements=vector.numel(), first=kept).payload(8 * kept, vector.device)
        positions, values = _parts(payload[HEADER_BYTES:], kept)
        if kept:
            select = _select_by_kernel if vector.device.type == "cpu" else _select_by_torch
            select(vector, positions, values)
        return payload

    def decode(
        self, payload: torch.Tensor, *, expected_length: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the values at their positions, among zeros."""
        header, body = open_payload(payload, self.NUMBER, expected_length, out)
        if header.first > header.elements:
            raise PayloadError(f"at most all {header.elements:,} elements can be kept (not {header.first:,})")
        check_bytes(body, 8 * header.first)
        check_claim(header.elements, expected_length, out)
        positions, values = _parts(body, header.first)
        place = _place_by_kernel if body.device.type == "cpu" else _place_by_torch
        return place(positions, values, header.elements, out)

    def most_bytes(self, elements: int) -> int:
        return HEADER_BYTES + 8 * self.kept(elements)


def _parts(body: torch.Tensor, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions and values, both as the bit patterns of int32."""
    words = body.view(torch.int32)
    return words[:kept], words[kept:]


# -- on the CPU ---------------------------------------------------------------------------------------------------


def _select_by_kernel(vector: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    bits, kept = _words(vector), positions.numel()
    worth_a_guess = bits.size >= _LEAST_SAMPLED and kept <= bits.size // 4  # the floor of nearly all is hard to guess
    places = _places(bits, _guessed_floor(bits, kept)) if worth_a_guess else None
    if places is None or places.size < kept:
        places = _places(bits, _floor(bits, kept))
    call(kept_from, bits, places, _words(positions), _words(values))
    if not bool(torch.isfinite(values.view(torch.float32)).all()):  # what is not finite is the largest, and so kept
        refuse_not_finite(vector)


def _floor(bits: Any, kept: int) -> np.uint32:
    """Return the least bit pattern with the first digit of the element that is number `kept` in size."""
    lanes = sum(in_threads(digit_counts, -(-bits.size // UNIT), UNIT, bits))
    from_the_top = lanes.reshape(-1, DIGITS).sum(0)[::-1].cumsum()
    digit = DIGITS - 1 - int(np.searchsorted(from_the_top, kept))
    return np.uint32(digit << int(FIRST_SHIFT))


def _guessed_floor(bits: Any, kept: int) -> np.uint32:
    """Return the floor by a sample, in a tenth of the time. If it is too high, too few are found, and it is not used.

    Four standard deviations more are asked for than the sample's share: then it is hardly ever too high.
    """
    sample, share = np.ascontiguousarray(bits[::_STRIDE]), kept / _STRIDE
    return _floor(sample, min(sample.size, math.ceil(share + 4 * math.sqrt(share)) + 1))


def _places(bits: Any, floor: np.uint32) -> Any:
    return np.concatenate(in_threads(at_least, -(-bits.size // UNIT), UNIT, bits, floor))


def _place_by_kernel(
    positions: torch.Tensor, values: torch.Tensor, elements: int, out: torch.Tensor | None
) -> torch.Tensor:
    wrong = call(first_misplaced, _words(positions), _words(values), elements)
    if wrong >= 0:
        _refuse(wrong, positions, values, elements)
    vector = output_vector(elements, out, positions.device).zero_()
    call(scatter, _words(positions), _words(values), _words(vector))
    return vector


def _words(tensor: torch.Tensor) -> Any:
    return tensor.numpy().view(np.uint32)


@kernel
def digit_counts(first: int, last: int, bits: Array) -> Any:
    """Count how many elements of units `first` .. `last` have which first digit: in lanes, to be added up.

    Neighbours count in different lanes: equal ones would wait for each other.
    """
    counts = np.zeros(LANES * DIGITS, np.int64)
    for index in range(first * UNIT, min(last * UNIT, bits.size)):
        lane = u32(index & (LANES - 1)) * u32(DIGITS)
        counts[lane + ((bits[index] & MAGNITUDE) >> FIRST_SHIFT)] += 1
    return counts


@kernel
def at_least(first: int, last: int, bits: Array, floor: Any) -> Any:
    """Return the places, in units `first` .. `last`, of the elements whose magnitude is not below the floor."""
    start, end = first * UNIT, min(last * UNIT, bits.size)
    places = np.empty(max(0, end - start) + 1, np.uint32)  # memory that is not written to costs nothing
    count = 0
    for index in range(start, end):
        places[count] = u32(index)
        count += (bits[index] & MAGNITUDE) >= floor
    return places[:count]


@kernel
def kept_from(bits: Array, places: Array, positions: Array, values: Array) -> None:
    """Fill in the positions and bit patterns of the largest elements at these ascending places, as many as fit."""
    magnitudes = np.empty(places.size, np.uint32)
    for index in range(places.size):
        magnitudes[index] = bits[places[index]] & MAGNITUDE
    threshold, equals = kth_largest(magnitudes, positions.size)
    count = 0
    for index in range(places.size):
        magnitude = magnitudes[index]
        if magnitude < threshold:
            continue
        if magnitude == threshold:
            if equals == 0:
                continue
            equals -= 1
        positions[count] = places[index]
        values[count] = bits[places[index]]
        count += 1


@kernel
def kth_largest(magnitudes: Array, k: int) -> Any:
    """Return the k-th largest of bit patterns, and how many equal to it are among the k largest.

    Digit by digit: `prefix` is what is known of it, with a zero for the digit in question; `left` is its rank among
    those that begin alike.
    """
    prefix, left = u32(0), k
    counts = np.empty(DIGITS, np.int64)
    for shift in range(20, -1, -10):
        counts[:] = 0
        for index in range(magnitudes.size):
            digits = magnitudes[index] >> u32(shift)
            if digits >> u32(10) == prefix >> u32(10) or shift == 20:
                counts[digits - prefix] += 1
        digit = DIGITS - 1
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        prefix = (prefix + u32(digit)) << u32(min(shift, 10))
    return prefix, left


@kernel
def first_misplaced(positions: Array, values: Array, elements: int) -> int:
    """Return the first index where positions do not ascend, leave the `elements`, or the value is not finite."""
    before = np.int64(-1)
    for index in range(positions.size):
        position = np.int64(positions[index])
        if position <= before or position >= elements or (values[index] & MAGNITUDE) >= NOT_FINITE:
            return index
        before = position
    return -1


@kernel
def scatter(positions: Array, values: Array, out: Array) -> None:
    """Put bit patterns where they belong."""
    for index in range(positions.size):
        out[positions[index]] = values[index]


# -- elsewhere, and as the reference --------------------------------------------------------------------------------


def _select_by_torch(vector: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    refuse_not_finite(vector)
    magnitudes, kept = vector.view(torch.int32) & int(MAGNITUDE), positions.numel()
    threshold = magnitudes.kthvalue(magnitudes.numel() - kept + 1).values
    above, equal = magnitudes > threshold, magnitudes == threshold
    equal &= equal.cumsum(0) <= kept - above.sum()
    places = (above | equal).nonzero().view(-1)
    positions.copy_(places)  # a place beyond 2**31 wraps around, to its bit pattern as uint32
    values.copy_(vector.view(torch.int32)[places])


def _place_by_torch(
    positions: torch.Tensor, values: torch.Tensor, elements: int, out: torch.Tensor | None
) -> torch.Tensor:
    places = positions.to(torch.int64) & 0xFFFFFFFF
    before = torch.cat([places.new_full((1,), -1), places])[:-1]
    wrong = (places <= before) | (places >= elements) | ~torch.isfinite(values.view(torch.float32))
    if bool(wrong.any()):
        _refuse(int(wrong.to(torch.uint8).argmax()), positions, values, elements)
    vector = output_vector(elements, out, positions.device).zero_()
    vector[places] = values.view(torch.float32)
    return vector


def _refuse(wrong: int, positions: torch.Tensor, values: torch.Tensor, elements: int) -> None:
    position, value = int(positions[wrong]) & 0xFFFFFFFF, float(values.view(torch.float32)[wrong])
    raise PayloadError(
        f"positions must ascend and be below {elements:,}, and values be finite "
        f"(number {wrong} is {value} at {position:,})"
    )
