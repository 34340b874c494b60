"""What is trained, on what and how, and how good the result is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from paceline.codecs import Codec
from paceline.codecs.floats import Identity
from paceline.data import Augmentation, Dataset, NoAugmentation
from paceline.data.pruning import PruningSettings
from paceline.exchanges.plans import AUTO
from paceline.optim import OptimizerSettings
from paceline.workers.flat import FlatModel
from paceline.workers.losses import CrossEntropy, SampleLoss, count_right

_EVALUATION_BATCH = 512


@dataclass(frozen=True, kw_only=True)
class Training:
    """The model, the data and each worker's shard of it, the loss, the optimiser, the sizes of batches: one training.

    `blocks` is into how many equal parts a worker's batch is cut; a late worker stops between two. `total_steps` is for
    the learning rate's schedule. `evaluation_samples` are measured at most, of the training data and of the test data.
    `plan` is how averages of encoded changes come to their sum (`paceline.exchanges`); a server has none.
    `worker_draws` is how many batches a worker is expected to draw in the whole run (None: as many as there are steps),
    for pruning that asks how far the run is. `passes` are those of every worker over its shard after which a simulated
    run that prunes ends, if it ends by them.

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
    plan: str = AUTO
    pruning: PruningSettings = field(default_factory=PruningSettings)
    worker_draws: int | None = None
    passes: int | None = None
    loss: SampleLoss = field(default_factory=CrossEntropy)


def measure(module: nn.Module, training: Training) -> tuple[float, float | None]:
    """Return the mean loss on the training data and the accuracy on the test data, of `evaluation_samples` each.

    The accuracy is None where nothing is guessed: targets are numbers, or the loss is of another kind.

    >>> from paceline.data import load_dataset
    >>> network, digits = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), load_dataset("digits")
    >>> training = Training(module=network, dataset=digits, shards=[], optimizer=OptimizerSettings(), total_steps=1)
    >>> loss, accuracy = measure(network, training)
    >>> loss > 0 and 0 <= accuracy <= 1
    True
    """
    module.eval()
    most, train, test = training.evaluation_samples, training.dataset.train, training.dataset.test
    # Of a loss of a user's own nobody knows whether outputs are scores of classes, but by their number.
    known = isinstance(training.loss, CrossEntropy) or getattr(training.loss, "of_classes", False)
    classes = None if known else training.dataset.classes
    with torch.no_grad():
        total = sum(float(training.loss.total(module(x), y)) for x, y in train.parts(_EVALUATION_BATCH, most))
        counts = [count_right(module(x), y, classes) for x, y in test.parts(_EVALUATION_BATCH, most)]
    found = [count for count in counts if count is not None]
    right, of = sum(each[0] for each in found), sum(each[1] for each in found)
    return total / min(most, len(train)), right / of if of else None


class MeasuredCopy:
    """A copy of the model that is measured while training goes on: `load` it, then call it, in any thread."""

    def __init__(self, model: nn.Module, evaluate: Callable[[nn.Module], tuple[float, float | None]]) -> None:
        self._copy = FlatModel(copy.deepcopy(model), trained=False)
        self._evaluate = evaluate

    def load(self, model: FlatModel) -> None:
        """Take over the parameters and buffers of the model that is trained."""
        self._copy.load(model.parameters, model.buffers)

    def __call__(self) -> tuple[float, float | None]:
        """Return the loss and accuracy of the copy."""
        self._copy.module.eval()
        with torch.no_grad():
            return self._evaluate(self._copy.module)
