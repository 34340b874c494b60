"""Which workers hold which classes, when every worker holds exactly c of them.

Two questions. How many workers hold a class: in proportion to its size, so that shards come out as equal
as they can. And which: first dealt out in turn, which is always possible,

    classes   a a a b b b c c d d d d        (4 workers, c = 3: 12 places, no class more than 4)
    workers   0 1 2 3 0 1 2 3 0 1 2 3        a class's places are neighbours, so it meets no worker twice

and then traded between random pairs of workers, since dealing alone makes many workers alike. Trades keep
every number as it is ("curveball", Strona et al. 2014).
"""

from __future__ import annotations

import heapq
import math

import numpy as np
from numpy.typing import NDArray

_TRADES_PER_WORKER = 5


def holders_per_class(sizes: NDArray[np.int64], workers: int, classes_per_worker: int) -> list[int]:
    """How many workers hold each class of the given sizes.

    The next place goes to the class whose holders have most samples each, while it has a sample for one
    more holder and a worker is left.

    >>> holders_per_class(np.array([100, 100, 400]), workers=6, classes_per_worker=1)
    [1, 1, 4]
    """
    _check(sizes, workers, classes_per_worker)
    holders = [1] * len(sizes)
    most = [min(workers, int(size)) for size in sizes]
    heap = [(-float(size), label) for label, size in enumerate(sizes) if most[label] > 1]
    heapq.heapify(heap)
    for _ in range(workers * classes_per_worker - len(sizes)):
        _, label = heapq.heappop(heap)
        holders[label] += 1
        if holders[label] < most[label]:
            heapq.heappush(heap, (-float(sizes[label]) / holders[label], label))
    return holders


def _check(sizes: NDArray[np.int64], workers: int, classes_per_worker: int) -> None:
    classes = len(sizes)
    if not 1 <= classes_per_worker <= classes:
        raise ValueError(
            "classes_per_worker must be between 1 and classes "
            f"(classes_per_worker={classes_per_worker}, classes={classes})"
        )
    if workers * classes_per_worker < classes:
        raise ValueError(
            "workers x classes_per_worker must be at least classes, or a class goes to nobody "
            f"(workers={workers}, classes_per_worker={classes_per_worker}, classes={classes}): use at least "
            f"{math.ceil(classes / workers)} classes per worker, {math.ceil(classes / classes_per_worker)} workers, "
            "or an iid split"
        )
    room = int(np.minimum(sizes, workers).sum())
    if room < workers * classes_per_worker:
        raise ValueError(
            f"{workers} workers cannot hold {classes_per_worker} classes each: that takes "
            f"{workers * classes_per_worker} holders and the classes have samples for {room} "
            f"(the smallest has {int(sizes.min())}): use fewer workers or fewer classes per worker"
        )


def deal_classes(holders: list[int], workers: int, random: np.random.Generator) -> list[NDArray[np.int64]]:
    """The workers that hold each class; every worker holds equally many classes, none twice.

    >>> [group.tolist() for group in deal_classes([1, 1], workers=1, random=np.random.default_rng(0))]
    [[0], [0]]
    """
    labels = np.repeat(np.arange(len(holders)), holders)
    held = [set(labels[worker::workers].tolist()) for worker in range(workers)]
    for one, other in random.integers(workers, size=(_TRADES_PER_WORKER * workers, 2)).tolist():
        _trade(held, one, other, random)
    return [
        np.array([worker for worker in range(workers) if label in held[worker]], dtype=np.int64)
        for label in range(len(holders))
    ]


def _trade(held: list[set[int]], one: int, other: int, random: np.random.Generator) -> None:
    """Pool what only one of two workers holds, and deal it to them again, as many to each as before."""
    only_one = held[one] - held[other]
    pool = sorted(held[one] ^ held[other])
    shuffled = [pool[index] for index in random.permutation(len(pool))]
    common = held[one] & held[other]
    held[one] = common | set(shuffled[: len(only_one)])
    held[other] = common | set(shuffled[len(only_one) :])
