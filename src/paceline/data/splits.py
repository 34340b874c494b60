"""Who holds which samples.

The law of every kind here: each sample goes to exactly one worker and no worker goes without, or a
ValueError says why that cannot be. A kind is a function from targets to owners, one owner for each
sample, so that the first half of the law cannot be broken.

    kind        each worker holds                          after
    iid         a fair share of everything                 shuffling, as in any cluster
    non-iid     samples of exactly c classes               McMahan et al. 2017, "pathological non-IID"
    dirichlet   every class in its own proportion          Hsu, Qi and Brown 2019

For non-iid there are two questions. How many workers hold a class: in proportion to its size, so that shards come
out as equal as they can. And which: first dealt out in turn, which is always possible,

    classes   a a a b b b c c d d d d        (4 workers, c = 3: 12 places, no class more than 4)
    workers   0 1 2 3 0 1 2 3 0 1 2 3        a class's places are neighbours, so it meets no worker twice

and then traded between random pairs of workers, since dealing alone makes many workers alike. Trades keep
every number as it is ("curveball", Strona et al. 2014).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.lookup import unknown
from paceline.randomness import exp, log, seed_for

if TYPE_CHECKING:
    import torch

_TRADES_PER_WORKER = 5


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """The settings of all kinds; each kind reads those that it needs.

    >>> SplitSettings(workers=4, classes_per_worker=2).alpha is None
    True
    """

    workers: int
    classes_per_worker: int | None = None
    alpha: float | None = None


Owners = Callable[[NDArray[np.int64], SplitSettings, np.random.Generator], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class SplitEntry:
    """One line of the table: what a kind does, the setting it needs, and how.

    >>> SPLITS["dirichlet"].needs
    'alpha'
    """

    description: str
    owners: Owners
    needs: str | None = None


def split(
    targets: torch.Tensor,
    workers: int,
    *,
    kind: str = "iid",
    classes_per_worker: int | None = None,
    alpha: float | None = None,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Return the sample indices of every worker, in rising order.

    >>> import torch
    >>> targets = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    >>> [len(shard) for shard in split(targets, 3)]
    [3, 3, 2]
    >>> shards = split(targets, 2, kind="non-iid", classes_per_worker=1)
    >>> [len(set(targets[shard].tolist())) for shard in shards]
    [1, 1]
    >>> split(targets, 2, kind="non-iid", classes_per_worker=3)
    Traceback (most recent call last):
    ValueError: classes_per_worker must be between 1 and classes (classes_per_worker=3, classes=2)
    """
    import torch

    if kind not in SPLITS:
        raise unknown("split", kind, SPLITS)
    settings = SplitSettings(workers=workers, classes_per_worker=classes_per_worker, alpha=alpha)
    _check_settings(kind, settings)
    labels = _labels(targets)
    if not 1 <= workers <= len(labels):
        raise ValueError(
            f"workers must be between 1 and samples, one for each (workers={workers}, samples={len(labels)})"
        )
    random = np.random.default_rng(seed_for(seed, "split", kind))
    owners = SPLITS[kind].owners(labels, settings, random)
    order = np.argsort(owners, kind="stable")
    ends = np.cumsum(np.bincount(owners, minlength=workers))
    return [torch.from_numpy(shard.copy()) for shard in np.split(order, ends[:-1])]


def _labels(targets: torch.Tensor) -> NDArray[np.int64]:
    """Return targets renumbered 0..classes-1; a class that has no samples does not count."""
    if targets.ndim != 1 or targets.is_floating_point() or targets.is_complex():
        raise ValueError(
            f"targets must be whole numbers [samples] (shape={tuple(targets.shape)}, dtype={targets.dtype})"
        )
    return np.unique(targets.cpu().numpy(), return_inverse=True)[1].astype(np.int64)


def _check_settings(kind: str, settings: SplitSettings) -> None:
    needs = SPLITS[kind].needs
    for name in ("classes_per_worker", "alpha"):
        value = getattr(settings, name)
        if name == needs and value is None:
            raise ValueError(f"{kind} splits need {name}")
        if name != needs and value is not None:
            raise ValueError(f"{kind} splits take no {name} ({name}={value})")


