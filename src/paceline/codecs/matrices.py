"""A flat vector as the matrices it is made of, and how their factors lie in a payload.

    | header | (rows, columns) of each tensor, as uint32 | P, Q^T of the first tensor | P, Q^T of the second | ...

A tensor whose factors would not be smaller than itself lies there as it is. Without a table (no tensors) the vector is
one matrix, as square as can be, padded with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from paceline.codecs.payload import PayloadError

MOST_TENSORS = 2**16
ENTRY_BYTES = 8


@dataclass(frozen=True, slots=True)
class Matrix:
    """One tensor of the vector: from element `start` on, `elements` of them, the rest of the matrix is zero.

    >>> Matrix(rows=64, columns=100, start=0, elements=6400, rank=4).floats
    656
    """

    rows: int
    columns: int
    start: int
    elements: int
    rank: int

    @property
    def factored(self) -> bool:
        """Whether its factors are smaller than itself."""
        return self.rank * (self.rows + self.columns) < self.elements

    @property
    def floats(self) -> int:
        """How many float32 of it travel."""
        return self.rank * (self.rows + self.columns) if self.factored else self.elements

    def cut(self, vector: torch.Tensor) -> torch.Tensor:
        """Its elements in a vector."""
        return vector[self.start : self.start + self.elements]


def laid_out(shapes: Iterable[Sequence[int]], rank: int) -> list[Matrix]:
    """Tensors of these shapes, one after the other.

    >>> [(matrix.start, matrix.factored) for matrix in laid_out([(10,), (64, 4, 25)], rank=4)]
    [(0, False), (10, True)]
    """
    matrices, start = [], 0
    for rows, columns in map(pair_of, shapes):
        matrices.append(Matrix(rows, columns, start, rows * columns, min(rank, rows, columns)))
        start += rows * columns
    return matrices


def near_square(elements: int, rank: int) -> Matrix:
    """A vector as one matrix.

    >>> matrix = near_square(10, rank=1)
    >>> matrix.rows, matrix.columns
    (4, 3)
    """
    rows = math.isqrt(elements - 1) + 1 if elements else 0
    columns = -(-elements // max(1, rows))
    return Matrix(rows, columns, 0, elements, min(rank, rows, columns))


def pair_of(shape: Sequence[int]) -> tuple[int, int]:
    """A tensor's shape as that of a matrix: the first dimension, and all others.

    >>> pair_of((64, 3, 7, 7)), pair_of((64,)), pair_of(())
    ((64, 147), (64, 1), (1, 1))
    """
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def table_of(matrices: Sequence[Matrix], device: torch.device) -> torch.Tensor:
    """The bytes of a table of shapes.

    >>> table_of(laid_out([(3, 2, 2)], rank=1), torch.device("cpu"))
    tensor([3, 0, 0, 0, 4, 0, 0, 0], dtype=torch.uint8)
    """
    pairs = torch.tensor([(matrix.rows, matrix.columns) for matrix in matrices], dtype=torch.int64).view(-1)
    return pairs.to(torch.int32).view(torch.uint8).to(device)  # beyond 2**31 it wraps, to the bits of uint32


def read_table(body: torch.Tensor, tensors: int, elements: int, rank: int) -> list[Matrix]:
    """The matrices that a payload's table says, if they make up just so many elements.

    >>> table = table_of(laid_out([(3, 2, 2)], rank=1), torch.device("cpu"))
    >>> read_table(table, tensors=1, elements=12, rank=1)
    [Matrix(rows=3, columns=4, start=0, elements=12, rank=1)]
    >>> read_table(table, tensors=1, elements=13, rank=1)
    Traceback (most recent call last):
    paceline.codecs.payload.PayloadError: the tensors of the payload have 12 elements (its header says 13)
    """
    if not tensors:
        return [near_square(elements, rank)]
    if tensors > MOST_TENSORS or body.numel() < ENTRY_BYTES * tensors:
        raise PayloadError(
            f"a table has at most {MOST_TENSORS:,} tensors, of {ENTRY_BYTES} bytes each "
            f"(this payload says {tensors:,}, in {body.numel():,} bytes)"
        )
    numbers = body[: ENTRY_BYTES * tensors].view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    matrices = laid_out(numbers.view(-1, 2).tolist(), rank)
    total = sum(matrix.elements for matrix in matrices)
    if total != elements:
        raise PayloadError(f"the tensors of the payload have {total:,} elements (its header says {elements:,})")
    return matrices
