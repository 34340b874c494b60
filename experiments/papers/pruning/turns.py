"""Take turns: easy samples sit out in turns instead of by lot. A policy of our own that was tried, and not kept.

    easy        as in InfoBatch: the loss when it was last seen is below the mean of all
    a turn      keep the easy sample i in epoch e if  frac(lot_i + e (1 - ratio)) < 1 - ratio,  with one lot for the run

    ratio 0.6        epoch   1 2 3 4 5 6 7 8 9 10
    by lot                   # . . # . . . . . #          each epoch is drawn for itself: some are not seen for long
    in turns                 . # . # . . # . # .          2 of every 5, never apart by more than 3

Over the lots a sample is kept with probability 1 - ratio in each epoch, so weighing it 1 / (1 - ratio) makes the
expected sum of gradients that of all samples, as in InfoBatch. But what one epoch leaves out the next ones bring: over
several epochs each easy sample has come nearly as often as it should, where lots would differ by the square root of
that. Less noise allows a larger ratio; and scores are never old.

It saves 4 points more samples than InfoBatch, and in the table of the experiment `pruning` it loses a little more too:
that is no gain, so it is here to be measured, and not in the library.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.data.pruning.info_batch import InfoPolicy
from paceline.data.pruning.policy import chunks
from paceline.data.pruning.sampler import PrunedBatches


class TurnsPolicy(InfoPolicy):
    """The policy: the easy of `samples` samples take turns.

    >>> policy = TurnsPolicy(4, ratio=0.5, seed=0)
    >>> seen = np.zeros(4, int)
    >>> for epoch in range(1, 10):
    ...     kept = policy.decide(epoch).keep
    ...     seen += 1 if kept is None else kept
    ...     policy.judge(epoch, np.arange(4), np.array([1, 9, 1, 9], np.float32), np.array([4]))
    >>> seen
    array([5, 9, 5, 9])
    """

    name: ClassVar[str] = "take-turns"

    def __init__(self, samples: int, *, ratio: float = 0.6, delta: float = 0.875, seed: int = 0) -> None:
        super().__init__(samples, ratio=ratio, delta=delta, seed=seed)

    def draw_kept(self, epoch: int) -> NDArray[np.bool_]:
        """Return whose turn it is."""
        share, lots = 1 - self.ratio, self.generator("turns", 0)
        turn = np.empty(self.samples, np.bool_)
        for part in chunks(self.samples):
            turn[part] = (lots.random(len(turn[part]), np.float32) + np.float32(epoch * share % 1)) % 1 < share
        return turn


class TakeTurns(PrunedBatches):
    """The sampler: `ratio` of those below the mean loss sit out in each epoch.

    >>> sampler = TakeTurns(8, batch_size=4, epochs=12, ratio=0.5)
    >>> len(sampler)
    2
    """

    def __init__(
        self,
        samples: int,
        *,
        batch_size: int,
        epochs: int,
        ratio: float = 0.6,
        delta: float = 0.875,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        policy = TurnsPolicy(samples, ratio=ratio, delta=delta, seed=seed)
        super().__init__(policy, batch_size=batch_size, epochs=epochs, drop_last=drop_last)
