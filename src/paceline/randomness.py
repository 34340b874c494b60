"""Random numbers that depend on the seed and the place alone.

Nothing here has a state. A draw is a hash of (seed, names and numbers that say where it is used), so a
worker's draws do not change when workers are added, a million draws are one numpy expression, and any
draw can be made again without making those before it.

The hash is the finaliser of splitmix64 (Steele, Lea and Flood 2014), applied once per word of the place.

What is promised: a draw has the same bits for one place and among a million, in an array of any shape, and on every
machine with IEEE arithmetic. The C library's and numpy's logarithm and power do not keep that promise (with AVX-512
numpy's `**` of an array and of a number differ in the last bit), so `log` and `exp` here are made of operations that
IEEE 754 rounds exactly: + - * / and shifts of the exponent, one numpy call each, so that no compiler fuses two of them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_TO_UNIT = 2.0**-53
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # 32 bits of ln 2: times any exponent it is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")  # the rest of it
_HALF_ROOT = float.fromhex("0x1.6a09e667f3bcdp-1")  # sqrt(1/2)


def seed_for(seed: int, *place: int | str) -> int:
    """A 63-bit seed for one place in a run, for generators that carry a state.

    >>> seed_for(0, "batches", 3) == seed_for(0, "batches", 3)
    True
    >>> seed_for(0, "batches", 3) == seed_for(0, "batches", 4)
    False
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (seed, *place))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def torch_generator(seed: int, *place: int | str) -> torch.Generator:
    """A torch generator (CPU) for one place in a run.

    >>> torch_generator(0, "model").initial_seed() == seed_for(0, "model")
    True
    """
    import torch

    return torch.Generator().manual_seed(seed_for(seed, *place))


@contextmanager
def seeded(seed: int, *place: int | str) -> Iterator[None]:
    """Let code that is not ours draw from torch's, numpy's and Python's generators, and leave these as they were.

    Of torch's, the CPU's alone: `torch.manual_seed` would seed those of GPUs as well.

    >>> with seeded(3, "model"):
    ...     first = random.random(), np.random.rand()
    >>> with seeded(3, "model"):
    ...     print(first == (random.random(), np.random.rand()))
    True
    """
    import torch

    value, pythons, numpys = seed_for(seed, *place), random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(value)
        random.seed(value)
        np.random.seed(value % 2**32)
        try:
            yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)


def uniform(seed: int, *place: int | NDArray[np.integer]) -> NDArray[np.float64]:
    """Numbers in [0, 1), one for each place; integer arrays among the places broadcast.

    >>> few, many = uniform(7, np.arange(3), 5), uniform(7, np.arange(1000), 5)
    >>> bool((few == many[:3]).all())
    True
    """
    shape = np.broadcast_shapes(*(np.shape(part) for part in place))
    state = np.full(shape, np.uint64(seed & 0xFFFFFFFFFFFFFFFF))
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        state = _mix(state + _GOLDEN)
        for part in place:
            words = np.asarray(part).astype(np.uint64)
            state = _mix((state ^ words) + _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * _TO_UNIT


def exponential(seed: int, *place: int | NDArray[np.integer]) -> NDArray[np.float64]:
    """Exponentially distributed numbers of mean 1, one for each place as for `uniform`.

    >>> bool(exponential(7, np.arange(1000)).min() >= 0)
    True
    """
    return -log(1.0 - uniform(seed, *place))


def pareto(seed: int, *place: int | NDArray[np.integer], shape: float) -> NDArray[np.float64]:
    """Pareto distributed numbers of at least 1, whose tail falls like x^-shape; one for each place as for `uniform`.

    >>> bool(pareto(7, np.arange(1000), shape=2.5).min() >= 1)
    True
    """
    return exp(exponential(seed, *place) / shape)


def log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the natural logarithm of positive numbers: the same bits on every machine, within 3 units of the last.

    With x = 2^k m and sqrt(1/2) <= m < sqrt(2), ln x = k ln 2 + 2 atanh(s) where s = (m - 1) / (m + 1); the series of
    atanh, s + s^3/3 + s^5/5 + ..., is exhausted after eleven terms.

    >>> log(np.array([1.0, 2.0, 10.0])).tolist()
    [0.0, 0.6931471805599453, 2.302585092994046]
    """
    mantissa, exponent = np.frexp(values)
    small = mantissa < _HALF_ROOT
    mantissa, exponent = np.where(small, 2.0 * mantissa, mantissa), exponent - small
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.full_like(square, 1 / 21)
    for odd in range(19, 0, -2):
        series *= square
        series += 1 / odd
    return np.asarray(exponent * _LN2_HIGH + (2.0 * s * series + exponent * _LN2_LOW))


def exp(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return e to the power of the values: the same bits on every machine, within 3 units of the last.

    With x = k ln 2 + r and |r| <= ln(2) / 2, e^x = 2^k e^r; the series 1 + r (1 + r/2 (1 + r/3 (...))) is exhausted
    after fourteen terms.

    >>> exp(np.array([0.0, -1.0])).tolist()
    [1.0, 0.36787944117144233]
    """
    exponent = np.rint(np.asarray(values) / (_LN2_HIGH + _LN2_LOW))
    rest = (values - exponent * _LN2_HIGH) - exponent * _LN2_LOW
    series = np.ones_like(rest)
    for term in range(13, 0, -1):
        series *= rest / term
        series += 1.0
    return np.asarray(np.ldexp(series, exponent.astype(np.int32)))


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return np.asarray(state ^ (state >> np.uint64(31)), dtype=np.uint64)
