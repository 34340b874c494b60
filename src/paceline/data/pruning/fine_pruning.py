"""Data fine-pruning (Li, He, Ren and Mao 2018): who is often above its batch's mean loss sits some epochs out.

    every epoch      loss >= (mean loss of the batch) * (1 + tolerance)   ->   dropping count + 1
    window begins    all counts are cleared
    pruned epoch     the samples with the highest counts sit out; ties are drawn, never broken by index

Epochs are pruned late in each window, some of each block; from window to window the pruning starts earlier:

    window 12, starting point 6, attenuation 2, block 4, count 2          # pruned   . whole

    epoch   1          12          24          36
            |          |           |           |
            .......##......##..##...#..##..##...#..##..##...
            from the 6th  the 3rd     the 1st     the 0th epoch of the window on

An epoch e is pruned when e mod window >= the starting point of its window and e mod block < count. The starting point
is divided by the attenuation, and truncated, once per window. (The paper's listing, read to the letter, divides it in
every epoch, and reaches 0 within a few; its text says that it is done from window to window.) An epoch that begins with
every count at zero is never pruned.

Windows are of one length, or begin where a learning rate changes (`window_at`), which the paper has at 60, 120 and 160
of 200 epochs. There "e mod window" is how many epochs a window has had before e. The last of them has no end:

    window_at 60, 120, 160        0 ........ 60 ........ 120 ..... 160 ...........
    number of the window               0          1           2          3

Samples may be in groups of which each loses its share and no more (groups.py): then the highest counts of each sit out.

Counts are kept for one window; `judge` clears them at the first losses of the next, so `decide` has no side effect.
The samples to prune are found by a histogram of the counts, without sorting: it gives the count of the last sample that
is pruned, and random numbers decide only between the samples with just that count.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.data.pruning import EPOCHS_STARTING_POINT, EPOCHS_WINDOW
from paceline.data.pruning.groups import Groups
from paceline.data.pruning.policy import (
    CHUNK,
    Decision,
    Indices,
    Policy,
    chunks,
    finite_number,
    saved_array,
    whole_number,
)

LONGEST_WINDOW = 65_535  # counts are 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class FineSchedule:
    """The settings that say which epochs are pruned, and how many samples then sit out.

    `prune` is a share of the samples (a float below 1) or a number of samples (an int). `window_at` are the epochs at
    which windows begin, in place of windows of the one length `window`.

    >>> schedule = FineSchedule(window=12, starting_point=6, attenuation=2, block=4, count=2, prune=0.3)
    >>> [epoch for epoch in range(1, 25) if schedule.is_pruned(epoch)]
    [8, 9, 16, 17, 20, 21]
    >>> schedule.prune_num(1000)
    300
    >>> schedule = FineSchedule(window_at=(12, 18), starting_point=6, attenuation=2, block=4, count=2)
    >>> [epoch for epoch in range(1, 25) if schedule.is_pruned(epoch)]
    [8, 9, 16, 17, 20, 21, 24]
    """

    window: int = EPOCHS_WINDOW
    starting_point: int = EPOCHS_STARTING_POINT
    attenuation: float = 2
    block: int = 4
    count: int = 2
    prune: float | int = 0.3
    window_at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        whole_number("window", self.window, least=1, most=LONGEST_WINDOW)
        object.__setattr__(self, "window_at", window_starts(self.window_at))
        whole_number("block", self.block, least=1)
        whole_number("starting_point", self.starting_point, least=0)
        whole_number("count", self.count, least=0)
        if self.starting_point > self.window_length(0):
            first = f"window_at={list(self.window_at)}" if self.window_at else f"window={self.window}"
            raise ValueError(
                f"starting_point must be between 0 and {'the first of window_at' if self.window_at else 'window'} "
                f"(starting_point={self.starting_point}, {first})"
            )
        if finite_number("attenuation", self.attenuation) < 1:
            raise ValueError(f"attenuation must be at least 1 (attenuation={self.attenuation})")
        if self.count > self.block:
            raise ValueError(f"count must be between 0 and block (count={self.count}, block={self.block})")
        if finite_number("prune", self.prune) < 0:
            raise ValueError(f"prune must be at least 0 (prune={self.prune})")
        if not self._prunes_a_number and self.prune >= 1:
            raise ValueError(
                f"prune, as a share, must be at least 0 and below 1 (prune={self.prune}); an int is a number of samples"
            )

    @property
    def _prunes_a_number(self) -> bool:
        """Whether `prune` is a number of samples, and not a share of them."""
        return isinstance(self.prune, numbers.Integral)

    def window_of(self, epoch: int) -> int:
        """Return the number of the window that an epoch is in.

        >>> FineSchedule(window=60).window_of(60), FineSchedule(window_at=(60, 120, 160)).window_of(170)
        (1, 3)
        """
        return bisect.bisect_right(self.window_at, epoch) if self.window_at else epoch // self.window

    def window_start(self, number: int) -> int:
        """Return the epoch with which a window begins; the first begins before epoch 1, with epoch 0.

        >>> [FineSchedule(window_at=(60, 120, 160)).window_start(number) for number in range(4)]
        [0, 60, 120, 160]
        """
        if not self.window_at:
            return number * self.window
        return self.window_at[number - 1] if number else 0

    def window_length(self, number: int) -> float:
        """Return how many epochs a window has; infinitely many, if it is the last of `window_at`.

        >>> [FineSchedule(window_at=(60, 120, 160)).window_length(number) for number in (1, 2, 3)]
        [60, 40, inf]
        """
        if not self.window_at:
            return self.window
        return self.window_start(number + 1) - self.window_start(number) if number < len(self.window_at) else math.inf

    def epochs_before(self, epoch: int) -> int:
        """Return how many epochs the window of an epoch has had before it: e mod window, if all are of one length.

        >>> FineSchedule(window=60).epochs_before(70), FineSchedule(window_at=(60, 120, 160)).epochs_before(170)
        (10, 10)
        """
        return epoch - self.window_start(self.window_of(epoch))

    def starts_at(self, epoch: int) -> int:
        """Return the starting point of the window that an epoch is in.

        >>> [FineSchedule(window=60, starting_point=30).starts_at(epoch) for epoch in (59, 60, 120, 180)]
        [30, 15, 7, 3]
        """
        start = self.starting_point
        for _ in range(self.window_of(epoch)):
            if start == 0 or self.attenuation == 1:
                break
            start = int(start / self.attenuation)
        return start

    def is_pruned(self, epoch: int) -> bool:
        """Tell whether samples sit this epoch out, if any have been counted since its window began.

        In the first epoch of a window none have.

        >>> FineSchedule(window=4, starting_point=0, block=1, count=1).is_pruned(4)
        False
        """
        before = self.epochs_before(epoch)
        if epoch == 1 or before == 0:
            return False
        return before >= self.starts_at(epoch) and epoch % self.block < self.count

    def prune_num(self, samples: int) -> int:
        """Return how many samples sit out in a pruned epoch.

        >>> FineSchedule(prune=10).prune_num(10)
        Traceback (most recent call last):
        ValueError: prune must leave at least one sample (prune=10, samples=10); give 9 or fewer, or a share below 1
        """
        share = Fraction(repr(float(self.prune)))  # as it was written: 0.29 of 100 is 29, not 28.999
        number = int(self.prune) if self._prunes_a_number else math.floor(share * samples)
        if number >= samples:
            raise ValueError(
                f"prune must leave at least one sample (prune={self.prune}, samples={samples}); "
                f"give {samples - 1} or fewer, or a share below 1"
            )
        return number


class FinePolicy(Policy):
    """Fine-pruning of `samples` samples.

    >>> schedule = FineSchedule(window=8, starting_point=2, block=2, count=2, prune=0.5)
    >>> policy = FinePolicy(4, schedule, seed=0)
    >>> policy.judge(1, np.arange(4), np.array([1, 9, 1, 9], np.float32), np.array([4]))
    >>> policy.decide(2).keep
    array([ True, False,  True, False])
    """

    name: ClassVar[str] = "fine-pruning"

    def __init__(
        self,
        samples: int,
        schedule: FineSchedule,
        *,
        tolerance: float = 0.0,
        seed: int = 0,
        protected: Groups | None = None,
    ) -> None:
        super().__init__(samples, seed=seed)
        if finite_number("tolerance", tolerance) < 0:
            raise ValueError(f"tolerance must be at least 0 (tolerance={tolerance})")
        self.schedule, self.tolerance = schedule, float(tolerance)
        schedule.prune_num(samples)  # refuses to leave no sample
        self.counts = np.zeros(samples, np.uint16)
        self._protected = protected
        self.settings = _plain_settings(schedule) | {"tolerance": self.tolerance}
        if protected is not None:
            self.settings |= {"protect": protected.digest}
        self._counts_of = 0  # the window that the counts are of

    @property
    def prune_num(self) -> int:
        """The number of samples that sit out in a pruned epoch."""
        return self.schedule.prune_num(self.population)

    def decide(self, epoch: int, progress: float = 0.0) -> Decision:
        """Let the samples with the highest counts sit out, if this is a pruned epoch and anything has been counted."""
        stale = self.schedule.window_of(epoch) != self._counts_of
        if stale or not self.prune_num or not self.schedule.is_pruned(epoch) or not self.counts.any():
            return Decision()
        return Decision(keep=self._keep(epoch))

    def _keep(self, epoch: int) -> NDArray[np.bool_]:
        if self._protected is None:
            return fewest_counts(self.counts, self.prune_num, lambda tied: self.tie_lots(epoch, tied))
        keep = np.ones(self.samples, np.bool_)
        for group, number in enumerate(self._protected.quotas(self.prune_num).tolist()):
            if number:
                members = np.flatnonzero(self._protected.numbers == group)
                draw = functools.partial(self.tie_lots, epoch, purpose=f"ties of group {group}")
                keep[members] = fewest_counts(self.counts[members], number, draw)
        return keep

    def tie_lots(self, epoch: int, tied: int, *, purpose: str = "ties") -> NDArray[np.uint32]:
        """Return a random number for each tied sample, in the order of their indices; the lowest are kept."""
        return self.generator(purpose, epoch).integers(1 << 32, size=tied, dtype=np.uint32)

    def judge(self, epoch: int, samples: Indices, losses: NDArray[np.float32], ends: Indices) -> None:
        """Count samples that are above their batch's mean; a sample that comes twice counts once."""
        if self.schedule.window_of(epoch) != self._counts_of:
            self.counts[:] = 0
            self._counts_of = self.schedule.window_of(epoch)
        hard = np.zeros(self.samples, np.bool_)
        for part, batches in _batch_chunks(np.asarray(ends)):
            hard[samples[part][above_batch_mean(losses[part], batches, self.tolerance)]] = True
        if self.schedule.window_at:  # whose last window may be longer than 16 bits can count
            hard &= self.counts < LONGEST_WINDOW
        self.counts += hard

    def difficulty(self) -> NDArray[np.float32]:
        """Return how often each sample sat out, plus a fraction that orders equals by their count now."""
        return np.asarray(self.times_pruned + self.counts / float(1 << 16), dtype=np.float32)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and their window, beside what every policy saves."""
        return super().state_dict() | {"counts": self.counts.copy(), "counts_of": self._counts_of}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`; one that is refused changes nothing."""
        self.check_samples(state)
        counts = saved_array(state["counts"], np.uint16, self.samples, "counts")
        counts_of = whole_number("counts_of", state["counts_of"], least=0, most=2**53)
        super().load_state_dict(state)
        self.counts, self._counts_of = counts, counts_of


