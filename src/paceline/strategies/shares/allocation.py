"""The whole numbers of samples that make the slowest rank as quick as possible.

    minimise    max over i of  fixed_i + sample_i * b_i        with  sum b_i = B,  least_i <= b_i <= most_i

Think of the ranks as vessels: rank i is filled to the height of its time, and a sample raises it by sample_i. All are
filled to one water level, as far as they go, and what is left over is added one by one, each time to the vessel that
stands lowest with it:

    level  - - - - - - - - - - - - - - -
           ##   ##        ##
           ##   ##   ##   ##      ##    a sample of a slow rank
           ##   ##        ##      ..    its fixed part
           ..   ..   ..   ..
           r0   r1   r2   r3            r2 is slow: 1 sample where the others have 3

That is exact: to add samples one by one from nothing, each where the time with it is smallest, gives the least maximum
(a smaller one would have to take a sample from every rank that stands above it, and has nowhere to put them), and all
that is below the level is added first in that order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The seconds that a rank takes for a batch: a fixed part, and so many for each sample.

    >>> Cost(fixed_seconds=0.5, sample_seconds=0.25).seconds(6)
    2.0
    """

    sample_seconds: float
    fixed_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.sample_seconds < math.inf and 0 <= self.fixed_seconds < math.inf):
            raise ValueError(
                "sample_seconds must be above 0, fixed_seconds 0 or more, both finite "
                f"(sample_seconds={self.sample_seconds}, fixed_seconds={self.fixed_seconds})"
            )

    def seconds(self, samples: int) -> float:
        """Return how long a batch of so many samples takes."""
        return self.fixed_seconds + self.sample_seconds * samples


