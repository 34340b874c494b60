"""Thin matrices with the same bits on every processor: products, orthonormal bases, rows of length 1.

torch's matrix products add up in an order that depends on the processor and on the number of threads. Ranks that
compute the same product from the same numbers would differ in the last bits, and replicas would drift apart in silence.
Here every operation is one of IEEE arithmetic, rounded for itself (no fused multiply-add), in an order that is fixed:

    product    out[i, j] = p[i, 0] q[0, j] + p[i, 1] q[1, j] + ...           in float32, from left to right
    dot        64 lanes, each from top to bottom, then folded in halves      in float64, of numbers that were float32
    basis      Gram-Schmidt, each column against those before it, twice      in float64: no product leaves its range

Twice is enough for columns that are orthogonal to the last digits (Giraud, Langou and Rozloznik, 2005). A column that
is spanned by those before it, or is zero, has nothing left: the unit vector that these span least takes its place.

A product of up to 4 columns takes as long as torch's or less (512 x 4,608: 0.55 ms and 0.67), one of 16 twice as long.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paceline.codecs.machine_code import call, in_threads, kernel

# numba looks only at a kernel's own file to see whether it must compile again: so sums in lanes are here once more.
LANES = 64
TILE = 2048  # columns: those of four rows of Q^T stay in the processor's nearest cache
NOTHING_LEFT = 1e-12  # of a column's length; float64 has 16 digits

Array = Any  # numpy's, as numba sees it


def multiply(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fill in as many elements of the product of two float32 matrices as the flat `out` has, row by row.

    >>> multiply(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0]]), torch.empty(3))
    tensor([3., 4., 6.])
    """
    rows, columns = -(-out.numel() // q.shape[1]), q.shape[1]
    if out.device.type == "cpu":
        in_threads(product_rows, rows, columns, p.contiguous().numpy(), q.contiguous().numpy(), out.numpy())
        return out
    return out.copy_(product_by_torch(p, q).view(-1)[: out.numel()])


def orthonormal(p: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of a float32 matrix's columns, of which there are no more than rows; it is finite.

    >>> orthonormal(torch.tensor([[3.0, 3.0], [4.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.0000],
            [0.8000, 0.0000],
            [0.0000, 1.0000]])
    """
    columns = p.T.to("cpu", torch.float64, copy=True).contiguous()
    call(orthonormalise, columns.numpy())
    return columns.T.to(p.device, torch.float32).contiguous()


def unit_rows(q: torch.Tensor) -> torch.Tensor:
    """Return a float32 matrix with every row at length 1; rows of zeros stay.

    >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    rows = q.to("cpu", torch.float64, copy=True).contiguous()
    call(normalise, rows.numpy())
    return rows.to(q.device, torch.float32)


def product_by_torch(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return a product in torch's operations, each of which rounds for itself: the kernel's bits, on any device."""
    product = p[:, :1] * q[:1]
    for index in range(1, q.shape[0]):
        product += p[:, index : index + 1] * q[index : index + 1]
    return product


@kernel
def product_rows(first: int, last: int, p: Array, q: Array, out: Array) -> None:
    """Fill in rows `first` .. `last` of the product, as far as `out` goes: four columns of p at a time."""
    rank, columns = q.shape
    for left in range(0, columns, TILE):
        for row in range(first, last):
            end = min(row * columns + min(left + TILE, columns), out.size)
            into = out[row * columns + left : max(end, row * columns + left)]
            width = into.size
            right = left + width
            if rank < 4:
                a, along = p[row, 0], q[0, left:right]
                for column in range(width):
                    into[column] = a * along[column]
                done = 1
            else:
                a, b, c, d = p[row, 0], p[row, 1], p[row, 2], p[row, 3]
                along, below, third, fourth = q[0, left:right], q[1, left:right], q[2, left:right], q[3, left:right]
                for column in range(width):
                    into[column] = a * along[column] + b * below[column] + c * third[column] + d * fourth[column]
                done = 4
            while done + 4 <= rank:
                a, b, c, d = p[row, done], p[row, done + 1], p[row, done + 2], p[row, done + 3]
                along, below = q[done, left:right], q[done + 1, left:right]
                third, fourth = q[done + 2, left:right], q[done + 3, left:right]
                for column in range(width):
                    into[column] = (
                        into[column] + a * along[column] + b * below[column] + c * third[column] + d * fourth[column]
                    )
                done += 4
            while done < rank:
                a, along = p[row, done], q[done, left:right]
                for column in range(width):
                    into[column] += a * along[column]
                done += 1


@kernel
def dot(one: Array, other: Array, lanes: Array) -> Any:
    """Return the sum of products of two float64 vectors."""
    rows = one.size // LANES
    lanes[:] = 0.0
    for row in range(rows):
        left, right = one[row * LANES : (row + 1) * LANES], other[row * LANES : (row + 1) * LANES]
        for lane in range(LANES):
            lanes[lane] += left[lane] * right[lane]
    left, right = one[rows * LANES :], other[rows * LANES :]
    for lane in range(left.size):
        lanes[lane] += left[lane] * right[lane]
    width = LANES // 2
    while width:
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
        width //= 2
    return lanes[0]


@kernel
def project_out(vectors: Array, number: int, lanes: Array) -> Any:
    """Take from vector `number` what those before it span, twice; return its length."""
    vector = vectors[number]
    for _ in range(2):
        for before in range(number):
            along = vectors[before]
            part = dot(along, vector, lanes)
            for place in range(vector.size):
                vector[place] -= part * along[place]
    return np.sqrt(dot(vector, vector, lanes))


@kernel
def orthonormalise(vectors: Array) -> None:
    """Make the rows orthonormal, in place."""
    lanes = np.empty(LANES, np.float64)
    for number in range(vectors.shape[0]):
        vector = vectors[number]
        before = np.sqrt(dot(vector, vector, lanes))
        length = project_out(vectors, number, lanes)
        if not length > NOTHING_LEFT * before:
            place, least = 0, np.inf
            for each in range(vector.size):
                spanned = 0.0
                for earlier in range(number):
                    spanned += vectors[earlier, each] * vectors[earlier, each]
                if spanned < least:
                    place, least = each, spanned
            vector[:] = 0.0
            vector[place] = 1.0
            length = project_out(vectors, number, lanes)
        for each in range(vector.size):
            vector[each] /= length


@kernel
def normalise(vectors: Array) -> None:
    """Bring every row to length 1, in place, but for rows of zeros."""
    lanes = np.empty(LANES, np.float64)
    for number in range(vectors.shape[0]):
        vector = vectors[number]
        length = np.sqrt(dot(vector, vector, lanes))
        if length > 0.0:
            for place in range(vector.size):
                vector[place] /= length
