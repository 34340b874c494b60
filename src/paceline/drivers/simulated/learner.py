"""The training inside a simulation: the tasks of a step -> gradients -> update -> a better model.

Gradients are computed when a step asks for them, at the version they were begun at: those of one version in one
pass, those that nobody asks for never. Where a codec remembers, a payload's size depends on what is in it, or samples
are pruned (what a worker draws next depends on the losses of what it sent), each is computed as it is sent.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.codecs.vectors import NotFiniteError
from paceline.drivers.simulated.cluster import Closed
from paceline.drivers.simulated.task import Task
from paceline.events import LossSeen
from paceline.optim import make_optimizer
from paceline.training import Batches, Senders, Trainee, Training, measure
from paceline.workers.engine import make_engine
from paceline.workers.threads import threads_for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    """What one task comes to."""

    gradient: torch.Tensor | None  # None: it is not finite, and cannot be sent
    payload_bytes: int
    buffers: torch.Tensor
    loss: LossSeen


class Learner:
    """Holds the model, and moves it one step at a time."""

    def __init__(self, training: Training) -> None:
        self._training = training
        module = copy.deepcopy(training.module)
        optimizer, schedule = make_optimizer(training.optimizer, module.parameters(), total_steps=training.total_steps)
        self._trainee = Trainee(module, optimizer, schedule, codec=training.codec, seed=training.seed)
        self._model = self._trainee.model
        self._senders = Senders(training.codec, self._model.shapes, seed=training.seed)
        self.batches = Batches(training)
        prunes = self.batches.pruned is not None
        self._at_once = self._senders.remember or not training.codec.fixed_size or prunes
        self._sent: dict[tuple[int, int], _Row] = {}
        self._engine = make_engine(training.module)
        self._snapshots = {0: self._snapshot()}
        self._update_bytes: dict[int, int] = {}
        self.taken: deque[list[LossSeen] | None] = deque()

    @property
    def parameters(self) -> torch.Tensor:
        """The model's parameters as they are now, in one vector."""
        return self._model.parameters

    @property
    def module(self) -> torch.nn.Module:
        """The model as it is now."""
        return self._model.module

    # -- what messages weigh -----------------------------------------------------------------------------------

    def up_bytes(self, task: Task) -> int:
        """What the gradient of a task weighs, which is being sent now."""
        if not self._at_once:
            return self._codec_bytes + self._buffer_bytes
        with threads_for(self._model.parameters.numel()):
            (row,) = self._rows([task])
        self._sent[task.worker, task.draw] = row
        return row.payload_bytes + self._buffer_bytes

    def down_bytes(self, version: int, held_version: int) -> int:
        """What the model weighs: changes since the version a worker holds, or the whole if that is less."""
        whole = self._trainee.outgoing.whole_bytes
        changes = [self._update_bytes.get(each, whole) for each in range(held_version + 1, version + 1)]
        if held_version < 0 or not changes or sum(changes) >= whole:
            return whole + self._buffer_bytes
        return sum(changes) + len(changes) * self._buffer_bytes

    @property
    def _codec_bytes(self) -> int:
        codec = self._training.codec.fresh(self._model.shapes)
        return codec.most_bytes(self._model.parameters.numel())

    @property
    def _buffer_bytes(self) -> int:
        return 4 * self._model.buffers.numel()

    # -- steps -------------------------------------------------------------------------------------------------

    def closed(self, closed: Closed, oldest_version: int) -> None:
        """Take the step; its losses join `taken`: None if the update is not finite, and the model stays as it was."""
        with threads_for(self._model.parameters.numel()):
            self.taken.append(self._take(closed, oldest_version))

    def _take(self, closed: Closed, oldest_version: int) -> list[LossSeen] | None:
        rows = self._rows((*closed.late, *closed.fresh))
        shares = (*closed.step.late, *closed.step.fresh)
        found = {
            (share.worker, share.version): row.gradient
            for share, row in zip(shares, rows, strict=True)
            if row.gradient is not None
        }
        changes = [row.buffers - self._snapshots[row.loss.version][1] for row in rows]
        if len(found) < len(rows):
            return None
        if not self._trainee.take(closed.step, lambda share: found[share.worker, share.version], changes):
            return None
        version = self._trainee.version
        if update := self._trainee.outgoing.chain(version - 1):
            self._update_bytes[version] = update[0][1].numel()
        self._snapshots[version] = self._snapshot()
        self._forget(min(oldest_version, version))
        return [row.loss for row in rows]

    def _forget(self, oldest_version: int) -> None:
        self._snapshots = {version: kept for version, kept in self._snapshots.items() if version >= oldest_version}
        self._sent = {place: row for place, row in self._sent.items() if row.loss.version >= oldest_version}

    def evaluate(self) -> tuple[float, float]:
        """Mean loss on the training data (at most `evaluation_samples` of it), accuracy on the test data."""
        with threads_for(self._model.parameters.numel()):
            return measure(self._model.module, self._training.dataset, self._training.evaluation_samples)

    def _snapshot(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The model as workers get it."""
        return self._trainee.outgoing.held.clone(), self._model.buffers

    # -- gradients ---------------------------------------------------------------------------------------------

    def _rows(self, tasks: Sequence[Task]) -> list[_Row]:
        """What each task comes to; the tasks of one version are computed together."""
        rows = {index: self._sent.pop((task.worker, task.draw), None) for index, task in enumerate(tasks)}
        left = [index for index, row in rows.items() if row is None]
        for version in sorted({tasks[index].version for index in left}):
            chosen = [index for index in left if tasks[index].version == version]
            rows.update(zip(chosen, self._computed(version, [tasks[index] for index in chosen]), strict=True))
        return [row for index in range(len(tasks)) if (row := rows[index]) is not None]

    def _computed(self, version: int, tasks: Sequence[Task]) -> list[_Row]:
        assignments = [
            self.batches.assignment(
                worker=task.worker, draw=task.draw, blocks=task.blocks, blocks_done=task.blocks_done
            )
            for task in tasks
        ]
        result = self._engine.compute(*self._snapshots[version], assignments)
        means, variances = result.losses.tolist(), result.loss_variances.tolist()
        rows = []
        for index, task in enumerate(tasks):
            loss = LossSeen(
                worker=task.worker,
                version=version,
                mean=means[index],
                variance=variances[index],
                samples=assignments[index].samples_done,
            )
            gradient, payload_bytes = self._travelled(result.gradients[index], task)
            if gradient is not None:
                self.batches.judge(worker=task.worker, draw=task.draw, losses=result.sample_losses[index])
            rows.append(_Row(gradient=gradient, payload_bytes=payload_bytes, buffers=result.buffers[index], loss=loss))
        return rows

    def _travelled(self, gradient: torch.Tensor, task: Task) -> tuple[torch.Tensor | None, int]:
        """A gradient as the server gets it, and what it weighed on its way."""
        try:
            payload = self._senders.encode(gradient, worker=task.worker, draw=task.draw)
        except NotFiniteError:
            return None, 0
        return self._senders.decode(payload), payload.numel()
