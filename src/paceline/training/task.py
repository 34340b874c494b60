"""What is trained, on what, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from paceline.codecs import Codec
from paceline.codecs.floats import Identity
from paceline.data import Augmentation, Dataset, NoAugmentation
from paceline.data.pruning import PruningSettings
from paceline.optim import OptimizerSettings


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, on what, and how.

    `worker_draws` is how many batches a worker is expected to draw in the whole run (None: as many as there are steps),
    for pruning that asks how far the run is.

    >>> Training.__dataclass_fields__["batch_size"].default
    32
    """

    module: nn.Module
    dataset: Dataset
    shards: Sequence[torch.Tensor]
    optimizer: OptimizerSettings
    total_steps: int
    batch_size: int = 32
    blocks: int = 4
    seed: int = 0
    augmentation: Augmentation = field(default_factory=NoAugmentation)
    evaluation_samples: int = 5000
    codec: Codec = field(default_factory=Identity)
    pruning: PruningSettings = field(default_factory=PruningSettings)
    worker_draws: int | None = None
