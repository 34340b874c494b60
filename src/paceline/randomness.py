"""Random numbers that depend on the seed and the place alone.

Nothing here has a state. A draw is a hash of (seed, names and numbers that say where it is used), so a
worker's draws do not change when workers are added, a million draws are one numpy expression, and any
draw can be made again without making those before it.

The hash is the finaliser of splitmix64 (Steele, Lea and Flood 2014), applied once per word of the place.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_TO_UNIT = 2.0**-53


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


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return np.asarray(state ^ (state >> np.uint64(31)), dtype=np.uint64)
