"""When fine-pruning prunes: later in each window, some epochs of each block; earlier in every window than in the last.

    window 12, starting point 6, attenuation 2, block 4, count 2          # pruned   . whole

    epoch   1          12          24          36
            |          |           |           |
            .......##......##..##...#..##..##...#..##..##...
            from the 6th  the 3rd     the 1st     the 0th epoch of the window on

An epoch e is pruned when e mod window >= the starting point of its window and e mod block < count. The starting point
is divided by the attenuation, and truncated, once per window. (The paper's listing, read to the letter, divides it in
every epoch, and reaches 0 within a few; its text says that it is done from window to window.)
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from fractions import Fraction

from paceline.data.pruning.numbers import real, whole

LONGEST_WINDOW = 65_535  # counts are 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class FineSchedule:
    """Which epochs are pruned, and how many samples then sit out.

    `prune` is a share of the samples (a float below 1) or a number of samples (an int).

    >>> schedule = FineSchedule(window=12, starting_point=6, attenuation=2, block=4, count=2, prune=0.3)
    >>> [epoch for epoch in range(1, 25) if schedule.is_pruned(epoch)]
    [8, 9, 16, 17, 20, 21]
    >>> schedule.prune_num(1000)
    300
    """

    window: int = 60
    starting_point: int = 30
    attenuation: float = 2
    block: int = 4
    count: int = 2
    prune: float | int = 0.3

    def __post_init__(self) -> None:
        whole("window", self.window, least=1, most=LONGEST_WINDOW)
        whole("block", self.block, least=1)
        whole("starting_point", self.starting_point, least=0)
        whole("count", self.count, least=0)
        if self.starting_point > self.window:
            raise ValueError(
                f"starting_point must be between 0 and window "
                f"(starting_point={self.starting_point}, window={self.window})"
            )
        if real("attenuation", self.attenuation) < 1:
            raise ValueError(f"attenuation must be at least 1 (attenuation={self.attenuation})")
        if self.count > self.block:
            raise ValueError(f"count must be between 0 and block (count={self.count}, block={self.block})")
        self._check_prune()

    def _check_prune(self) -> None:
        """A whole number is a number of samples, any other a share."""
        if real("prune", self.prune) < 0:
            raise ValueError(f"prune must be at least 0 (prune={self.prune})")
        if not self._is_number and self.prune >= 1:
            raise ValueError(
                f"prune, as a share, must be at least 0 and below 1 (prune={self.prune}); an int is a number of samples"
            )

    @property
    def _is_number(self) -> bool:
        return isinstance(self.prune, numbers.Integral)

    def window_of(self, epoch: int) -> int:
        """The number of the window that an epoch is in.

        >>> FineSchedule(window=60).window_of(60)
        1
        """
        return epoch // self.window

    def starts_at(self, epoch: int) -> int:
        """The starting point of the window that an epoch is in.

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
        """Whether samples sit this epoch out, if any have been counted since its window began.

        In the first epoch of a window none have.

        >>> FineSchedule(window=4, starting_point=0, block=1, count=1).is_pruned(4)
        False
        """
        if epoch == 1 or epoch % self.window == 0:
            return False
        return epoch % self.window >= self.starts_at(epoch) and epoch % self.block < self.count

    def prune_num(self, samples: int) -> int:
        """How many samples sit out in a pruned epoch.

        >>> FineSchedule(prune=10).prune_num(10)
        Traceback (most recent call last):
        ValueError: prune must leave at least one sample (prune=10, samples=10); give 9 or fewer, or a share below 1
        """
        share = Fraction(repr(float(self.prune)))  # as it was written: 0.29 of 100 is 29, not 28.999
        number = int(self.prune) if self._is_number else math.floor(share * samples)
        if number >= samples:
            raise ValueError(
                f"prune must leave at least one sample (prune={self.prune}, samples={samples}); "
                f"give {samples - 1} or fewer, or a share below 1"
            )
        return number
