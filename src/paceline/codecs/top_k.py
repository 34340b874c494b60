"""top-k: the elements of largest magnitude as they are, and zero for all others.

    g:        0.1   -3     0.2    2     -0.3      fraction = 0.4: 2 of 5
    sent:     at 1: -3,  at 3: 2
    decoded:  0     -3     0      2      0

ceil(fraction * n) elements are kept, exactly those a full sort would give; of equal magnitudes the first ones. Eight
bytes each: a position and a value. It is biased, for small elements never travel: use it with error feedback.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017; with error feedback: Stich et al.,
"Sparsified SGD with Memory", 2018. Ours: the selection, a radix select over bit patterns (`selecting.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from paceline.codecs.compiling import call
from paceline.codecs.layout import UNIT
from paceline.codecs.memory import NoMemory
from paceline.codecs.payload import HEADER_BYTES, Header, PayloadError, check_bytes, check_unasked, opened, placed
from paceline.codecs.threads import in_threads
from paceline.codecs.vectors import flat, refuse_not_finite

_MAGNITUDE = 0x7FFFFFFF
_STRIDE = 61  # a prime: rows of a weight are not as long
_LEAST_SAMPLED = 2**17  # elements; fewer are counted at once


@dataclass(frozen=True, slots=True)
class TopK(NoMemory):
    """The `fraction` of elements that is largest.

    >>> codec = TopK(fraction=0.4)
    >>> codec.decode(codec.encode(torch.tensor([0.1, -3.0, 0.2, 2.0, -0.3])))
    tensor([ 0., -3.,  0.,  2.,  0.])
    """

    NUMBER: ClassVar[int] = 5
    biased: ClassVar[bool] = True
    suits_parameters: ClassVar[bool] = False
    fixed_size: ClassVar[bool] = True

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be above 0, and 1 at most (fraction={self.fraction})")

    def kept(self, elements: int) -> int:
        """How many of so many elements travel.

        >>> TopK(fraction=0.01).kept(101)
        2
        """
        return min(elements, max(1, math.ceil(self.fraction * elements)))

    def encode(self, gradient: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """The positions and values of the largest elements."""
        vector = flat(gradient)
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
        """The values at their positions, among zeros."""
        header, body = opened(payload, self.NUMBER, expected_length, out)
        if header.first > header.elements:
            raise PayloadError(f"at most all {header.elements:,} elements can be kept (not {header.first:,})")
        check_bytes(body, 8 * header.first)
        check_unasked(header.elements, expected_length, out)
        positions, values = _parts(body, header.first)
        place = _place_by_kernel if body.device.type == "cpu" else _place_by_torch
        return place(positions, values, header.elements, out)

    def most_bytes(self, elements: int) -> int:
        """Eight bytes for each element that is kept."""
        return HEADER_BYTES + 8 * self.kept(elements)


def _parts(body: torch.Tensor, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and values, both as the bit patterns of int32."""
    words = body.view(torch.int32)
    return words[:kept], words[kept:]


def _zeros(elements: int, out: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    return placed(elements, out, device).zero_()


# -- on the CPU ---------------------------------------------------------------------------------------------------


def _select_by_kernel(vector: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    from paceline.codecs import selecting

    bits, kept = _words(vector), positions.numel()
    worth_a_guess = bits.size >= _LEAST_SAMPLED and kept <= bits.size // 4  # the floor of nearly all is hard to guess
    places = _places(bits, _guessed_floor(bits, kept)) if worth_a_guess else None
    if places is None or places.size < kept:
        places = _places(bits, _floor(bits, kept))
    call(selecting.kept_from, bits, places, _words(positions), _words(values))
    if not bool(torch.isfinite(values.view(torch.float32)).all()):  # what is not finite is the largest, and so kept
        refuse_not_finite(vector)


def _floor(bits: Any, kept: int) -> np.uint32:
    """The least bit pattern with the first digit of the element that is number `kept` in size."""
    from paceline.codecs import selecting

    lanes = sum(in_threads(selecting.digit_counts, -(-bits.size // UNIT), UNIT, bits))
    from_the_top = lanes.reshape(-1, selecting.DIGITS).sum(0)[::-1].cumsum()
    digit = selecting.DIGITS - 1 - int(np.searchsorted(from_the_top, kept))
    return np.uint32(digit << int(selecting.FIRST_SHIFT))


def _guessed_floor(bits: Any, kept: int) -> np.uint32:
    """The floor by a sample, in a tenth of the time. Where it is too high, too few are found, and the guess is dropped.

    Four standard deviations more are asked for than the sample's share: then it is hardly ever too high.
    """
    sample, share = np.ascontiguousarray(bits[::_STRIDE]), kept / _STRIDE
    return _floor(sample, min(sample.size, math.ceil(share + 4 * math.sqrt(share)) + 1))


def _places(bits: Any, floor: np.uint32) -> Any:
    from paceline.codecs import selecting

    return np.concatenate(in_threads(selecting.at_least, -(-bits.size // UNIT), UNIT, bits, floor))


def _place_by_kernel(
    positions: torch.Tensor, values: torch.Tensor, elements: int, out: torch.Tensor | None
) -> torch.Tensor:
    from paceline.codecs import selecting

    wrong = call(selecting.first_misplaced, _words(positions), _words(values), elements)
    if wrong >= 0:
        _refuse(wrong, positions, values, elements)
    vector = _zeros(elements, out, positions.device)
    call(selecting.scatter, _words(positions), _words(values), _words(vector))
    return vector


def _words(tensor: torch.Tensor) -> Any:
    return tensor.numpy().view(np.uint32)


# -- elsewhere, and as the reference --------------------------------------------------------------------------------


def _select_by_torch(vector: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    refuse_not_finite(vector)
    magnitudes, kept = vector.view(torch.int32) & _MAGNITUDE, positions.numel()
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
    vector = _zeros(elements, out, positions.device)
    vector[places] = values.view(torch.float32)
    return vector


def _refuse(wrong: int, positions: torch.Tensor, values: torch.Tensor, elements: int) -> None:
    position, value = int(positions[wrong]) & 0xFFFFFFFF, float(values.view(torch.float32)[wrong])
    raise PayloadError(
        f"positions must ascend and be below {elements:,}, and values be finite "
        f"(number {wrong} is {value} at {position:,})"
    )