def window_starts(given: Any) -> tuple[int, ...]:
    """Return the epochs at which windows begin as a tuple, if they rise.

    >>> window_starts([60, 120, 160])
    (60, 120, 160)
    >>> window_starts([60, 60])
    Traceback (most recent call last):
    ValueError: window_at must be epochs that rise, each above the one before (window_at=[60, 60])
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(f"window_at must be epochs, such as (60, 120, 160) (window_at={given!r})")
    starts = tuple(whole_number("window_at", each, least=1) for each in given)
    if any(second <= first for first, second in itertools.pairwise(starts)):
        raise ValueError(f"window_at must be epochs that rise, each above the one before (window_at={list(starts)})")
    return starts


def _plain_settings(schedule: FineSchedule) -> dict[str, Any]:
    """Return the settings as plain values; of the two that say where windows begin, the one that counts."""
    plain = asdict(schedule)
    starts = list(plain.pop("window_at"))
    plain = {name: np.asarray(value).item() for name, value in plain.items()}
    return {"window_at": starts} | {name: plain[name] for name in plain if name != "window"} if starts else plain


def fewest_counts(
    counts: NDArray[np.uint16], number: int, draw: Callable[[int], NDArray[np.uint32]]
) -> NDArray[np.bool_]:
    """Mark all but the `number` highest counts; `draw` gives lots for those at the cut, the lowest of which stay.

    >>> fewest_counts(np.array([3, 1, 3, 0], np.uint16), 1, lambda tied: np.arange(tied, dtype=np.uint32))
    array([ True,  True, False,  True])
    """
    holders = np.zeros(int(counts.max()) + 1, np.int64)
    for part in chunks(len(counts)):
        holders += np.bincount(counts[part], minlength=len(holders))
    at_least = np.cumsum(holders[::-1])[::-1]  # how many samples have this count or more
    cut = int(np.flatnonzero(at_least >= number)[-1])
    keep: NDArray[np.bool_] = counts < cut
    surplus = int(at_least[cut]) - number  # of those at the cut, so many may stay
    if surplus:
        tied = counts == cut
        keep[tied] = lowest(draw(int(holders[cut])), surplus)
    return keep


def lowest(lots: NDArray[np.uint32], number: int) -> NDArray[np.bool_]:
    """Mark the `number` lowest lots; among equal lots at the limit the first.

    >>> lowest(np.array([7, 2, 7, 1], np.uint32), 3)
    array([ True,  True, False,  True])
    """
    limit = np.partition(lots, number - 1)[number - 1]
    chosen: NDArray[np.bool_] = lots < limit
    chosen[np.flatnonzero(lots == limit)[: number - np.count_nonzero(chosen)]] = True
    return chosen


def above_batch_mean(losses: NDArray[np.float32], ends: Indices, tolerance: float) -> NDArray[np.bool_]:
    """Mark the losses that are at least (1 + tolerance) times the mean of their batch.

    >>> above_batch_mean(np.array([1, 3, 5, 5], np.float32), np.array([2, 4]), 0.0)
    array([False,  True,  True,  True])
    """
    starts = np.concatenate(([0], ends[:-1]))
    sizes = np.asarray(ends) - starts
    limits = np.add.reduceat(losses, starts, dtype=np.float64) / sizes * (1 + tolerance)
    return np.asarray(losses >= np.repeat(limits, sizes))


def _batch_chunks(ends: Indices) -> list[tuple[slice, Indices]]:
    """Return slices of whole batches, about a million samples each: what is computed on the way stays small."""
    parts, start, first = [], 0, 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, start + CHUNK, side="right")))
        stop = int(ends[last - 1])
        parts.append((slice(start, stop), ends[first:last] - start))
        start, first = stop, last
    return parts


def make_fine_policy(
    samples: int, *, tolerance: float, seed: int, protected: Groups | None = None, **schedule: Any
) -> FinePolicy:
    """Return a policy from plain settings: those of the schedule, the tolerance, and protected groups.

    >>> make_fine_policy(10, tolerance=0.0, seed=0, prune=0.2).prune_num
    2
    """
    return FinePolicy(samples, FineSchedule(**schedule), tolerance=tolerance, seed=seed, protected=protected)


# -- the paper's formulas ----------------------------------------------------------------------------------------------

BATCHES, SECONDS = "batches", "seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningTimes:
    """The paper's formulas (2), (5), (6) and (7): what `n_prune` pruned epochs save, in `unit` (batches if T is 1).

        n epochs    b batches of a whole epoch    T time of a batch    t_0 what pruning itself costs in a pruned epoch

        (2)  t_regular = n * T * b
        (5)  b_prune   = (n_prune * batches of a pruned epoch + (n - n_prune) * b) / n
        (6)  t_prune   = n * T * b_prune + n_prune * t_0
        (7)  t_save    = t_regular - t_prune

    They are exact if n_prune is. (5) is printed as the mean of T over n_prune epochs and over the others: T, whatever
    is pruned. It is introduced as the mean number of batches of an epoch, and that is what stands above.

    >>> times = PruningTimes.of(n=10, n_prune=5, b=8, b_of_pruned=6)
    >>> times.b_prune, times.t_regular, times.t_prune, times.t_save
    (7.0, 80.0, 70.0, 10.0)
    """

    n_prune: int
    b_prune: float
    t_regular: float
    t_prune: float
    t_save: float
    unit: str = BATCHES

    @classmethod
    def of(
        cls,
        *,
        n: int,
        n_prune: int,
        b: int,
        b_of_pruned: int,
        T: float | None = None,  # noqa: N803
        t_0: float = 0.0,
    ) -> PruningTimes:
        """Compute the times for this n_prune; without T the unit is batches.

        >>> PruningTimes.of(n=10, n_prune=5, b=8, b_of_pruned=6, T=0.5, t_0=0.2).t_save
        4.0
        """
        unit, per_batch = (BATCHES, 1.0) if T is None else (SECONDS, T)
        batches = n_prune * b_of_pruned + (n - n_prune) * b
        return cls(
            n_prune=n_prune,
            b_prune=batches / n,
            t_regular=n * per_batch * b,
            t_prune=per_batch * batches + n_prune * t_0,
            t_save=per_batch * (n * b - batches) - n_prune * t_0,
            unit=unit,
        )


def estimated_n_prune(schedule: FineSchedule, n: int) -> int:
    """Estimate by the paper's formula (3) or (4) how many of n epochs are pruned.

        w window    a starting point    r block    c count

        (3)  n_prune = (floor((w - a) / r) * c + (w - a) mod r) * floor(n / w)            where w divides n
        (4)  n_prune = the same + floor((n mod w - a) / r) * c + (n mod w - a) mod r      otherwise

    Where the print cannot be meant, or is not what the paper's own listings do:

      - r is introduced as "the number of iterations using the pruned data". The formulas only fit the listing where it
        is the block, of which c epochs are pruned.
      - They take all the (w - a) mod r epochs after a window's last whole block as pruned. At most c of them are.
      - They know no attenuation: to them every window starts at a. From the second window on there is more to prune.
      - They count the first epoch of a window if a is 0, and epoch 1 if a is 1. These are never pruned: nothing has
        been counted.
      - (4) sees a negative number of epochs where the run ends before the starting point of its last window
        (n mod w < a). Nothing is pruned there, so that part is taken as 0.
      - (4) sees n mod w - a epochs in the last window. From the a-th to the (n mod w)-th, both included, there is one
        more.

    They know windows of one length only: `window`, whatever `window_at` says.

    So with attenuation 1 the exact number is at most (3), and at most (4) + 1; it is (3) where r divides w - a and a is
    at least 2. With a higher attenuation it may be above or below.

    >>> estimated_n_prune(FineSchedule(window=12, starting_point=6, block=4, count=2), 36)  # (1 * 2 + 2) * 3
    12
    >>> estimated_n_prune(FineSchedule(window=12, starting_point=6, block=4, count=2), 46)  # 12 + 1 * 2 + 0
    14
    """
    w, a, r, c = schedule.window, schedule.starting_point, schedule.block, schedule.count
    per_window = (w - a) // r * c + (w - a) % r
    in_the_last = max(0, n % w - a)
    return per_window * (n // w) + in_the_last // r * c + in_the_last % r


def estimate_remarks(schedule: FineSchedule, n: int) -> tuple[str, ...]:
    """Return why (3) or (4) need not be the exact number for this schedule.

    >>> estimate_remarks(FineSchedule(window=12, starting_point=4, attenuation=1, block=4, count=2), 36)
    ()
    >>> for remark in estimate_remarks(FineSchedule(window=12, starting_point=6, attenuation=2, block=4, count=2), 28):
    ...     print(remark)
    The formulas know no attenuation: to them every window starts at 6.
    (3) and (4) take all 2 epochs after a window's last whole block as pruned.
    (4) sees -2 epochs in the last window, which ends before epoch 6: taken as 0.
    """
    w, a, r = schedule.window, schedule.starting_point, schedule.block
    remarks, rest, last = list[str](), (w - a) % r, n % w
    if schedule.starts_at(n) != a:
        remarks.append(f"The formulas know no attenuation: to them every window starts at {a}.")
    if rest and n >= w:
        epochs = "the epoch" if rest == 1 else f"all {rest} epochs"
        remarks.append(f"(3) and (4) take {epochs} after a window's last whole block as pruned.")
    if a <= 1:
        remarks.append(f"(3) and (4) count the first epoch of {'the run' if a else 'a window'}, which is never pruned.")
    if 0 < last < a:
        remarks.append(f"(4) sees {last - a} epochs in the last window, which ends before epoch {a}: taken as 0.")
    elif last and a:
        remarks.append(f"(4) sees {last - a} epochs from {a} to {last} of the last window; there is one more.")
    return tuple(remarks)
