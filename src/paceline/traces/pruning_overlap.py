"""Whether two runs prune the same samples: the overlap of their most pruned tenths, beside that of two chance tenths.

    A, B        the most pruned tenth of each run, by times pruned
    overlap     |A and B| / |A or B|  (Jaccard)               0: nobody in common, 1: the same samples
    by chance   two random tenths of n samples share n / 100 of them: 0.01 / 0.19 = 0.053

Where samples are equal at the limit of a tenth, each of them is in it with the share of them that has room: an order of
their numbers would make two runs look alike. So counts may be fractions. Samples that never sat out are in no tenth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.traces.pruning_record import PruningRecord

TENTH = 0.1


@dataclass(frozen=True, kw_only=True, eq=False)
class PruningOverlap:
    """The overlap of the most pruned of two runs on the same samples.

    `memberships` say for every sample how far it is among the most pruned of each run: 0, 1, or between where it is
    one of several equals at the limit.

    >>> found = overlap_of([5, 4, 0, 0], [5, 0, 4, 0], share=0.5)
    >>> found.sizes, found.shared, round(found.jaccard, 3), round(found.chance, 3)
    ((2, 2), 1.0, 0.333, 0.333)
    """

    samples: int
    share: float
    memberships: tuple[NDArray[np.float64], NDArray[np.float64]]

    @property
    def sizes(self) -> tuple[int, int]:
        """How many samples are among the most pruned of each run: fewer than a tenth, if fewer ever sat out."""
        first, second = (round(float(each.sum())) for each in self.memberships)
        return first, second

    @property
    def shared(self) -> float:
        """The number of samples that are among the most pruned of both."""
        return float(self.memberships[0] @ self.memberships[1])

    @property
    def chance_shared(self) -> float:
        """The number that as many samples, drawn at random for each run, would have in common on average."""
        return self.sizes[0] * self.sizes[1] / self.samples

    @property
    def jaccard(self) -> float:
        """The share of the samples that are among the most pruned of both, of those of either."""
        return self._share_of(self.shared)

    @property
    def chance(self) -> float:
        """The overlap that is expected by chance."""
        return self._share_of(self.chance_shared)

    def _share_of(self, shared: float) -> float:
        either = sum(self.sizes) - shared
        return shared / either if either > 0 else 0.0

    def surely_shared(self) -> NDArray[np.int64]:
        """Return the numbers of the samples that are in both without a tie.

        >>> overlap_of([5, 4, 0, 0], [5, 0, 4, 0], share=0.5).surely_shared()
        array([0])
        """
        first, second = self.memberships
        return np.flatnonzero((first == 1) & (second == 1))


def overlap_of(
    first: Sequence[int] | NDArray[np.uint16],
    second: Sequence[int] | NDArray[np.uint16],
    *,
    share: float = TENTH,
) -> PruningOverlap:
    """Return the overlap of the most pruned `share` of two runs, given how often each sample sat out in each.

    >>> overlap_of([3, 0], [3, 0, 0])
    Traceback (most recent call last):
    ValueError: the runs are of 2 and of 3 samples: they are not on the same data
    """
    times = [np.asarray(each, np.float64) for each in (first, second)]
    if len(times[0]) != len(times[1]):
        raise ValueError(
            f"the runs are of {len(times[0]):,} and of {len(times[1]):,} samples: they are not on the same data"
        )
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1 (share={share})")
    memberships = most_pruned(times[0], share), most_pruned(times[1], share)
    return PruningOverlap(samples=len(times[0]), share=share, memberships=memberships)


def most_pruned(times: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Return how far each sample is among the most pruned: 1 or 0, and between for equals at the limit.

    >>> most_pruned(np.array([3.0, 2.0, 2.0, 0.0]), 0.5)
    array([1. , 0.5, 0.5, 0. ])
    """
    room = min(max(1, int(share * len(times))), int(np.count_nonzero(times)))
    found = np.zeros(len(times))
    if room:
        limit = np.partition(times, len(times) - room)[len(times) - room]
        above, equal = times > limit, times == limit
        found[above] = 1.0
        found[equal] = (room - np.count_nonzero(above)) / np.count_nonzero(equal)
    return found


def overlap_of_records(first: PruningRecord, second: PruningRecord, *, share: float = TENTH) -> PruningOverlap:
    """Return the overlap of two records; refused where they are not of the same data.

    >>> from paceline.traces.pruning_record import empty_record
    >>> overlap_of_records(empty_record(), empty_record()).jaccard
    0.0
    """
    found = overlap_of(first.times_pruned, second.times_pruned, share=share)
    if not np.array_equal(first.label, second.label):
        raise ValueError("the runs have other labels for the same samples: they are not on the same data")
    return found
