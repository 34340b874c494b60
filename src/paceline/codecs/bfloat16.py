"""bfloat16: the upper half of each float32, rounded to nearest. Half the bytes, eight bits of precision.

A finite number above about 3.39e38 would round to infinity; it becomes the largest bfloat16 instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.codecs.identity import check_whole, copied

_LARGEST = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True, slots=True)
class BFloat16:
    """Two bytes an element.

    >>> vector = torch.tensor([1.0, 0.1])
    >>> BFloat16().decode(BFloat16().encode(vector))
    tensor([1.0000, 0.1001])
    """

    def encode(self, vector: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """The rounded vector as bytes."""
        rounded = vector.contiguous().to(torch.bfloat16)
        if not bool(torch.isfinite(rounded.sum(dtype=torch.float32))):  # rare, and quicker to rule out than isinf()
            rounded = torch.where(vector.isinf(), rounded, rounded.clamp(-_LARGEST, _LARGEST))
        return rounded.view(torch.uint8)

    def decode(self, payload: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The bytes as a vector."""
        check_whole(payload, 2)
        rounded = payload.view(torch.bfloat16)
        return rounded.to(torch.float32) if out is None else copied(rounded, out)

    def most_bytes(self, elements: int) -> int:
        """Two bytes an element."""
        return 2 * elements
