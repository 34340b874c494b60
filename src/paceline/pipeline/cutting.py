"""The exact cut of a row of blocks into pieces, by dynamic programming.

Let cost(p, i, j) be what piece p costs as the run from position i to position j, infinite where it must not be. From
the back to the front,

    best(p, i) = the least, over all j > i, of max(cost(p, i, j), best(p + 1, j))

is the least possible worst piece of all ways to cut what lies behind position i into the pieces p, p + 1, ...; so
best(0, 0) is the optimum (pieces in a row: Bellman's recursion, as PipeDream uses it, with costs that differ by piece).
Nothing is assumed of the costs, which therefore may hold transfers, devices that differ, and memory that is full.

Among all cuts as good, the one that crosses the fewest bytes is found by the same recursion with a sum for the maximum,
over the runs that cost no more than the optimum; and of those the first in order by walking from the front.

Both take n²k/2 entries of cost, computed some rows at a time: about a second for 1,000 blocks and 64 pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.pipeline.blocks import Real, Whole

ROWS = 128  # a strip of so many rows and 1,000 columns stays in the cache
NONE = np.iinfo(np.int64).max // 4  # bytes of a cut that does not exist; sums of two do not overflow


# cost(piece, first, last): of the runs from positions `first` (rows) to positions `last` (columns), as a new array.
# Entries with last <= first are no runs, and may hold anything.
Cost: TypeAlias = Callable[[int, slice, slice], Real]


def least_worst(cost: Cost, blocks: int, pieces: int) -> float:
    """The cost of the worst piece of the best cut; infinite if there is no cut.

    >>> sizes = np.array([0.0, 3.0, 4.0, 6.0])  # running sum of blocks of 3, 1 and 2
    >>> least_worst(lambda piece, first, last: sizes[None, last] - sizes[first, None], blocks=3, pieces=2)
    3.0
    """
    best = np.full(blocks + 1, np.inf)
    best[blocks] = -np.inf
    for piece in reversed(range(pieces)):
        nearer = np.full(blocks + 1, np.inf)
        for first, last in _strips(piece, blocks, pieces):
            worst = np.maximum(cost(piece, first, last), best[last])
            worst[_not_runs(worst.shape)] = np.inf
            nearer[first] = worst.min(axis=1)
        best = nearer
    return float(best[0])


def fewest_bytes(cost: Cost, most: float, crossing: Whole, pieces: int) -> tuple[int, ...]:
    """Positions of the cut that crosses the fewest bytes, of those without a piece that costs more than `most`.

    >>> sizes = np.array([0.0, 3.0, 4.0, 6.0])
    >>> fewest_bytes(lambda piece, first, last: sizes[None, last] - sizes[first, None], 4.0, np.array([0, 9, 5, 0]), 2)
    (2,)
    """
    blocks = len(crossing) - 1
    # Row p: the fewest bytes from a position on, with piece p beginning there, and what crosses at that position.
    behind = np.full((pieces + 1, blocks + 1), NONE)
    behind[pieces, blocks] = 0
    for piece in reversed(range(pieces)):
        for first, last in _strips(piece, blocks, pieces):
            allowed = cost(piece, first, last) <= most
            allowed[_not_runs(allowed.shape)] = False
            fewest = np.where(allowed, behind[piece + 1, last], NONE).min(axis=1)
            behind[piece, first] = np.minimum(fewest + crossing[first], NONE)
    cuts, at = [], 0
    for piece in range(pieces - 1):
        run = cost(piece, slice(at, at + 1), slice(at + 1, blocks + 1))[0] <= most
        ahead = np.where(run, behind[piece + 1, at + 1 :], NONE)
        at += 1 + int(ahead.argmin())
        cuts.append(at)
    return tuple(cuts)


def least_sum(cost: Cost, blocks: int, pieces: int) -> tuple[int, ...]:
    """Positions of the cut whose pieces cost least in sum; all costs must be finite.

    >>> sizes = np.array([0.0, 3.0, 4.0, 6.0])
    >>> least_sum(lambda piece, first, last: (sizes[None, last] - sizes[first, None]) * (1 + piece), blocks=3, pieces=2)
    (2,)
    """
    best = np.full(blocks + 1, np.inf)
    best[blocks] = 0.0
    ends = np.zeros((pieces, blocks + 1), np.int64)
    for piece in reversed(range(pieces)):
        nearer = np.full(blocks + 1, np.inf)
        for first, last in _strips(piece, blocks, pieces):
            total = cost(piece, first, last) + best[last]
            total[_not_runs(total.shape)] = np.inf
            ends[piece, first] = last.start + total.argmin(axis=1)
            nearer[first] = total.min(axis=1)
        best = nearer
    cuts, at = [], 0
    for piece in range(pieces - 1):
        at = int(ends[piece, at])
        cuts.append(at)
    return tuple(cuts)


def _strips(piece: int, blocks: int, pieces: int) -> Iterator[tuple[slice, slice]]:
    """Where a piece may begin and end, when each piece before and behind it has a block, some rows at a time."""
    spare = blocks - pieces
    ends = slice(blocks, blocks + 1) if piece == pieces - 1 else None
    for start in range(piece, piece + 1 if piece == 0 else piece + spare + 1, ROWS):
        rows = slice(start, 1 if piece == 0 else min(start + ROWS, piece + spare + 1))
        yield rows, ends or slice(start + 1, piece + spare + 2)


def _not_runs(shape: tuple[int, ...]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The entries of a strip whose last position is not behind their first: a corner below the diagonal.

    A single column ends at the end of the model, and all its rows begin before that.
    """
    return _corner(1 if shape[1] == 1 else min(shape))


@functools.cache
def _corner(side: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    return np.tril_indices(side, -1)
