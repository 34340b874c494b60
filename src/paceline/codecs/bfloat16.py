"""bfloat16: the upper half of each float32, rounded to nearest. Half the bytes, eight bits of precision.

A finite number above about 3.39e38 would round to infinity; it becomes the largest bfloat16 instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.codecs.memory import NoMemory
from paceline.codecs.payload import HEADER_BYTES, Header, check_bytes, opened, placed
from paceline.codecs.vectors import flat, refuse_not_finite

_LARGEST = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True, slots=True)
class BFloat16(NoMemory):
    """Two bytes an element.

    >>> vector = torch.tensor([1.0, 0.1])
    >>> BFloat16().decode(BFloat16().encode(vector))
    tensor([1.0000, 0.1001])
    """

    NUMBER: ClassVar[int] = 2
    biased: ClassVar[bool] = False
    suits_parameters: ClassVar[bool] = True
    fixed_size: ClassVar[bool] = True

    def encode(self, gradient: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """The rounded vector as bytes."""
        vector = flat(gradient)
        payload = Header(codec=self.NUMBER, elements=vector.numel()).payload(2 * vector.numel(), vector.device)
        rounded = payload[HEADER_BYTES:].view(torch.bfloat16).copy_(vector)
        if not bool(torch.isfinite(rounded.sum(dtype=torch.float32))):  # rare, and quicker to rule out than isinf()
            refuse_not_finite(vector)
            rounded.clamp_(-_LARGEST, _LARGEST)
        return payload

    def decode(
        self, payload: torch.Tensor, *, expected_length: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The bytes as a vector."""
        header, body = opened(payload, self.NUMBER, expected_length, out)
        check_bytes(body, 2 * header.elements)
        return placed(header.elements, out, body.device).copy_(body.view(torch.bfloat16))

    def most_bytes(self, elements: int) -> int:
        """Two bytes an element."""
        return HEADER_BYTES + 2 * elements
