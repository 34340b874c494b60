"""The training inside a simulation: the tasks of a step -> gradients -> update -> a better model.

Gradients are computed when a step asks for them, at the version they were begun at: those of one version in one
pass, those that nobody asks for never.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from paceline.data import Augmentation, BatchOrder, Dataset, NoAugmentation, Samples
from paceline.drivers.simulated.cluster import Closed
from paceline.drivers.simulated.task import Task
from paceline.events import LossSeen
from paceline.optim import OptimizerSettings, make_optimizer
from paceline.randomness import seed_for, torch_generator
from paceline.strategies.combine import Combiner
from paceline.workers.assignment import Assignment
from paceline.workers.engine import make_engine
from paceline.workers.flat import FlatModel
from paceline.workers.threads import threads_for

_EVALUATION_BATCH = 512


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, on what, and how.

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    """What one task comes to."""

    gradient: torch.Tensor
    buffers: torch.Tensor
    loss: LossSeen


class Learner:
    """Holds the model, and moves it one step at a time."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._model = FlatModel(copy.deepcopy(training.module))
        if self._model.parameters.dtype is not torch.float32:
            raise ValueError(f"the model must be float32 (it is {self._model.parameters.dtype}); call .float() on it")
        self._engine = make_engine(training.module)
        self._optimizer, self._schedule = make_optimizer(
            training.optimizer, self._model.module.parameters(), total_steps=training.total_steps
        )
        self._combiner = Combiner()
        self._orders = [
            BatchOrder(shard, training.batch_size, seed=training.seed, worker=worker)
            for worker, shard in enumerate(training.shards)
        ]
        self._drawn = [0] * len(self._orders)
        self._version = 0
        self._snapshots = {0: self._snapshot()}
        self._train, self._test = training.dataset.train, training.dataset.test

    @property
    def parameters(self) -> torch.Tensor:
        """The model's parameters as they are now, in one vector."""
        return self._model.parameters

    @property
    def message_bytes(self) -> int:
        """What a gradient or the model weighs on the wire."""
        return self._model.message_bytes

    def take(self, closed: Closed, *, oldest_version: int) -> list[LossSeen] | None:
        """Take the step and tell the losses; None if the update is not finite, and the model stays as it was."""
        with threads_for(self._model.parameters.numel()):
            return self._take(closed, oldest_version)

    def _take(self, closed: Closed, oldest_version: int) -> list[LossSeen] | None:
        rows = self._rows((*closed.late, *closed.fresh))
        shares = (*closed.step.late, *closed.step.fresh)
        found = {(share.worker, share.version): row.gradient for share, row in zip(shares, rows, strict=True)}
        update = self._combiner.update(closed.step, lambda share: found[share.worker, share.version])
        if not bool(torch.isfinite(update).all()):
            return None
        self._model.gradient.copy_(update)
        self._optimizer.step()
        self._schedule.step()
        self._move_buffers(rows, weight=min(1.0, sum(share.weight for share in closed.step.fresh)))
        self._version += 1
        self._snapshots[self._version] = self._snapshot()
        self._snapshots = {v: kept for v, kept in self._snapshots.items() if v >= min(oldest_version, self._version)}
        return [row.loss for row in rows]

    def _move_buffers(self, rows: Sequence[_Row], *, weight: float) -> None:
        """BatchNorm's statistics: the mean of what the step's workers changed; a stale gradient's weigh as it does."""
        if self._model.buffers.numel():
            changes = [row.buffers - self._snapshots[row.loss.version][1] for row in rows]
            self._model.load_buffers(self._model.buffers + weight * torch.stack(changes).mean(0))

    def evaluate(self) -> tuple[float, float]:
        """Mean loss on the training data (at most `evaluation_samples` of it), accuracy on the test data."""
        limit = self._training.evaluation_samples
        with threads_for(self._model.parameters.numel()):
            loss, _ = self._measure(self._train, limit)
            _, accuracy = self._measure(self._test, limit)
        return loss, accuracy

    def _snapshot(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._model.parameters.clone(), self._model.buffers

    def _rows(self, tasks: Sequence[Task]) -> list[_Row]:
        """What each task comes to; the tasks of one version are computed together."""
        assignments = [self._assignment(task) for task in tasks]
        rows: dict[int, _Row] = {}
        for version in sorted({task.version for task in tasks}):
            chosen = [index for index, task in enumerate(tasks) if task.version == version]
            result = self._engine.compute(*self._snapshots[version], [assignments[index] for index in chosen])
            losses = zip(result.losses.tolist(), result.loss_variances.tolist(), strict=True)
            for index, gradient, buffers, (mean, variance) in zip(
                chosen, result.gradients, result.buffers, losses, strict=True
            ):
                loss = LossSeen(
                    worker=tasks[index].worker,
                    version=version,
                    mean=mean,
                    variance=variance,
                    samples=assignments[index].samples_done,
                )
                rows[index] = _Row(gradient=gradient, buffers=buffers, loss=loss)
        return [rows[index] for index in range(len(tasks))]

    def _assignment(self, task: Task) -> Assignment:
        indices = self._batch(task)
        generator = torch_generator(self._training.seed, "augment", task.worker, task.draw)
        return Assignment(
            inputs=self._training.augmentation(self._train.inputs[indices], generator),
            targets=self._train.targets[indices],
            blocks=task.blocks,
            blocks_done=task.blocks_done,
            seed=seed_for(self._training.seed, "pass", task.worker, task.draw),
        )

    def _batch(self, task: Task) -> torch.Tensor:
        """The worker's batch number `draw`. A worker's tasks are asked for in order; some never are."""
        while True:
            indices = self._orders[task.worker].next()
            self._drawn[task.worker] += 1
            if self._drawn[task.worker] > task.draw:
                return indices

    @torch.no_grad()
    def _measure(self, samples: Samples, limit: int) -> tuple[float, float]:
        self._model.module.eval()
        inputs, targets = samples.inputs[:limit], samples.targets[:limit]
        loss, right = 0.0, 0
        for x, y in zip(torch.split(inputs, _EVALUATION_BATCH), torch.split(targets, _EVALUATION_BATCH), strict=True):
            outputs = self._model.module(x)
            loss += float(F.cross_entropy(outputs, y, reduction="sum"))
            right += int((outputs.argmax(1) == y).sum())
        return loss / len(inputs), right / len(inputs)
