"""Who knows how many samples each rank has in a batch: of a model that is trained with batches of different sizes.

`paceline.Balance` puts itself here, and `Accumulate` asks: the parts of a group then weigh by the samples of all ranks.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class RankSamples(Protocol):
    """What `Accumulate` asks of whoever deals batches to ranks."""

    def rank_samples(self) -> tuple[float, float] | None:
        """Return the samples of the batch under way, of this rank and on average over the ranks; None outside."""

    def mean_of(self, samples: float) -> float:
        """Return the mean over all ranks of what each of them gives. All must call it."""

    def weighing_groups(self, steps: int) -> AbstractContextManager[None]:
        """Leave the weights to whoever adds up the gradients of `steps` batches; entered anew for each of them."""


RANK_SAMPLES: weakref.WeakKeyDictionary[torch.nn.Module, RankSamples] = weakref.WeakKeyDictionary()
