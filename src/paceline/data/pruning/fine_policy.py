"""Data fine-pruning (Li, He, Ren and Mao 2018): who is often above its batch's mean loss sits some epochs out.

    every epoch      loss >= (mean loss of the batch) * (1 + tolerance)   ->   dropping count + 1
    window begins    all counts are cleared
    pruned epoch     the samples with the highest counts sit out; ties are drawn, never broken by index

Which epochs are pruned is `schedule.py`. Counts are kept for one window; `judge` clears them when it is told of an
epoch in another, so asking `decide` changes nothing. An epoch that begins with every count at zero is never pruned.

Choosing is counting: how many samples have each count says where the cut is, and only those at the cut draw lots.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.data.pruning.numbers import real, whole
from paceline.data.pruning.policy import AT_ONCE, Decision, Indices, Policy, array_of, parts_of
from paceline.data.pruning.schedule import FineSchedule


class FinePolicy(Policy):
    """Fine-pruning of `samples` samples.

    >>> schedule = FineSchedule(window=8, starting_point=2, block=2, count=2, prune=0.5)
    >>> policy = FinePolicy(4, schedule, seed=0)
    >>> policy.judge(1, np.arange(4), np.array([1, 9, 1, 9], np.float32), np.array([4]))
    >>> policy.decide(2).keep
    array([ True, False,  True, False])
    """

    name: ClassVar[str] = "fine-pruning"

    def __init__(self, samples: int, schedule: FineSchedule, *, tolerance: float = 0.0, seed: int = 0) -> None:
        super().__init__(samples, seed=seed)
        if real("tolerance", tolerance) < 0:
            raise ValueError(f"tolerance must be at least 0 (tolerance={tolerance})")
        self.schedule, self.tolerance = schedule, float(tolerance)
        schedule.prune_num(samples)  # refuses what would leave nobody
        self.counts = np.zeros(samples, np.uint16)
        self._counts_of = 0  # the window that the counts are of

    @property
    def prune_num(self) -> int:
        """How many sit out in a pruned epoch."""
        return self.schedule.prune_num(self.population)

    def decide(self, epoch: int, progress: float = 0.0) -> Decision:
        """The samples with the highest counts sit out, if this is a pruned epoch and anything has been counted."""
        stale = self.schedule.window_of(epoch) != self._counts_of
        if stale or not self.prune_num or not self.schedule.is_pruned(epoch) or not self.counts.any():
            return Decision()
        return Decision(keep=self._keep(epoch))

    def _keep(self, epoch: int) -> NDArray[np.bool_]:
        holders = np.zeros(int(self.counts.max()) + 1, np.int64)
        for part in parts_of(self.samples):
            holders += np.bincount(self.counts[part], minlength=len(holders))
        at_least = np.cumsum(holders[::-1])[::-1]  # how many samples have this count or more
        cut = int(np.flatnonzero(at_least >= self.prune_num)[-1])
        keep = self.counts < cut
        surplus = int(at_least[cut]) - self.prune_num  # of those at the cut, so many may stay
        if surplus:
            tied = self.counts == cut
            keep[tied] = lowest(self.tie_lots(epoch, int(holders[cut])), surplus)
        return keep

    def tie_lots(self, epoch: int, tied: int) -> NDArray[np.uint32]:
        """A lot for each of the tied, by rising number of the sample; the lowest lots stay."""
        return self.generator("ties", epoch).integers(1 << 32, size=tied, dtype=np.uint32)

    def judge(self, epoch: int, samples: Indices, losses: NDArray[np.float32], ends: Indices) -> None:
        """Count whoever is above its batch's mean; a sample that comes twice counts once."""
        if self.schedule.window_of(epoch) != self._counts_of:
            self.counts[:] = 0
            self._counts_of = self.schedule.window_of(epoch)
        hard = np.zeros(self.samples, np.bool_)
        for part, batches in _parts(np.asarray(ends)):
            hard[samples[part][above_batch_mean(losses[part], batches, self.tolerance)]] = True
        self.counts += hard

    def difficulty(self) -> NDArray[np.float32]:
        """Who sat out most often; among equals, who has the highest count now."""
        return np.asarray(self.times_pruned + self.counts / float(1 << 16), dtype=np.float32)

    def state_dict(self) -> dict[str, Any]:
        """The counts, and which window they are of."""
        return super().state_dict() | {"counts": self.counts.copy(), "counts_of": self._counts_of}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`; one that is refused changes nothing."""
        self.check_data(state)
        counts = array_of(state["counts"], np.uint16, self.samples, "counts")
        counts_of = whole("counts_of", state["counts_of"], least=0)
        super().load_state_dict(state)
        self.counts, self._counts_of = counts, counts_of


def lowest(lots: NDArray[np.uint32], number: int) -> NDArray[np.bool_]:
    """Which are the `number` lowest; among equal lots at the limit the first.

    >>> lowest(np.array([7, 2, 7, 1], np.uint32), 3)
    array([ True,  True, False,  True])
    """
    limit = np.partition(lots, number - 1)[number - 1]
    chosen: NDArray[np.bool_] = lots < limit
    chosen[np.flatnonzero(lots == limit)[: number - np.count_nonzero(chosen)]] = True
    return chosen


def above_batch_mean(losses: NDArray[np.float32], ends: Indices, tolerance: float) -> NDArray[np.bool_]:
    """Whose loss is at least (1 + tolerance) times the mean of its batch.

    >>> above_batch_mean(np.array([1, 3, 5, 5], np.float32), np.array([2, 4]), 0.0)
    array([False,  True,  True,  True])
    """
    starts = np.concatenate(([0], ends[:-1]))
    sizes = np.asarray(ends) - starts
    limits = np.add.reduceat(losses, starts, dtype=np.float64) / sizes * (1 + tolerance)
    return np.asarray(losses >= np.repeat(limits, sizes))


def _parts(ends: Indices) -> list[tuple[slice, Indices]]:
    """Whole batches, about a million samples at a time: what is computed on the way stays small."""
    parts, start, first = [], 0, 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, start + AT_ONCE, side="right")))
        stop = int(ends[last - 1])
        parts.append((slice(start, stop), ends[first:last] - start))
        start, first = stop, last
    return parts


def make(samples: int, *, tolerance: float, seed: int, **schedule: Any) -> FinePolicy:
    """Fine-pruning from plain settings: those of the schedule, and the tolerance.

    >>> make(10, tolerance=0.0, seed=0, prune=0.2).prune_num
    2
    """
    return FinePolicy(samples, FineSchedule(**schedule), tolerance=tolerance, seed=seed)