def _iid(labels: NDArray[np.int64], settings: SplitSettings, random: np.random.Generator) -> NDArray[np.int64]:
    return random.permutation(np.arange(len(labels), dtype=np.int64) % settings.workers)


def _non_iid(labels: NDArray[np.int64], settings: SplitSettings, random: np.random.Generator) -> NDArray[np.int64]:
    sizes = np.bincount(labels)
    holders = deal_classes(
        holders_per_class(sizes, settings.workers, settings.classes_per_worker or 0), settings.workers, random
    )
    owners = np.empty(len(labels), dtype=np.int64)
    held = np.zeros(settings.workers, dtype=np.int64)
    for label, samples in enumerate(_by_class(labels, random)):
        # Those who hold least so far come first, and so get the samples that do not divide evenly.
        mine = holders[label][np.argsort(held[holders[label]], kind="stable")]
        owners[samples] = mine[np.arange(len(samples)) % len(mine)]
        held += np.bincount(owners[samples], minlength=settings.workers)
    return owners


def _dirichlet(labels: NDArray[np.int64], settings: SplitSettings, random: np.random.Generator) -> NDArray[np.int64]:
    alpha = settings.alpha or 0.0
    if not 1e-6 <= alpha <= 1e6:
        raise ValueError(f"alpha must be between 1e-6 and 1e6 (alpha={alpha})")
    owners = np.empty(len(labels), dtype=np.int64)
    for samples in _by_class(labels, random):
        ends = np.cumsum(_proportions(alpha, settings.workers, random))
        places = (np.arange(len(samples)) + random.random()) / len(samples)
        owners[samples] = np.minimum(np.searchsorted(ends, places, side="right"), settings.workers - 1)
    return _nobody_empty(owners, settings.workers, random)


def _proportions(alpha: float, workers: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Draw from Dirichlet(alpha, ..., alpha), by logarithms: for a small alpha all gammas round to zero."""
    logs = log(random.gamma(alpha + 1.0, size=workers)) + log(1.0 - random.random(workers)) / alpha
    shares = exp(logs - logs.max())
    return np.asarray(shares / shares.sum())


def _nobody_empty(owners: NDArray[np.int64], workers: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Give every worker without samples one of a worker that has more than one, the larger the likelier.

    Drawing again until nobody is empty would never end for a small alpha and many workers.
    """
    empty = np.flatnonzero(np.bincount(owners, minlength=workers) == 0)
    order = random.permutation(len(owners))
    kept = order[np.unique(owners[order], return_index=True)[1]]  # one sample that each owner keeps
    spare = order[~np.isin(order, kept)]
    owners[spare[: len(empty)]] = empty
    return owners


def _by_class(labels: NDArray[np.int64], random: np.random.Generator) -> list[NDArray[np.int64]]:
    """Return the samples of every class, shuffled."""
    order = np.lexsort((random.random(len(labels)), labels))
    return list(np.split(order, np.cumsum(np.bincount(labels))[:-1]))


SPLITS: dict[str, SplitEntry] = {
    "iid": SplitEntry(description="every worker holds a fair share of everything", owners=_iid),
    "non-iid": SplitEntry(
        description="every worker holds samples of exactly classes_per_worker classes",
        owners=_non_iid,
        needs="classes_per_worker",
    ),
    "dirichlet": SplitEntry(
        description="every class is spread in proportions drawn from a Dirichlet(alpha)",
        owners=_dirichlet,
        needs="alpha",
    ),
}
"""Every kind of split by name.

>>> list(SPLITS)
['iid', 'non-iid', 'dirichlet']
"""


# -- which workers hold which classes --------------------------------------------------------------------------------


def holders_per_class(sizes: NDArray[np.int64], workers: int, classes_per_worker: int) -> list[int]:
    """Return how many workers hold each class of the given sizes.

    The next place goes to the class whose holders have most samples each, while it has a sample for one
    more holder and a worker is left.

    >>> holders_per_class(np.array([100, 100, 400]), workers=6, classes_per_worker=1)
    [1, 1, 4]
    """
    _check_room(sizes, workers, classes_per_worker)
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


def _check_room(sizes: NDArray[np.int64], workers: int, classes_per_worker: int) -> None:
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
    """Return the workers that hold each class; every worker holds equally many classes, none twice.

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
