"""What a record of pruning comes to: who was pruned again and again, of which class, and who is to be shown.

"Most pruned" goes by times pruned and "hardest" by difficulty. They may be the same samples (a policy that leaves out
the hard ones) or opposite ones (a policy that leaves out the easy ones); which of both is found in the record, by
whether difficulty rises with times pruned, and not from the policy's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.traces.pruning_record import PruningRecord
from paceline.traces.suspects import looks_wrong, suspects

OFTEN = 0.1  # those pruned most often are about so large a share of all samples
MOST_BINS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFacts:
    """One class: how many samples, how many prunings, how many labels that look wrong.

    >>> ClassFacts(name="cat", number=0, samples=10, share=0.5, prunings=30, pruned_share=0.75, wrong=1).beyond
    1.5
    """

    name: str
    number: int
    samples: int
    share: float
    prunings: int
    pruned_share: float
    wrong: int

    @property
    def beyond(self) -> float:
        """Share of the prunings over share of the samples: above 1, the class is pruned more than others."""
        return self.pruned_share / self.share if self.share else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Samples that were pruned so many times, and how many of their labels look wrong.

    >>> Bin(first=3, last=4, samples=10, wrong=2).text
    '3-4'
    """

    first: int
    last: int
    samples: int
    wrong: int

    @property
    def text(self) -> str:
        """Which times these are."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


class PruningFacts:
    """Numbers out of a record; computed when they are asked for.

    >>> from paceline.traces.pruning_record import empty_record
    >>> PruningFacts(empty_record()).prunings
    0
    """

    def __init__(self, record: PruningRecord) -> None:
        self.record = record
        self.prunings = record.prunings

    @cached_property
    def wrong(self) -> NDArray[np.bool_]:
        """Of each sample, whether its label looks wrong."""
        return looks_wrong(self.record)

    @cached_property
    def suspects(self) -> NDArray[np.int64]:
        """Samples whose label looks wrong, the surest first."""
        return suspects(self.record)

    @cached_property
    def often_times(self) -> int:
        """From how many times on a sample is among those pruned most often; 0 if nothing was pruned."""
        place = int(np.ceil(OFTEN * self.record.samples)) - 1
        at = int(np.partition(self.record.times_pruned, -1 - place)[-1 - place])
        return max(at, 1) if self.prunings else 0

    @cached_property
    def often(self) -> NDArray[np.bool_]:
        """Who was pruned most often: about a tenth, and everybody who is equal to its last."""
        if not self.prunings:
            return np.zeros(self.record.samples, np.bool_)
        return np.asarray(self.record.times_pruned >= self.often_times)

    @cached_property
    def often_share(self) -> float:
        """The share of all prunings that fell on those."""
        return float(self.record.times_pruned[self.often].sum(dtype=np.int64) / max(self.prunings, 1))

    @cached_property
    def prunes_the_hard(self) -> bool:
        """Whether difficulty rises with times pruned (else it falls, or there is nothing to tell it by)."""
        times = self.record.times_pruned.astype(np.float64)
        ranks = np.empty(len(times))
        ranks[np.argsort(self.record.difficulty, kind="stable")] = np.arange(len(times))
        return bool(((times - times.mean()) * (ranks - ranks.mean())).sum() > 0)

    @cached_property
    def by_times(self) -> NDArray[np.int64]:
        """All samples, the most pruned first; among equals who is more of the kind that is pruned."""
        towards = self.record.difficulty if self.prunes_the_hard else -self.record.difficulty
        order = np.lexsort((np.arange(self.record.samples), -towards, -self.record.times_pruned.astype(np.int64)))
        return np.asarray(order, dtype=np.int64)

    def most_pruned(self, label: int, number: int) -> NDArray[np.int64]:
        """The most pruned of a class; nobody who was never pruned."""
        mine = self._of(label)
        return mine[self.record.times_pruned[mine] > 0][:number]

    def least_pruned(self, label: int, number: int) -> NDArray[np.int64]:
        """The least pruned of a class, none of whom is among its `number` most pruned."""
        mine = self._of(label)
        return mine[len(self.most_pruned(label, number)) :][::-1][:number]

    def _of(self, label: int) -> NDArray[np.int64]:
        return np.asarray(self.by_times[self.record.label[self.by_times] == label], dtype=np.int64)

    @cached_property
    def classes(self) -> list[ClassFacts]:
        """Every class, in their order."""
        record, many = self.record, len(self.record.classes)
        held = np.bincount(record.label, minlength=many)
        pruned = np.bincount(record.label, weights=record.times_pruned, minlength=many)
        wrong = np.bincount(record.label, weights=self.wrong, minlength=many)
        return [
            ClassFacts(
                name=name,
                number=number,
                samples=int(held[number]),
                share=float(held[number] / record.samples),
                prunings=int(pruned[number]),
                pruned_share=float(pruned[number] / max(self.prunings, 1)),
                wrong=int(wrong[number]),
            )
            for number, name in enumerate(record.classes)
        ]

    @cached_property
    def bins(self) -> list[Bin]:
        """Times pruned, counted: a bin for each, or for several where there are many."""
        times = self.record.times_pruned
        wide = -(-(int(times.max()) + 1) // MOST_BINS)
        held = np.bincount(times // wide)
        wrong = np.bincount(times // wide, weights=self.wrong)
        return [
            Bin(first=at * wide, last=at * wide + wide - 1, samples=int(held[at]), wrong=int(wrong[at]))
            for at in range(len(held))
        ]
