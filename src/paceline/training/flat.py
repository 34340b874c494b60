"""Tensors of any shape and type as one vector, in the type in which changes are added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Flat:
    """Tensors of any shape and type, read and written as one vector.

    >>> flat = Flat([torch.ones(2, 2), torch.zeros(1, dtype=torch.int64)], torch.float32)
    >>> flat.read(torch.empty(5))
    tensor([1., 1., 1., 1., 0.])
    """

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        self.tensors, self.dtype = list(tensors), dtype
        self.size = sum(tensor.numel() for tensor in self.tensors)

    def parts(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """The vector cut into views of the tensors' shapes."""
        cut = torch.split(vector[: self.size], [tensor.numel() for tensor in self.tensors])
        return [part.view(tensor.shape) for part, tensor in zip(cut, self.tensors, strict=True)]

    @torch.no_grad()
    def read(self, out: torch.Tensor) -> torch.Tensor:
        """The tensors, in `out`."""
        for part, tensor in zip(self.parts(out), self.tensors, strict=True):
            part.copy_(tensor)
        return out

    @torch.no_grad()
    def write(self, vector: torch.Tensor) -> None:
        """The tensors, from a vector; whole numbers are rounded."""
        for part, tensor in zip(self.parts(vector), self.tensors, strict=True):
            tensor.copy_(part if tensor.is_floating_point() else part.round())


def message_dtype(parameters: Sequence[torch.Tensor]) -> torch.dtype:
    """The type in which changes are added up: float32, or float64 if a parameter has it.

    >>> message_dtype([torch.zeros(1, dtype=torch.bfloat16)])
    torch.float32
    """
    return torch.float64 if any(parameter.dtype is torch.float64 for parameter in parameters) else torch.float32
