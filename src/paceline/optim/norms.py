"""The length of a tensor on the CPU, in one pass at the speed of memory.

A LARS step needs two norms per layer, and on the CPU they cost as much as the step itself. Three ways to the sum of
squares of ResNet-50's weights and gradients (204 MB, two cores): `torch.linalg.vector_norm` 12 ms and 3e-5 off at
2 M elements (it adds up in one chain of float32), a sum in float64 exact and slower still, the BLAS dot product of
the tensor with itself 8 ms. So: dot products over blocks, added up in Python's float64, which is 5e-7 off at worst.

Squares of float32 overflow above 1.8e19 and vanish below 1e-22. Where a sum says that this may have happened, the
norm is taken again in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 1 << 18
"""Elements per dot product: few enough for float32 sums, enough for BLAS to use its threads."""

_SUSPICIOUSLY_SMALL = 1e-30
_DOTTED = (torch.float32, torch.float64)


def cpu_norm(tensor: Tensor) -> float:
    """Return the Euclidean norm of a tensor on the CPU; NaN if there is one in it.

    >>> cpu_norm(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    5.0
    >>> round(cpu_norm(torch.full((4,), 1e-30)) * 1e30, 6)  # its squares are zero in float32
    2.0
    """
    flat = _flat(tensor) if tensor.dtype in _DOTTED else None
    if flat is None:
        return _careful(tensor)
    if flat.numel() <= BLOCK:
        squares = torch.dot(flat, flat).item()
    else:  # math.fsum would raise where this is infinite
        squares = sum(torch.dot(block, block).item() for block in torch.split(flat, BLOCK))
    if squares < _SUSPICIOUSLY_SMALL or math.isinf(squares):
        return _careful(tensor)
    return math.sqrt(squares)


def entries(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor of any layout; those of a sparse one that name the same place are added up.

    >>> entries(torch.eye(2).to_sparse()).tolist()
    [1.0, 1.0]
    """
    if tensor.layout is torch.strided:
        return tensor
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()


def _rows_first(tensor: Tensor) -> bool:
    return tensor.is_contiguous()


def _channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


MEMORY_ORDERS = (_rows_first, _channels_last)
"""The layouts that weights have; both without gaps."""


def _flat(tensor: Tensor) -> Tensor | None:
    """Return a view of all elements as they lie in memory; None for another layout."""
    if _rows_first(tensor):
        return tensor.view(-1)
    return tensor.permute(0, 2, 3, 1).view(-1) if _channels_last(tensor) else None


def _careful(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
