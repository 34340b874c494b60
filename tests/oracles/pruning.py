"""Data pruning in its slowest, plainest form: what the fast policies are tested against.

Fine-pruning as the paper lists it (Li, He, Ren and Mao 2018, algorithms 1 and 2), with what its listings leave open or
say otherwise than its text:

    the starting point is divided once per window, where the listing divides it in every epoch after the first window
    an epoch that begins with every count at zero is whole: there is nothing to judge by
    who of those with equal counts sits out is drawn; `draw(epoch, how_many)` gives the lots

and InfoBatch (Qin et al. 2024). Samples are numbers from 0 on, epochs count from 1. What is done with the samples that
take part is the caller's: `batches(epoch, kept)` says in which batches they are trained on, of which some may be left
out, and `loss(epoch, sample)` what their losses are. Nothing here is shared with the code it specifies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

Batches: TypeAlias = Callable[[int, Sequence[int]], Sequence[Sequence[int]]]
Loss: TypeAlias = Callable[[int, int], float]
Draw: TypeAlias = Callable[[int, int], Sequence[float]]


def mean(values: Sequence[float]) -> float:
    """Return the mean.

    >>> mean([1.0, 2.0, 6.0])
    3.0
    """
    return math.fsum(values) / len(values)


def monitor(dropping_count: dict[int, int], batch: Mapping[int, float], tolerance: float) -> None:
    """Count who of a batch, {sample: loss}, has at least (1 + tolerance) x its mean loss: algorithm 1, lines 4 to 8.

    >>> counts = {0: 0, 1: 0, 2: 5}
    >>> monitor(counts, {0: 1.0, 2: 3.0}, tolerance=0.0)
    >>> counts
    {0: 0, 1: 0, 2: 6}
    """
    limit = mean(list(batch.values())) * (1 + tolerance)
    for sample, loss in batch.items():
        if loss >= limit:
            dropping_count[sample] += 1


def keep_list(dropping_count: Mapping[int, int], pruning_num: int, lots: Callable[[int], Sequence[float]]) -> list[int]:
    """Return all but the `pruning_num` highest counts; of the tied the lowest lots stay: algorithm 2, line 7.

    >>> keep_list({0: 3, 1: 1, 2: 1, 3: 1}, 2, lambda tied: [0.9, 0.1, 0.5])
    [2, 3]
    """
    cut = sorted(dropping_count.values(), reverse=True)[pruning_num - 1]
    kept = [sample for sample, count in dropping_count.items() if count < cut]
    tied = sorted(sample for sample, count in dropping_count.items() if count == cut)
    missing = len(dropping_count) - pruning_num - len(kept)
    if missing:
        by_lot = sorted(zip(lots(len(tied)), tied, strict=True))
        kept += [sample for _, sample in by_lot[:missing]]
    return sorted(kept)


def fine_pruning(
    samples: int,
    batches: Batches,
    loss: Loss,
    draw: Draw,
    *,
    epochs: int,
    window: int,
    starting_point: int,
    attenuation: float,
    block: int,
    count: int,
    pruning_num: int,
    tolerance: float = 0.0,
) -> list[list[int]]:
    """Return who takes part, epoch by epoch.

    >>> fine_pruning(4, lambda e, kept: [kept], lambda e, sample: float(sample), lambda e, tied: range(tied),
    ...              epochs=4, window=9, starting_point=2, attenuation=2, block=2, count=1, pruning_num=1)
    [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 3], [0, 1, 3]]
    """
    everybody = list(range(samples))
    dropping_count = dict.fromkeys(everybody, 0)
    history = []
    for e in range(1, epochs + 1):
        if e % window == 0:
            dropping_count = dict.fromkeys(everybody, 0)
            starting_point = int(starting_point / attenuation)
        kept = everybody
        if e % window >= starting_point and e % block < count and pruning_num and any(dropping_count.values()):
            kept = keep_list(dropping_count, pruning_num, partial(draw, e))
        for batch in batches(e, kept):
            monitor(dropping_count, {sample: loss(e, sample) for sample in batch}, tolerance)
        history.append(kept)
    return history


def info_batch(
    samples: int, batches: Batches, loss: Loss, draw: Draw, *, epochs: int, ratio: float, delta: float
) -> list[dict[int, float]]:
    """Return who takes part and what each weighs, epoch by epoch; `draw(epoch, samples)` gives lots in [0, 1).

    >>> info_batch(3, lambda epoch, kept: [kept], lambda epoch, sample: float(sample), lambda epoch, many: [0.1] * many,
    ...            epochs=4, ratio=0.5, delta=0.75)
    [{0: 1.0, 1: 1.0, 2: 1.0}, {1: 1.0, 2: 1.0}, {1: 1.0, 2: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0}]
    """
    everybody = list(range(samples))
    scores: dict[int, float] = {}
    history = []
    for e in range(1, epochs + 1):
        weights = dict.fromkeys(everybody, 1.0)
        seen = {sample: score for sample, score in scores.items() if not math.isnan(score)}
        if (e - 1) / epochs < delta and ratio > 0 and seen:
            average, lots = mean(list(seen.values())), draw(e, samples)
            drawn = {}
            for sample in everybody:
                easy = sample in seen and seen[sample] < average
                if not easy:
                    drawn[sample] = 1.0
                elif lots[sample] >= ratio:
                    drawn[sample] = 1 / (1 - ratio)
            weights = drawn if len(drawn) > 1 else weights  # no epoch of one sample, unless there is only one
        for batch in batches(e, list(weights)):
            scores.update({sample: loss(e, sample) for sample in batch})
        history.append(weights)
    return history
