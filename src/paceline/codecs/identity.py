"""identity: the vector as it is, four bytes an element, without a copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Identity:
    """The null codec: the vector's own memory, looked at as bytes.

    >>> vector = torch.tensor([1.0, -2.0])
    >>> Identity().decode(Identity().encode(vector))
    tensor([ 1., -2.])
    """

    def encode(self, vector: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """The vector's memory as bytes."""
        return vector.contiguous().view(torch.uint8)

    def decode(self, payload: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The bytes as a vector."""
        check_whole(payload, 4)
        vector = payload.view(torch.float32)
        return vector if out is None else copied(vector, out)

    def most_bytes(self, elements: int) -> int:
        """Four bytes an element."""
        return 4 * elements


def copied(vector: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out` with the numbers of a vector of the same length.

    >>> copied(torch.ones(1), torch.zeros(3))
    Traceback (most recent call last):
    ValueError: a vector of 3 elements was expected (this one has 1)
    """
    if vector.numel() != out.numel():
        raise ValueError(f"a vector of {out.numel()} elements was expected (this one has {vector.numel()})")
    return out.copy_(vector)


def check_whole(payload: torch.Tensor, element_bytes: int) -> None:
    """Refuse a payload that ends within an element.

    >>> check_whole(torch.zeros(5, dtype=torch.uint8), 4)
    Traceback (most recent call last):
    ValueError: a payload must hold whole elements of 4 bytes (it has 5 bytes)
    """
    if payload.numel() % element_bytes:
        raise ValueError(
            f"a payload must hold whole elements of {element_bytes} bytes (it has {payload.numel()} bytes)"
        )
