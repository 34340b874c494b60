"""Who is late, by how much, since when; what it costs; and whether chance alone would look the same.

The excess of a worker in a round is its arrival minus the median arrival of the others. What it costs is computed from
the recorded arrivals again, as if it were one of the others: its latest excess is lowered to the others' latest, its
second to their second, and so on. Its ordinary noise stays, for it would be there without the delay as well. The K-th
arrival closes a round:

    arrivals   0.1  0.1  0.2 | 0.9      K = 3: the fourth is late and costs nothing
    arrivals   0.1  0.1  0.2   0.9 |    K = 4: it costs 0.7

**Chance.** In a balanced run all are alike, so that within a round any order of the arrivals is as likely as any other.
Their order is shuffled, in blocks of rounds in a row (a burst on one machine lasts some rounds, and must not count as
many witnesses), and each time the largest of all workers' sums is noted. A worker is late if its own sum is among the
largest of these, a share of CHANCE: the bound holds for all workers together, so a run of a thousand ranks raises no
more false alarms than one of two. Two sums are looked at, each at half of CHANCE: that of clipped excesses, which sees
a small delay in most rounds through heavy tails, and that of what is above zero, which sees large delays in a few.
Those that are found are taken out, and the others are looked at again. Where half of the ranks are slow alike, shuffles
of a few blocks cannot tell; but the same ones are then later than all the rest in block after block, the chance of
which is counted exactly (`together_later`).

**Since when.** The excess over time, in at most BINS bins, is cut into stretches of one level each: of all ways to cut
the one with the least sum of distances from each stretch's median plus a price for each cut, found exactly by dynamic
programming. Distances, not squares, so a single pause moves no level.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from paceline.diagnosis.timings import Bools, Floats, Timings, medians
from paceline.randomness import seed_for

CHANCE = 0.002
SHUFFLES, FEWEST_SHUFFLES = 2_999, 1_999
MOST_SHUFFLED = 5_000_000  # cells in all shuffles together; above it there are fewer of them
BLOCKS = 12
FEWEST_ROUNDS = 8
BINS = 120
MOST_USUAL = 16  # workers of whom it is taken what is usual
TOGETHER = CHANCE / 10  # a second test must not double the false alarms
PRICE_OF_A_CUT = 3.0  # times log(bins) times the noise


def excesses(arrival: Floats) -> Floats:
    """Return each arrival minus the median of the others in its row; nan where there is no arrival, or no other.

    >>> excesses(np.array([[0.0, 1.0, 5.0], [2.0, np.nan, 3.0]]))
    array([[-3. , -1.5,  4.5],
           [-1. ,  nan,  1. ]])
    """
    rows, workers = arrival.shape
    order = np.argsort(arrival, axis=1, kind="stable")  # nan comes last
    ordered = np.take_along_axis(arrival, order, axis=1)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(workers)[None, :], axis=1)
    others = (~np.isnan(arrival)).sum(axis=1, keepdims=True) - 1
    middle = np.zeros((rows, workers))
    for at in ((others - 1) // 2, others // 2):
        at = np.clip(at, 0, workers - 1)
        shifted = np.minimum(np.where(place > at, at, at + 1), workers - 1)  # without the worker itself
        middle += np.take_along_axis(ordered, shifted, axis=1) / 2
    return np.where(others >= 1, arrival - middle, np.nan)


def saved_seconds(timings: Timings, members: Bools) -> float:
    """Return how much sooner all rounds had been over if these workers had come as the others do."""
    return float(saved_by_round(timings.arrival, timings.k, members).sum()) if timings.coupling != "none" else 0.0


def saved_by_round(arrival: Floats, k: np.ndarray, members: Bools) -> Floats:
    """Return for each round how much sooner its K-th arrival had been with the members no later than the others are.

    >>> arrival = np.tile([0.1, 0.1, 0.1, 0.9], (2, 1))
    >>> saved_by_round(arrival, np.array([4, 3]), np.array([False, False, False, True])).round(3)
    array([0.8, 0. ])
    """
    if members.all() or not members.any():
        return np.zeros(len(arrival))
    return np.maximum(0.0, kth_arrival(arrival, k) - kth_arrival(as_the_others(arrival, members), k))


def as_the_others(arrival: Floats, members: Bools) -> Floats:
    """Return the arrivals with the members' excesses lowered to those that the others have, quantile by quantile.

    Up to two others say little about what is usual. Then the level of a stretch is taken off, and what is late beyond
    it is lowered to what is early: with equal ones, late and early are alike.
    """
    others = arrival[:, ~members]
    middle = medians(others)
    moved = arrival.copy()
    usual = _usual_excesses(others, middle) if others.shape[1] > 2 else None
    for column in np.flatnonzero(members):
        there = np.flatnonzero(~np.isnan(arrival[:, column] - middle))
        excess = arrival[there, column] - middle[there]
        if not len(there):
            continue
        level = np.zeros(len(there))
        null = usual
        if null is None:
            for span in levels(excess):
                level[span.first : span.last + 1] = max(0.0, span.level_seconds)
            early = np.minimum(excess - level, 0.0)
            early = early[early < 0]
            null = np.sort(np.concatenate([early, [0.0], -early]))
        rest = excess - level
        order = np.argsort(rest, kind="stable")
        lowered = np.empty(len(there))
        lowered[order] = np.minimum(rest[order], np.quantile(null, (np.arange(len(there)) + 0.5) / len(there)))
        moved[there, column] = middle[there] + lowered
    return moved


def _usual_excesses(others: Floats, middle: Floats) -> Floats:
    """Return the excesses of those who are not suspected, of a few of them where they are many."""
    count = others.shape[1]
    if count > MOST_USUAL:
        chosen = np.linspace(0, count - 1, MOST_USUAL).astype(int)
        found = others[:, chosen] - middle[:, None]
    else:
        found = excesses(others)
    found = found[~np.isnan(found)]
    return np.sort(found) if found.size else np.zeros(1)


def kth_arrival(arrival: Floats, k: np.ndarray) -> Floats:
    """Return the K-th arrival of each round, or its last where fewer came."""
    ordered = np.sort(arrival, axis=1)
    there = np.maximum(1, (~np.isnan(arrival)).sum(axis=1))
    return np.asarray(np.nan_to_num(ordered[np.arange(len(arrival)), np.clip(k, 1, there) - 1]))


# -- chance ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChanceTest:
    """Who is later than chance explains, the latest first, as columns; and the chance of each to be so late.

    `hidden_seconds` is what somebody could be late in all without being told from chance.
    """

    late: tuple[int, ...]
    chances: tuple[float, ...]
    least_chance: float
    hidden_seconds: float


def later_than_chance(arrival: Floats, *, most: int = 8, seed: int = 0) -> ChanceTest:
    """Return the columns whose arrivals are later than those of the others by more than chance explains."""
    left = list(range(arrival.shape[1]))
    late: list[int] = []
    chances: list[float] = []
    least, hidden = 1.0, 0.0
    while len(left) > 1 and len(late) < most:
        worst, least, hidden = _worst(arrival[:, left], seed=seed)
        if least > CHANCE:
            break
        late.append(left.pop(worst))
        chances.append(least)
        if len(late) >= max(1, arrival.shape[1] // 2):
            break  # more than half cannot be late: then the others are early
    return ChanceTest(late=tuple(late), chances=tuple(chances), least_chance=least, hidden_seconds=hidden)


def _worst(arrival: Floats, *, seed: int) -> tuple[int, float, float]:
    """Return the column that is latest, its chance to be so late in a balanced run, and what chance could hide."""
    found = np.nan_to_num(excesses(arrival))
    spread = 1.4826 * float(np.median(np.abs(found))) or float(np.abs(found).max()) or 1.0
    sums = np.stack([_block_sums(np.clip(found, -3 * spread, 3 * spread)), _block_sums(np.maximum(found, 0.0))])
    totals = sums.sum(axis=1)
    cells = sums[0].size
    shuffles = max(FEWEST_SHUFFLES, min(SHUFFLES, MOST_SHUFFLED // max(cells, 1)))
    random = np.random.default_rng(seed_for(seed, "diagnosis", *sums.shape))
    largest = np.empty((shuffles, 2))
    for index in range(shuffles):
        order = np.argsort(random.random(sums.shape[1:]), axis=1)
        largest[index] = np.take_along_axis(sums, order[None], axis=2).sum(axis=1).max(axis=1)
    tolerance = 1e-9 * (np.abs(totals).max() + 1e-12)
    beaten = (largest[:, :, None] >= totals[None] - tolerance).sum(axis=0)
    chances = np.minimum(1.0, 2.0 * ((1 + beaten) / (1 + shuffles)).min(axis=0))
    worst = int(np.lexsort((-totals[1], chances))[0])
    hidden = float(np.quantile(largest[:, 1], 1 - CHANCE / 2) - totals[1].mean())
    return worst, float(chances[worst]), max(0.0, hidden)


def together_later(arrival: Floats) -> tuple[tuple[int, ...], float]:
    """Return the columns that are later than all the rest in block after block, two up to half of them, and the chance.

    In a balanced run a given group of j is the latest of N in one block of C(N, j). That holds for any of them.

    >>> late = np.tile([0.0, 1.0, 0.0, 1.0], (24, 1)) + np.random.default_rng(0).uniform(0, 0.5, (24, 4))
    >>> together_later(late)[0]
    (1, 3)
    """
    workers = arrival.shape[1]
    if workers < 4:
        return (), 1.0
    sums = _block_sums(np.nan_to_num(excesses(arrival)))
    order = np.argsort(-sums.sum(axis=0), kind="stable")
    found: tuple[tuple[int, ...], float] = ((), 1.0)
    sizes = range(2, workers // 2 + 1)
    for size in sizes:
        count = int((sums[:, order[:size]].min(axis=1) > sums[:, order[size:]].max(axis=1)).sum())
        ways = float(min(math.comb(workers, size), 10**100))
        blocks = len(sums)
        tail = sum(
            math.comb(blocks, times) * ways**-times * (1 - 1 / ways) ** (blocks - times)
            for times in range(count, blocks + 1)
        )
        chance = min(1.0, ways * tail * len(sizes))
        if count and chance < found[1]:
            found = tuple(sorted(int(column) for column in order[:size])), chance
    return found if found[1] <= TOGETHER else ((), found[1])


def _block_sums(values: Floats) -> Floats:
    edges = np.unique(np.linspace(0, len(values), min(BLOCKS, len(values)) + 1).astype(int))[:-1]
    return np.asarray(np.add.reduceat(values, edges, axis=0))


# -- since when --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LateSpan:
    """A stretch of rounds (rows `first` to `last`) in which a worker was late by one level."""

    first: int
    last: int
    level_seconds: float


def levels(series: Floats) -> list[LateSpan]:
    """Return the stretches of one level that a series is made of.

    >>> [(span.first, span.last, span.level_seconds) for span in levels(np.repeat([0.0, 2.0], 50))]
    [(0, 49, 0.0), (50, 99, 2.0)]
    """
    edges = np.unique(np.linspace(0, len(series), min(BINS, len(series)) + 1).astype(int))
    bins = np.add.reduceat(series, edges[:-1]) / np.diff(edges)
    count = len(bins)
    noise = 1.4826 * float(np.median(np.abs(np.diff(bins)))) / np.sqrt(2) if count > 1 else 0.0
    noise = max(noise, 0.1 * float(np.ptp(bins)), 1e-12)
    price = PRICE_OF_A_CUT * np.log(max(2, count)) * noise
    distances = _distances(bins.tolist())
    best, cut = np.full(count + 1, -price), [0]
    for end in range(1, count + 1):
        costs = best[:end] + price + distances[:end, end - 1]
        cut.append(int(np.argmin(costs)))
        best[end] = costs[cut[-1]]
    found, end = [], count
    while end > 0:
        begin = cut[end]
        level = float(np.median(bins[begin:end]))
        found.append(LateSpan(first=int(edges[begin]), last=int(edges[end]) - 1, level_seconds=level))
        end = begin
    return found[::-1]


def _distances(values: list[float]) -> Floats:
    """Return the sum of distances from the median for each stretch, by its first and its last value.

    A stretch grows by one value at a time. Two heaps hold its lower and its upper half: the sum of distances is the sum
    of the upper one minus that of the lower one, and the median of an odd number counts in neither.

    >>> _distances([0.0, 4.0, 1.0])
    array([[0., 4., 4.],
           [0., 0., 3.],
           [0., 0., 0.]])
    """
    found = np.zeros((len(values), len(values)))
    for first in range(len(values)):
        lower: list[float] = []  # negative, so that its largest comes first
        upper: list[float] = []
        apart = 0.0  # the sum of the upper half minus that of the lower one
        for last in range(first, len(values)):
            value = values[last]
            if len(lower) == len(upper):
                moved = heapq.heappushpop(upper, value)
                heapq.heappush(lower, -moved)
                apart += value - 2 * moved
                found[first, last] = apart - lower[0]
            else:
                moved = -heapq.heappushpop(lower, -value)
                heapq.heappush(upper, moved)
                apart += 2 * moved - value
                found[first, last] = apart
    return found


def sharp_edge(series: Floats, at: int, *, width: int, before: float, after: float) -> int:
    """Return where near `at` a series goes over from one level to the other, to the row.

    At its very begin a level is cut off only for a good reason: what that gains must be worth a cut.

    >>> sharp_edge(np.repeat([0.0, 2.0], [7, 93]), 10, width=5, before=0.0, after=2.0)
    7
    """
    first, last = max(0, at - width), min(len(series), at + width + 1)
    gain = np.abs(series[first:last] - after) - np.abs(series[first:last] - before)
    total = np.concatenate([[0.0], np.cumsum(gain)])  # what it gains to cut after so many rows
    best = first + int(np.argmax(total))
    if at == 0:
        noise = 1.4826 * float(np.median(np.abs(series - np.median(series))))
        price = PRICE_OF_A_CUT * np.log(max(2, len(series))) * max(noise, 0.1 * abs(after - before))
        return best if total.max() > price else 0
    return best
