"""What is trained, on what and how, and how good the result is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from paceline.codecs import Codec
from paceline.codecs.floats import Identity
from paceline.data import Augmentation, Dataset, NoAugmentation, Samples
from paceline.data.pruning import PruningSettings
from paceline.optim import OptimizerSettings
from paceline.workers.flat import FlatModel

_EVALUATION_BATCH = 512


@dataclass(frozen=True, kw_only=True)
class Training:
    """The model, the data and each worker's shard of it, the optimiser, and the sizes of batches: one training.

    `blocks` is into how many equal parts a worker's batch is cut; a late worker stops between two. `total_steps` is for
    the learning rate's schedule. `evaluation_samples` are measured at most, of the training data and of the test data.
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


def measure(module: nn.Module, dataset: Dataset, most_samples: int) -> tuple[float, float]:
    """Return the mean loss on the training data, and the accuracy on the test data, of at most so many samples each.

    >>> from paceline.data import load_dataset
    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    >>> loss, accuracy = measure(network, load_dataset("digits"), 100)
    >>> loss > 0 and 0 <= accuracy <= 1
    True
    """
    loss, _ = _measure(module, dataset.train, most_samples)
    _, accuracy = _measure(module, dataset.test, most_samples)
    return loss, accuracy


class MeasuredCopy:
    """A copy of the model that is measured while training goes on: `load` it, then call it, in any thread."""

    def __init__(self, model: nn.Module, evaluate: Callable[[nn.Module], tuple[float, float]]) -> None:
        self._copy = FlatModel(copy.deepcopy(model), trained=False)
        self._evaluate = evaluate

    def load(self, model: FlatModel) -> None:
        """Take over the parameters and buffers of the model that is trained."""
        self._copy.load(model.parameters, model.buffers)

    def __call__(self) -> tuple[float, float]:
        """Return the loss and accuracy of the copy."""
        self._copy.module.eval()
        with torch.no_grad():
            return self._evaluate(self._copy.module)


@torch.no_grad()
def _measure(module: nn.Module, samples: Samples, most_samples: int) -> tuple[float, float]:
    module.eval()
    inputs, targets = samples.inputs[:most_samples], samples.targets[:most_samples]
    loss, right = 0.0, 0
    for x, y in zip(torch.split(inputs, _EVALUATION_BATCH), torch.split(targets, _EVALUATION_BATCH), strict=True):
        outputs = module(x)
        loss += float(F.cross_entropy(outputs, y, reduction="sum"))
        right += int((outputs.argmax(1) == y).sum())
    return loss / len(inputs), right / len(inputs)
