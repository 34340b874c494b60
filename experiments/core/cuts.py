"""Cuts of a model as others make them, beside which ours is measured.

equal_counts    as many layers in every piece, which is what people do by hand
balanced        the block partition of Bárány and Grinberg ("Block partitions of sequences", 2015), by which
                torchgpipe balances layers by their measured time
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence


def equal_counts(layers: int, pieces: int, bound: Collection[int] = ()) -> tuple[int, ...]:
    """Return cuts that give every piece as many layers; where a cut is bound, the nearest that is not.

    >>> equal_counts(10, 4), equal_counts(10, 2, bound={5})
    ((2, 5, 8), (4,))
    """
    free = [cut for cut in range(1, layers) if cut not in bound]
    if len(free) < pieces - 1:
        raise ValueError(f"pieces must be between 1 and the possible cuts + 1 (pieces={pieces}, cuts={len(free)})")
    cuts: list[int] = []
    for piece in range(1, pieces):
        still_to_come = pieces - 1 - piece
        choice = [cut for cut in free[: len(free) - still_to_come] if cut > max(cuts, default=0)]
        cuts.append(min(choice, key=lambda cut: abs(cut - round(piece * layers / pieces))))
    return tuple(cuts)


def block_partition(costs: Sequence[int], pieces: int) -> tuple[int, ...]:
    """Return cuts whose sums differ by no more than the largest cost.

    Begin with any cut. While the largest sum exceeds the smallest by more than the largest cost: of the smallest blocks
    take the one nearest to the largest block, and move into it the neighbouring element on the side of the largest.
    The largest block is chosen anew when it has given an element away, and else stays the one.

    torchgpipe differs in three things: it subtracts the smallest cost from all first, so that equal layers weigh
    nothing; it begins with what is left over in the last piece; and of the smallest blocks it takes the first. Here the
    method is as its authors state it.

    >>> block_partition([5, 5, 4, 1, 1, 1], 2)
    (2,)
    """
    if min(costs) <= 0:
        raise ValueError(f"costs must be above 0 (the smallest is {min(costs)})")
    ends = [0, *equal_counts(len(costs), pieces), len(costs)]
    largest = None
    while True:
        sums = [sum(costs[begin:end]) for begin, end in itertools.pairwise(ends)]
        if largest is None:
            largest = sums.index(max(sums))
        if sums[largest] <= min(sums) + max(costs):
            return tuple(ends[1:-1])
        _, smallest = min((abs(block - largest), block) for block in range(pieces) if sums[block] == min(sums))
        if largest < smallest:
            giver = smallest - 1
            ends[smallest] -= 1
        else:
            giver = smallest + 1
            ends[giver] += 1
        if giver == largest:
            largest = None


def balanced(seconds: Sequence[float], pieces: int, bound: Collection[int] = ()) -> tuple[int, ...]:
    """Return the block partition of layers by their whole microseconds; layers that no cut may part go together.

    >>> balanced([0.001, 0.001, 0.004, 0.001, 0.001, 0.001], 2)
    (3,)
    """
    begins = [at for at in range(len(seconds)) if at == 0 or at not in bound]
    costs = [
        max(1, int(1e6 * sum(seconds[begin:end])))
        for begin, end in zip(begins, [*begins[1:], len(seconds)], strict=True)
    ]
    return tuple(begins[cut] for cut in block_partition(costs, pieces))
