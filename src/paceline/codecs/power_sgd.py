"""power-sgd: each matrix as the product of two thin ones, by one step of power iteration from where the last one ended.

    P = M Q                      M: a x b, the gradient of a tensor; Q: b x r, from the last time (at first random)
    P = orthonormal basis of P   a x r
    Q = M^T P                    b x r
    decoded: P Q^T               M, projected on the r directions

Gradients change slowly, so the iteration goes on from step to step, and on a matrix that does not change it converges
to the best approximation of rank r. (a + b) r numbers travel in place of a b. Tensors of fewer than two dimensions, and
those whose factors would not be smaller, travel as they are. It is biased: use it with error feedback.

In a payload:

    | header | (rows, columns) of each tensor, as uint32 | P, Q^T of the first tensor | P, Q^T of the second | ...

Without a table of shapes (no tensors) the vector is one matrix, as square as can be, padded with zeros.

Among ranks the factors are added up on their way. With M_i on rank i, and one Q that all of them hold:

    P = sum of M_i Q             a first all-reduce, with the tensors that travel as they are
    P = orthonormal basis of P   by every rank for itself
    Q = sum of Q_i               a second one; Q_i = M_i^T P
    total: P Q^T                 the sum of all M_i, projected on the r directions; of it P Q_i^T is rank i's part

Since parts add up to the total, a rank may hold back M_i - P Q_i^T, what is lost of its own matrix. Vogels et al. hold
back M_i - P Q^T / N on each rank, which has the same sum; but what a rank holds back then has parts of all the others',
so it means nothing without them, and it grows with how different their gradients are.

What follows from a payload, or from a sum, has the same bits on every processor (`low_rank`). Products with a rank's
own matrix are torch's: their last bits may differ between processors, and with the number of threads.

Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression", 2019. Ours: where a matrix has very large or very
small numbers it is scaled by a power of two before it is encoded, so that no product leaves float32; the scale goes
back into Q. Sums are not scaled, for ranks would have to agree on it: all ranks refuse one that leaves float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F

from paceline.codecs.low_rank import multiply, orthonormal, unit_rows
from paceline.codecs.payload import (
    HEADER_BYTES,
    Header,
    NotFiniteError,
    PayloadError,
    check_bytes,
    check_claim,
    flat_vector,
    open_payload,
    output_vector,
    refuse_not_finite,
)
from paceline.codecs.requests import Adding, AllReduce
from paceline.codecs.tensors import uniform

MOST_RANK = 2**16
MOST_TENSORS = 2**16
ENTRY_BYTES = 8
LARGEST = torch.finfo(torch.float32).max
_UNSCALED = 2.0**-20, 2.0**20  # within these, squares and long sums are far from the ends of float32
_SAFE = 0.9 * LARGEST  # below this, rounding cannot make a sum infinite
_SHARED = 0x504F5745  # the seed of what all ranks begin with


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """Sends each matrix as two factors of `rank` columns.

    It remembers the last Q of each matrix, so each sender needs a codec of its own, from `fresh`.

    >>> matrix = torch.outer(torch.arange(1.0, 7.0), torch.arange(1.0, 9.0))
    >>> codec = PowerSGD(rank=1).fresh([matrix.shape])
    >>> payload = codec.encode(matrix, torch.Generator().manual_seed(0))
    >>> payload.numel(), 4 * matrix.numel()
    (80, 192)
    >>> torch.allclose(codec.decode(payload), matrix.view(-1))
    True
    """

    NUMBER: ClassVar[int] = 6
    biased: ClassVar[bool] = True
    suits_parameters: ClassVar[bool] = False
    plans: ClassVar[tuple[str, ...]] = ("all-reduce", "gather")  # a shard is no matrix
    adds_exactly: ClassVar[bool] = True
    sum_steps: ClassVar[int] = 2

    rank: int = 4
    shapes: tuple[tuple[int, ...], ...] | None = field(default=None, repr=False)
    _last: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MOST_RANK:
            raise ValueError(f"rank must be between 1 and {MOST_RANK:,} (rank={self.rank})")
        if self.shapes is not None and len(self.shapes) > MOST_TENSORS:
            raise ValueError(f"shapes must be at most {MOST_TENSORS:,} (there are {len(self.shapes):,})")

    @property
    def fixed_size(self) -> bool:
        """Whether payloads of one length have one size: they do where the shapes are known."""
        return self.shapes is not None

    def encode(self, gradient: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return the factors. The generator (on the CPU) is asked only where there is no Q to go on from."""
        vector = flat_vector(gradient)
        matrices = self._matrices(vector.numel())
        table_bytes = ENTRY_BYTES * len(self.shapes or ())
        body_bytes = table_bytes + 4 * sum(matrix.floats for matrix in matrices)
        header = Header(codec=self.NUMBER, elements=vector.numel(), first=self.rank, second=len(self.shapes or ()))
        payload = header.payload(body_bytes, vector.device)
        body = payload[HEADER_BYTES:]
        if table_bytes:
            body[:table_bytes] = table_of(matrices, vector.device)
        last = {}
        parts = torch.split(body[table_bytes:].view(torch.float32), [matrix.floats for matrix in matrices])
        for index, (matrix, into) in enumerate(zip(matrices, parts, strict=True)):
            if matrix.factored:
                start = _starting(self._last.get(f"q{index}"), matrix, vector.device, generator)
                last[f"q{index}"] = _factor(matrix, vector, start, into)
            else:
                into.copy_(matrix.cut(vector))
                if not bool(torch.isfinite(into.sum())):
                    refuse_not_finite(vector)
        self._last.clear()
        self._last.update(last)
        return payload

    def decode(
        self, payload: torch.Tensor, *, expected_length: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the products, by the rank and the shapes in the payload, whatever this codec's own are."""
        header, body = open_payload(payload, self.NUMBER, expected_length, out)
        if not 1 <= header.first <= MOST_RANK:
            raise PayloadError(f"a rank is between 1 and {MOST_RANK:,} (this payload's is {header.first:,})")
        matrices = read_table(body, header.second, header.elements, header.first)
        table_bytes = ENTRY_BYTES * header.second
        check_bytes(body, table_bytes + 4 * sum(matrix.floats for matrix in matrices))
        check_claim(header.elements, expected_length, out)
        parts = torch.split(body[table_bytes:].view(torch.float32), [matrix.floats for matrix in matrices])
        for matrix, floats in zip(matrices, parts, strict=True):
            _check_floats(matrix, floats)
        vector = output_vector(header.elements, out, body.device)
        for matrix, floats in zip(matrices, parts, strict=True):
            _multiply(matrix, floats, matrix.cut(vector))
        return vector

    def add_up(
        self,
        vector: torch.Tensor,
        world: int,
        generator: torch.Generator | None = None,
        *,
        out: torch.Tensor | None = None,
        rest: torch.Tensor | None = None,
    ) -> Adding:
        """Add up the vectors of all ranks, projected on directions that all share. The vector must stay as it is.

        No generator is asked: where there is no Q to go on from, all ranks begin with the same one.
        """
        vector = flat_vector(vector)
        matrices = self._matrices(vector.numel())
        factored = [(number, matrix) for number, matrix in enumerate(matrices) if matrix.factored]
        full = [matrix.full(vector) for _, matrix in factored]
        plain = [matrix for matrix in matrices if not matrix.factored]

        sizes = [matrix.rows * matrix.rank for _, matrix in factored] + [matrix.elements for matrix in plain] + [world]
        first = torch.zeros(sum(sizes), dtype=torch.float32, device=vector.device)
        parts = torch.split(first, sizes)
        for (number, matrix), values, into in zip(factored, full, parts, strict=False):
            start = _shared_start(self._last.get(f"q{number}"), matrix, number, vector.device)
            torch.mm(values, start.T, out=into.view(matrix.rows, matrix.rank))
        for matrix, into in zip(plain, parts[len(factored) : -1], strict=True):
            into.copy_(matrix.cut(vector))
        if not bool(torch.isfinite(first).all()):  # a number of the vector that is not finite is in a product, too
            refuse_not_finite(vector)
        sums = torch.split((yield AllReduce(first)), sizes)
        _refuse_sums(sums[:-1])
        bases = [orthonormal(found.view(m.rows, m.rank)) for (_, m), found in zip(factored, sums, strict=False)]

        sizes = [matrix.rank * matrix.columns for _, matrix in factored]
        second = torch.empty(sum(sizes), dtype=torch.float32, device=vector.device)
        for values, basis, into in zip(full, bases, torch.split(second, sizes), strict=True):
            torch.mm(basis.T.contiguous(), values, out=into.view(basis.shape[1], -1))
        ours = second.clone() if rest is not None else None
        if factored:
            second = yield AllReduce(second)
        _refuse_sums([second])
        if rest is not None and ours is not None:
            _fill_rest([matrix for _, matrix in factored], full, bases, torch.split(ours, sizes), rest)
        into = output_vector(vector.numel(), out, vector.device)
        total = _joined(matrices, bases, second, sums[len(factored) : -1], into)
        if factored and not self.rank * second.abs().max().item() <= _SAFE:  # a basis has no number beyond 1
            _refuse_sums([total])
        self._last.clear()
        for (number, matrix), q in zip(factored, torch.split(second, sizes), strict=True):
            self._last[f"q{number}"] = unit_rows(q.view(matrix.rank, matrix.columns))
        return total

    def most_bytes(self, elements: int) -> int:
        """Return the exact size where the shapes are known; else the most that a vector takes, whatever its shapes are.

        >>> PowerSGD(rank=2).fresh([torch.Size([100, 50]), torch.Size([100])]).most_bytes(5100)
        1632
        """
        if self.shapes is not None:
            matrices = matrices_of(self.shapes, self.rank)
            if elements == sum(matrix.elements for matrix in matrices):
                return HEADER_BYTES + sum(ENTRY_BYTES + 4 * matrix.floats for matrix in matrices)
        return HEADER_BYTES + 4 * elements + ENTRY_BYTES * min(elements, MOST_TENSORS)

    def fresh(self, shapes: Sequence[torch.Size] | None = None) -> Self:
        """Return the same codec with no Q to go on from, for a vector that is made of tensors of these shapes."""
        known = self.shapes if shapes is None else tuple(tuple(shape) for shape in shapes if math.prod(shape))
        return type(self)(rank=self.rank, shapes=known)

    def state_dict(self) -> dict[str, Any]:
        """Return the last Q^T of each matrix, by its number."""
        return {name: q.clone() for name, q in self._last.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`. If it does not fit, nothing changes."""
        matrices = None if self.shapes is None else matrices_of(self.shapes, self.rank)
        for name, q in state.items():
            _check_remembered(name, q, self.rank, matrices)
        self._last.clear()
        self._last.update({name: q.clone() for name, q in state.items()})

    def _matrices(self, elements: int) -> list[Matrix]:
        if self.shapes is None:
            return [near_square(elements, self.rank)]
        matrices = matrices_of(self.shapes, self.rank)
        total = sum(matrix.elements for matrix in matrices)
        if total != elements:
            raise ValueError(f"the shapes have {total:,} elements and the gradient has {elements:,}")
        return matrices


# -- the vector as matrices -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Matrix:
    """One tensor of the vector: `elements` of it from element `start` on; the rest of the matrix is zero.

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
        """Return its elements of a vector."""
        return vector[self.start : self.start + self.elements]

    def full(self, vector: torch.Tensor) -> torch.Tensor:
        """Return it as a matrix: of the vector's memory, unless zeros fill it up."""
        values, padding = self.cut(vector), self.rows * self.columns - self.elements
        return (F.pad(values, (0, padding)) if padding else values).view(self.rows, self.columns)


def matrices_of(shapes: Iterable[Sequence[int]], rank: int) -> list[Matrix]:
    """Return the matrices of tensors of these shapes, which lie one after the other.

    >>> [(matrix.start, matrix.factored) for matrix in matrices_of([(10,), (64, 4, 25)], rank=4)]
    [(0, False), (10, True)]
    """
    matrices, start = [], 0
    for rows, columns in map(pair_of, shapes):
        matrices.append(Matrix(rows, columns, start, rows * columns, min(rank, rows, columns)))
        start += rows * columns
    return matrices


def near_square(elements: int, rank: int) -> Matrix:
    """Return a vector as one matrix.

    >>> matrix = near_square(10, rank=1)
    >>> matrix.rows, matrix.columns
    (4, 3)
    """
    rows = math.isqrt(elements - 1) + 1 if elements else 0
    columns = -(-elements // max(1, rows))
    return Matrix(rows, columns, 0, elements, min(rank, rows, columns))


def pair_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return a tensor's shape as that of a matrix: the first dimension, and all others.

    >>> pair_of((64, 3, 7, 7)), pair_of((64,)), pair_of(())
    ((64, 147), (64, 1), (1, 1))
    """
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def table_of(matrices: Sequence[Matrix], device: torch.device) -> torch.Tensor:
    """Return the bytes of a table of shapes.

    >>> table_of(matrices_of([(3, 2, 2)], rank=1), torch.device("cpu"))
    tensor([3, 0, 0, 0, 4, 0, 0, 0], dtype=torch.uint8)
    """
    pairs = torch.tensor([(matrix.rows, matrix.columns) for matrix in matrices], dtype=torch.int64).view(-1)
    return pairs.to(torch.int32).view(torch.uint8).to(device)  # beyond 2**31 it wraps, to the bits of uint32


def read_table(body: torch.Tensor, tensors: int, elements: int, rank: int) -> list[Matrix]:
    """Return the matrices of a payload's table, if they make up just so many elements.

    >>> table = table_of(matrices_of([(3, 2, 2)], rank=1), torch.device("cpu"))
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
    matrices = matrices_of(numbers.view(-1, 2).tolist(), rank)
    total = sum(matrix.elements for matrix in matrices)
    if total != elements:
        raise PayloadError(f"the tensors of the payload have {total:,} elements (its header says {elements:,})")
    return matrices


# -- one matrix -----------------------------------------------------------------------------------------------------


def _starting(
    last: torch.Tensor | None, matrix: Matrix, device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    """Return the Q^T to begin with; one of another size is of another vector, and is not used."""
    if last is None or last.shape != (matrix.rank, matrix.columns):
        last = torch.randn(matrix.rank, matrix.columns, generator=generator, dtype=torch.float32, device="cpu")
    return last.to(device)


def _shared_start(last: torch.Tensor | None, matrix: Matrix, number: int, device: torch.device) -> torch.Tensor:
    """Return the Q^T that all ranks begin with: it depends on the matrix's number alone, on every machine."""
    if last is None or last.shape != (matrix.rank, matrix.columns):
        return uniform(matrix.rank * matrix.columns, number, _SHARED, device).sub_(0.5).view(matrix.rank, -1)
    return last.to(device)


def _refuse_sums(sums: Iterable[torch.Tensor]) -> None:
    """Raise if a sum over all ranks is not finite: all have the same, so all raise."""
    for found in sums:
        if not bool(torch.isfinite(found.sum())) and not bool(torch.isfinite(found).all()):
            raise NotFiniteError("the sum of all ranks' gradients is beyond float32; clip it, and skip this step")


def _joined(
    matrices: Sequence[Matrix],
    bases: Sequence[torch.Tensor],
    factors: torch.Tensor,
    plain: Sequence[torch.Tensor],
    vector: torch.Tensor,
) -> torch.Tensor:
    """Fill in a vector from the bases of its factored matrices, all their Q^T, and its other tensors."""
    left, others, at = iter(bases), iter(plain), 0
    for matrix in matrices:
        if matrix.factored:
            size = matrix.rank * matrix.columns
            multiply(next(left), factors[at : at + size].view(matrix.rank, matrix.columns), matrix.cut(vector))
            at += size
        else:
            matrix.cut(vector).copy_(next(others))
    return vector


def _fill_rest(
    factored: Sequence[Matrix],
    full: Sequence[torch.Tensor],
    bases: Sequence[torch.Tensor],
    factors: Sequence[torch.Tensor],
    rest: torch.Tensor,
) -> None:
    """Fill in what of a vector its factored matrices lose; of its other tensors nothing is lost."""
    at = 0
    for matrix, values, basis, q in zip(factored, full, bases, factors, strict=True):
        rest[at : matrix.start] = 0
        at = matrix.start + matrix.elements
        q = q.view(matrix.rank, matrix.columns)
        if matrix.elements == values.numel():
            torch.addmm(values, basis, q, alpha=-1, out=matrix.cut(rest).view_as(values))
        else:  # zeros fill up the matrix
            matrix.cut(rest).copy_(torch.addmm(values, basis, q, alpha=-1).view(-1)[: matrix.elements])
    rest[at:] = 0


def _factor(matrix: Matrix, vector: torch.Tensor, start: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Fill in P and Q; return the Q^T to go on from, in rows of length 1: its products stay in range."""
    values = matrix.cut(vector)
    low, high = torch.stack(torch.aminmax(values)).tolist()
    largest = max(-low, high)
    if not largest <= LARGEST:  # NaN is not
        refuse_not_finite(vector)
    exponent = 0 if _UNSCALED[0] <= largest <= _UNSCALED[1] else math.frexp(largest)[1]
    if exponent:
        half = exponent // 2  # in two steps: 2**149 is beyond float32
        values = values * 2.0**-half * 2.0 ** (half - exponent)
    full = replace(matrix, start=0).full(values)
    basis = torch.linalg.qr(full @ start.T).Q  # where M has a lower rank, the basis is completed: no division by zero
    found = basis.T.contiguous() @ full
    p, q = _parts(matrix, into)
    p.copy_(basis)
    q.copy_(_scaled_back(found, exponent, (LARGEST - largest) / (2 * matrix.rank)))
    return F.normalize(found, dim=1)


def _scaled_back(found: torch.Tensor, exponent: int, most: float) -> torch.Tensor:
    """Return Q^T at the size of the gradient, or as large as it may be: P Q^T and M - P Q^T must be in float32."""
    if not exponent:
        return found
    scale, largest = 2.0**exponent, found.abs().max().item()
    if scale * largest > most:
        scale = most / largest
    return found.to(torch.float64) * scale


def _parts(matrix: Matrix, floats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return P and Q^T of a factored matrix: in rows, as products are fastest."""
    split = matrix.rows * matrix.rank
    return floats[:split].view(matrix.rows, matrix.rank), floats[split:].view(matrix.rank, matrix.columns)


def _check_floats(matrix: Matrix, floats: torch.Tensor) -> None:
    """Raise if the floats would not decode to finite numbers, before anything is decoded."""
    if not matrix.factored:
        if not bool(torch.isfinite(floats).all()):
            raise PayloadError("the payload's numbers must be finite")
        return
    p, q = (part.abs().max().item() for part in _parts(matrix, floats))
    if not matrix.rank * p * q <= _SAFE:  # NaN is not, and inf * 0 is NaN
        raise PayloadError(f"the product of the factors would be beyond float32 (factors up to {p} and {q})")


def _multiply(matrix: Matrix, floats: torch.Tensor, into: torch.Tensor) -> None:
    if not matrix.factored:
        into.copy_(floats)
        return
    p, q = _parts(matrix, floats)
    multiply(p, q, into)


def _check_remembered(name: str, q: Any, rank: int, matrices: list[Matrix] | None) -> None:
    number = name.removeprefix("q")
    if name == number or not number.isdecimal():
        raise ValueError(f"PowerSGD remembers q0, q1, ... (this state has {name!r})")
    if not isinstance(q, torch.Tensor) or q.dtype is not torch.float32 or q.dim() != 2 or q.shape[0] > rank:
        raise ValueError(f"{name} must be a float32 matrix of at most {rank} rows, the rank")
    if not bool(torch.isfinite(q).all()):
        raise ValueError(f"{name} must be finite")
    if matrices is None:
        return
    fits = int(number) < len(matrices) and matrices[int(number)].factored
    if not fits or q.shape != (matrices[int(number)].rank, matrices[int(number)].columns):
        raise ValueError(f"no matrix of these shapes has this {name}, of {q.shape[0]} x {q.shape[1]}")
