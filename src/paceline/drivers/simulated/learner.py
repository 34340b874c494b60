"""The training inside a simulation: the tasks of a step -> gradients -> update -> a better model.

Gradients are computed when a step asks for them, at the version they were begun at: those of one version in one
pass, those that nobody asks for never.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.drivers.simulated.cluster import Closed
from paceline.drivers.simulated.task import Task
from paceline.events import LossSeen
from paceline.optim import make_optimizer
from paceline.training import Batches, Trainee, Training, measure
from paceline.workers.engine import make_engine
from paceline.workers.threads import threads_for


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
        module = copy.deepcopy(training.module)
        optimizer, schedule = make_optimizer(training.optimizer, module.parameters(), total_steps=training.total_steps)
        self._trainee = Trainee(module, optimizer, schedule)
        self._model = self._trainee.model
        self._engine = make_engine(training.module)
        self._batches = Batches(training)
        self._snapshots = {0: self._snapshot()}

    @property
    def parameters(self) -> torch.Tensor:
        """The model's parameters as they are now, in one vector."""
        return self._model.parameters

    @property
    def message_bytes(self) -> int:
        """What a gradient or the model weighs on the wire."""
        return self._training.codec.most_bytes(self._model.parameters.numel()) + 4 * self._model.buffers.numel()

    def take(self, closed: Closed, *, oldest_version: int) -> list[LossSeen] | None:
        """Take the step and tell the losses; None if the update is not finite, and the model stays as it was."""
        with threads_for(self._model.parameters.numel()):
            return self._take(closed, oldest_version)

    def _take(self, closed: Closed, oldest_version: int) -> list[LossSeen] | None:
        rows = self._rows((*closed.late, *closed.fresh))
        shares = (*closed.step.late, *closed.step.fresh)
        found = {(share.worker, share.version): row.gradient for share, row in zip(shares, rows, strict=True)}
        changes = [row.buffers - self._snapshots[row.loss.version][1] for row in rows]
        if not self._trainee.take(closed.step, lambda share: found[share.worker, share.version], changes):
            return None
        version = self._trainee.version
        self._snapshots[version] = self._snapshot()
        self._snapshots = {v: kept for v, kept in self._snapshots.items() if v >= min(oldest_version, version)}
        return [row.loss for row in rows]

    def evaluate(self) -> tuple[float, float]:
        """Mean loss on the training data (at most `evaluation_samples` of it), accuracy on the test data."""
        with threads_for(self._model.parameters.numel()):
            return measure(self._model.module, self._training.dataset, self._training.evaluation_samples)

    def _snapshot(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The model as workers get it."""
        return self._travelled(self._model.parameters).clone(), self._model.buffers

    def _travelled(self, vector: torch.Tensor) -> torch.Tensor:
        codec = self._training.codec
        return codec.decode(codec.encode(vector))

    def _rows(self, tasks: Sequence[Task]) -> list[_Row]:
        """What each task comes to; the tasks of one version are computed together."""
        assignments = [
            self._batches.assignment(
                worker=task.worker, draw=task.draw, blocks=task.blocks, blocks_done=task.blocks_done
            )
            for task in tasks
        ]
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
                rows[index] = _Row(gradient=self._travelled(gradient), buffers=buffers, loss=loss)
        return [rows[index] for index in range(len(tasks))]
