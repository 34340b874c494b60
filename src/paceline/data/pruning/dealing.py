"""How an epoch's samples are cut into batches and dealt to ranks: as many batches for every rank.

    order      a b c d e f g | h i j k l m n | o p q         3 ranks, batches of 2: 6 samples are a step
               0 0 1 1 2 2     0 0 1 1 2 2     0 0 1 1 2 2
    last step  17 - 12 = 5 samples: two for each rank, and the sixth is the epoch's first sample once more

A step is a batch of a single process that has all the samples of all ranks, so what is learned from a step's mean loss
is what that process would learn. What is met a second time to make the last step even is trained on, and not judged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.data.pruning.numbers import whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """Batches of `batch_size` for one of `ranks` ranks.

    >>> dealing = Dealing(batch_size=2, rank=2, ranks=3)
    >>> dealing.steps(17), dealing.places(2, 17)
    (3, (16, 18))
    """

    batch_size: int
    rank: int = 0
    ranks: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        whole("batch_size", self.batch_size, least=1)
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank must be between 0 and world_size - 1 (rank={self.rank}, world_size={self.ranks})")

    @property
    def step_size(self) -> int:
        """The samples of all ranks in one step.

        >>> Dealing(batch_size=2, ranks=3).step_size
        6
        """
        return self.batch_size * self.ranks

    def steps(self, samples: int) -> int:
        """How many steps so many samples take.

        >>> Dealing(batch_size=4).steps(9), Dealing(batch_size=4, drop_last=True).steps(9)
        (3, 2)
        """
        return samples // self.step_size if self.drop_last else -(-samples // self.step_size)

    def places(self, step: int, samples: int) -> tuple[int, int]:
        """Where this rank's batch begins and ends in the order; places from `samples` on are the first ones again.

        >>> Dealing(batch_size=4).places(2, 9)
        (8, 9)
        """
        start, size = step * self.step_size, self.batch_size
        if start + self.step_size > samples:
            size = -(-(samples - start) // self.ranks)
        return start + self.rank * size, start + (self.rank + 1) * size

    def ends(self, samples: int) -> NDArray[np.int64]:
        """Where each step ends in the order.

        >>> Dealing(batch_size=4).ends(9)
        array([4, 8, 9])
        """
        return np.minimum(np.arange(1, self.steps(samples) + 1) * self.step_size, samples)
