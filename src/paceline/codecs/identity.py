"""identity: the vector as it is, four bytes an element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.codecs.memory import NoMemory
from paceline.codecs.payload import HEADER_BYTES, Header, check_bytes, opened, placed
from paceline.codecs.vectors import flat, refuse_not_finite


@dataclass(frozen=True, slots=True)
class Identity(NoMemory):
    """The null codec.

    >>> vector = torch.tensor([1.0, -2.0])
    >>> Identity().decode(Identity().encode(vector))
    tensor([ 1., -2.])
    """

    NUMBER: ClassVar[int] = 1
    biased: ClassVar[bool] = False
    suits_parameters: ClassVar[bool] = True
    fixed_size: ClassVar[bool] = True

    def encode(self, gradient: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """The vector's bytes."""
        vector = flat(gradient)
        refuse_not_finite(vector)
        payload = Header(codec=self.NUMBER, elements=vector.numel()).payload(4 * vector.numel(), vector.device)
        payload[HEADER_BYTES:].view(torch.float32).copy_(vector)
        return payload

    def decode(
        self, payload: torch.Tensor, *, expected_length: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The bytes as a vector: in `out` if that is given, else it shares the payload's memory."""
        header, body = opened(payload, self.NUMBER, expected_length, out)
        check_bytes(body, 4 * header.elements)
        vector = body.view(torch.float32)
        return vector if out is None else placed(header.elements, out, body.device).copy_(vector)

    def most_bytes(self, elements: int) -> int:
        """Four bytes an element."""
        return HEADER_BYTES + 4 * elements
