"""Which shares hold for which step, and how a step's samples are dealt by them.

A loader fetches ahead, each rank as far as it likes. So new shares hold from a place on that no rank has handed out:

    steps          0   1   2   3   4   5   6   7   8   9
    rank 0         ##  ##  ##  ##  ##  ##  .                 has handed out up to 5
    rank 1         ##  ##  ##  ##  ##  ##  ##  .             has handed out up to 6
    all ranks look             ^ at the end of step 3
    new shares     old old old old old old old new new new   from 7 on, the furthest place that was said

A place is (pass, step): passes over the loader are counted as they are trained, alike on all ranks, so that one that
was broken off leaves nobody in another place. The samples of a step do not depend on shares, only who computes which:

    order   | step 0: batch_size samples          | step 1                              | the rest   |
            | rank 0      | rank 1      | rank 2  | rank 0        | rank 1    | rank 2  | r0 | r1 | r2|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from paceline.errors import PacelineError
from paceline.strategies.shares import deal_rest

Place: TypeAlias = tuple[int, int]  # the number of a pass, and of a step in it


class BalanceError(PacelineError, RuntimeError):
    """Ranks that share batches do not agree, or batches are not trained as they were dealt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtBatch:
    """One rank's batch of a step: so many samples of all that the step has, from `first` on.

    A rank for which there is no sample has `samples=0`: it computes on others', with the weight 0.

    >>> DealtBatch(samples=30, total=80, first=50, ranks=4).weight
    1.5
    """

    samples: int
    total: int
    first: int
    ranks: int

    @property
    def weight(self) -> float:
        """What the mean of this rank's samples is multiplied by, so that the mean over ranks is that over samples."""
        return self.ranks * self.samples / self.total


class ShareSchedule:
    """The shares of all ranks by place; a rank that takes part in a step has at least `least`, at most its `most`.

    >>> schedule = ShareSchedule([40, 40], least=1)
    >>> schedule.change((0, 7), [50, 30])
    >>> schedule.at((0, 6)), schedule.at((0, 7)), schedule.at((1, 0))
    ((40, 40), (50, 30), (50, 30))
    >>> schedule.deal((0, 7), 8, rank=1)
    DealtBatch(samples=3, total=8, first=5, ranks=2)
    """

    def __init__(self, shares: Sequence[int], *, least: int, most: Sequence[int | None] | None = None) -> None:
        self.least, self.most = least, most
        self._changes: list[tuple[Place, tuple[int, ...]]] = [((-1, 0), tuple(shares))]

    @property
    def newest(self) -> tuple[int, ...]:
        """The shares that hold from now on, or will as soon as all that was handed out is trained."""
        return self._changes[-1][1]

    def at(self, place: Place) -> tuple[int, ...]:
        """Return the shares that hold at a place."""
        return next(shares for since, shares in reversed(self._changes) if since <= place)

    def change(self, place: Place, shares: Sequence[int]) -> None:
        """Let other shares hold from this place on, which is beyond all places that were handed out."""
        self._changes = [(since, held) for since, held in self._changes if since < place]
        self._changes.append((place, tuple(shares)))

    def forget(self, before: Place) -> None:
        """Forget shares that no place from here on has."""
        kept = [(since, shares) for since, shares in self._changes if since > before]
        self._changes = [(before, self.at(before)), *kept]

    def deal(self, place: Place, samples: int, *, rank: int) -> DealtBatch:
        """Return a rank's batch of a step that has so many samples."""
        shares: Sequence[int] = self.at(place)
        if samples != sum(shares):
            shares = deal_rest(shares, samples, least=self.least, most=self.most)
        first = list(accumulate(shares, initial=0))[rank]
        return DealtBatch(samples=shares[rank], total=samples, first=first, ranks=len(shares))
