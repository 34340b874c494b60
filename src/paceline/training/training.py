"""What is trained, on what and how, and how good the result is."""

from __future__ import annotations

import copy
import math
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """How good a model is: its mean loss on the training data, and its accuracy and mean loss on the test data.

    The accuracy is None where nothing is guessed: targets are numbers, or the loss is of another kind. The test loss is
    None where there is no test data, where it is not finite (the loss says that a run has diverged), and where a user's
    own `evaluate` does not return one.

    >>> Measurement(loss=0.5, accuracy=0.9).test_loss is None
    True
    """

    loss: float
    accuracy: float | None = None
    test_loss: float | None = None


def measure(module: nn.Module, training: Training) -> Measurement:
    """Measure a model on the training data and on the test data, on `evaluation_samples` of each at most.

    The accuracy and the test loss are of the same outputs: test data passes through the model once.

    >>> from paceline.data import load_dataset
    >>> network, digits = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), load_dataset("digits")
    >>> training = Training(module=network, dataset=digits, shards=[], optimizer=OptimizerSettings(), total_steps=1)
    >>> measured = measure(network, training)
    >>> measured.loss > 0 and measured.test_loss > 0 and 0 <= measured.accuracy <= 1
    True
    """
    module.eval()
    most, train, test = training.evaluation_samples, training.dataset.train, training.dataset.test
    # Of a loss of a user's own nobody knows whether outputs are scores of classes, but by their number.
    known = isinstance(training.loss, CrossEntropy) or getattr(training.loss, "of_classes", False)
    classes = None if known else training.dataset.classes
    with torch.no_grad():
        total = sum(float(training.loss.total(module(x), y)) for x, y in train.parts(_EVALUATION_BATCH, most))
        test_total, counts = 0.0, []
        for x, y in test.parts(_EVALUATION_BATCH, most):
            outputs = module(x)
            test_total += float(training.loss.total(outputs, y))
            counts.append(count_right(outputs, y, classes))
    found = [count for count in counts if count is not None]
    right, of = sum(each[0] for each in found), sum(each[1] for each in found)
    return Measurement(
        loss=total / min(most, len(train)),
        accuracy=right / of if of else None,
        test_loss=finite_or_none(test_total / min(most, len(test))) if len(test) else None,
    )


def finite_or_none(value: float | None) -> float | None:
    """Return a number, or None if it is not finite.

    >>> finite_or_none(0.5), finite_or_none(float("inf"))
    (0.5, None)
    """
    return value if value is not None and math.isfinite(value) else None


class MeasuredCopy:
    """A copy of the model that is measured while training goes on: `load` it, then call it, in any thread."""

    def __init__(self, model: nn.Module, evaluate: Callable[[nn.Module], Measurement]) -> None:
        self._copy = FlatModel(copy.deepcopy(model), trained=False)
        self._evaluate = evaluate

    def load(self, model: FlatModel) -> None:
        """Take over the parameters and buffers of the model that is trained."""
        self._copy.load(model.parameters, model.buffers)

    def __call__(self) -> Measurement:
        """Measure the copy."""
        self._copy.module.eval()
        with torch.no_grad():
            return self._evaluate(self._copy.module)