def divide(
    samples: int,
    costs: Sequence[Cost],
    *,
    least: Sequence[int] | int = 1,
    most: Sequence[int | None] | int | None = None,
    multiple: int = 1,
) -> list[int]:
    """Return how many of the samples each rank gets, so that the slowest is as quick as possible.

    `least` and `most` are limits of each rank, or of all alike; None is no limit. All numbers are multiples of
    `multiple`, which `samples` must be too. Of ranks that would be equally quick the first gets more.

    >>> divide(70, [Cost(sample_seconds=1.0), Cost(sample_seconds=1.0), Cost(sample_seconds=3.0)])
    [30, 30, 10]
    >>> divide(70, [Cost(sample_seconds=1.0)] * 2, most=[20, None])
    [20, 50]
    >>> divide(70, [Cost(sample_seconds=1.0)] * 2, most=30)
    Traceback (most recent call last):
    ValueError: 2 ranks can take between 2 and 60 samples together, and a batch has 70: give another batch size, or ...
    """
    ranks = len(costs)
    lows = [least] * ranks if isinstance(least, int) else list(least)
    highs: list[int | None] = [most] * ranks if isinstance(most, int) or most is None else list(most)
    lows = [-(-low // multiple) for low in lows]  # from here on in multiples
    tops = [samples // multiple if high is None else high // multiple for high in highs]
    if samples % multiple:
        raise ValueError(f"a batch must be a multiple of {multiple} samples (it has {samples})")
    units = samples // multiple
    if not sum(lows) <= units <= sum(tops) or any(low > top for low, top in zip(lows, tops, strict=True)):
        most_samples = multiple * sum(tops)
        raise ValueError(
            f"{ranks} ranks can take between {multiple * sum(lows)} and {most_samples} samples together, and a batch "
            f"has {samples}: give another batch size, or other limits (least={least}, most={most})"
        )
    unit_costs = [
        Cost(sample_seconds=each.sample_seconds * multiple, fixed_seconds=each.fixed_seconds) for each in costs
    ]
    level = _level(units, unit_costs, lows, tops)
    given = [
        min(top, max(low, math.floor((level - cost.fixed_seconds) / cost.sample_seconds)))
        for cost, low, top in zip(unit_costs, lows, tops, strict=True)
    ]
    while sum(given) > units:  # rounding has filled one too many: those that stand highest go back
        highest = max(
            (rank for rank in range(ranks) if given[rank] > lows[rank]),
            key=lambda rank: (unit_costs[rank].seconds(given[rank]), rank),
        )
        given[highest] -= 1
    waiting = [(unit_costs[rank].seconds(given[rank] + 1), rank) for rank in range(ranks) if given[rank] < tops[rank]]
    heapq.heapify(waiting)
    for _ in range(units - sum(given)):
        _, rank = heapq.heappop(waiting)
        given[rank] += 1
        if given[rank] < tops[rank]:
            heapq.heappush(waiting, (unit_costs[rank].seconds(given[rank] + 1), rank))
    return [multiple * each for each in given]


def _level(units: int, costs: Sequence[Cost], lows: Sequence[int], tops: Sequence[int]) -> float:
    """Return a level to which the ranks can be filled with at most so many units; halving finds it to the last bit."""
    below = min(cost.seconds(low) for cost, low in zip(costs, lows, strict=True))
    above = max(cost.seconds(top) for cost, top in zip(costs, tops, strict=True))
    for _ in range(100):
        middle = (below + above) / 2
        if not below < middle < above:
            break
        filled = sum(
            min(top, max(low, math.floor((middle - cost.fixed_seconds) / cost.sample_seconds)))
            for cost, low, top in zip(costs, lows, tops, strict=True)
        )
        below, above = (middle, above) if filled <= units else (below, middle)
    return below


def deal_rest(
    shares: Sequence[int], samples: int, *, least: int = 1, most: Sequence[int | None] | None = None
) -> list[int]:
    """Return how another batch, the last of an epoch, is dealt: in proportion to the shares.

    It is mostly smaller; it has fewer than `least` samples more where so few were left that they were joined to it.
    Where there are too few for `least` each, some ranks get none: those with the smallest shares. Where those that are
    left cannot hold the rest within their `most`, more of them take part, some with fewer than `least`.

    >>> deal_rest([30, 30, 10], 35), deal_rest([30, 30, 10], 2)
    ([15, 15, 5], [1, 1, 0])
    >>> deal_rest([8, 4], 13, least=2), deal_rest([8, 4], 13, least=2, most=[8, 8])
    ([9, 4], [8, 5])
    >>> deal_rest([8, 8, 8], 15, least=8), deal_rest([8, 8, 8], 15, least=8, most=[8, 8, 8])
    ([15, 0, 0], [8, 7, 0])
    """
    if samples >= sum(shares) + max(1, least):
        raise ValueError(
            f"the rest must be at most a batch and {least - 1} more (samples={samples}, batch={sum(shares)})"
        )
    by_share = sorted(range(len(shares)), key=lambda rank: (-shares[rank], rank))
    limits = [None] * len(shares) if most is None else list(most)
    count = max(1, min(len(shares), samples // least))
    while count < len(shares) and _room(limits[rank] for rank in by_share[:count]) < samples:
        count += 1
    taking = sorted(by_share[:count])
    more = max(0, samples - sum(shares))
    highs = [_less(max(shares[rank] + more, -(-samples // count)), limits[rank]) for rank in taking]
    if sum(highs) < samples:  # limits differ: all that there is room for
        highs = [_less(samples, limits[rank]) for rank in taking]
    lows = min(least, samples // count)
    costs = [Cost(sample_seconds=1 / shares[rank]) for rank in taking]
    dealt = [0] * len(shares)
    for rank, each in zip(taking, divide(samples, costs, least=lows, most=highs), strict=True):
        dealt[rank] = each
    return dealt


def _less(samples: int, limit: int | None) -> int:
    return samples if limit is None else min(samples, limit)


def _room(limits: Iterable[int | None]) -> float:
    return sum(math.inf if limit is None else limit for limit in limits)
