"""The `Trainer` of a simulation: it computes the gradients of the tasks of a step, and takes the step with them.

    Cluster  -- up_bytes(task), down_bytes, take(TakenStep) -->  Learner  -- Step, gradients -->  TrainState, Combiner

A gradient is computed only when a step needs it, at a copy of the model of its task's version (`_snapshots`). Gradients
of one version are computed together; those that no step uses are never computed.
In three cases each is computed as it is sent: where the codec has a memory,
where a payload's size depends on the numbers in it, and where samples are pruned (then a worker's next batch depends on
the losses of what it sent).

Where ranks add up, gradients stay with their workers, and it is their contributions to a step that are encoded, if
anything is: `_EncodedRanks` has a side of the exchange for each, as real ranks have, and runs them in lockstep.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.codecs.floats import Identity
from paceline.codecs.payload import NotFiniteError
from paceline.codecs.requests import Request
from paceline.drivers.simulated.cluster import TakenStep, Task
from paceline.events import LossSeen, Step
from paceline.exchanges import Trouble, TroubleError
from paceline.exchanges.lockstep import sum_in_lockstep, traffic_of_requests
from paceline.exchanges.plans import adds_plainly
from paceline.optim import make_optimizer
from paceline.traffic import NO_TRAFFIC, Traffic, all_reduce_traffic
from paceline.training import Batches, BatchPlace, Measurement, Training, TrainState, WorkerCodecs, measure
from paceline.training.contributions import MessageLayout, RankGradients, VectorPool
from paceline.training.round_sums import EncodedSum
from paceline.workers.engine import make_engine
from paceline.workers.flat import FlatModel
from paceline.workers.threads import threads_for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SentGradient:
    """The gradient of one task as the server gets it."""

    gradient: torch.Tensor | None  # None: not finite, which cannot be sent
    payload_bytes: int
    buffers: torch.Tensor
    loss: LossSeen


class _EncodedRanks:
    """What each rank has kept of its gradients, and its side of the sums; `traffic` is that of the last sum."""

    def __init__(self, training: Training, model: FlatModel, ranks: int) -> None:
        self._layout = MessageLayout(gradient=model.parameters.numel(), buffers=model.buffers.numel(), flags=0)
        pool = VectorPool(self._layout.size, torch.float32, torch.device("cpu"))
        self._gradients = [RankGradients(rank, self._layout, pool) for rank in range(ranks)]
        self._sums = [
            EncodedSum(
                training.codec,
                model.shapes,
                self._layout,
                place=rank,
                world=ranks,
                plan=training.plan,
                seed=training.seed,
            )
            for rank in range(ranks)
        ]
        self._pool, self.traffic = pool, NO_TRAFFIC

    def update(self, step: Step, found: Mapping[tuple[int, int], torch.Tensor]) -> torch.Tensor | None:
        """Return the sum of all contributions to a step, given the gradients in it; None if it is not finite."""
        for (worker, version), gradient in found.items():
            message = self._pool.take().zero_()
            self._layout.gradient_of(message).copy_(gradient)
            self._gradients[worker].keep(version, message)
        brings = [rank.has_part_in(step) for rank in self._gradients]
        vectors = [rank.contribute(step) for rank in self._gradients]
        protocols = [
            each.add_up(vector, step.version, brings=brought)
            for each, vector, brought in zip(self._sums, vectors, brings, strict=True)
        ]
        self.traffic = NO_TRAFFIC
        try:
            total = sum_in_lockstep(self._sums[0].plan, protocols, self._heard)
        except NotFiniteError:
            return None
        except TroubleError as error:
            if Trouble.NOT_FINITE not in error.troubles.values():
                raise (error.cause or error) from None
            return None
        finally:
            for vector in vectors:
                self._pool.give(vector)
        return self._layout.gradient_of(total).clone()

    def _heard(self, requests: Sequence[Request]) -> None:
        self.traffic += traffic_of_requests(requests)


class Learner:
    """Holds the model, and moves it one step at a time; so many `ranks` add up among themselves, 0 for a server."""

    def __init__(self, training: Training, *, ranks: int = 0) -> None:
        encodes = ranks > 0 and not adds_plainly(training.codec, training.plan)
        encoded_ranks = training if encodes else None
        if ranks:
            training = replace(training, codec=Identity())  # gradients and models stay where they are
        self._training = training
        module = copy.deepcopy(training.module)
        optimizer, schedule = make_optimizer(training.optimizer, module.parameters(), total_steps=training.total_steps)
        self._state = TrainState(module, optimizer, schedule, codec=training.codec, seed=training.seed)
        self._model = self._state.model
        self._codecs = WorkerCodecs(training.codec, self._model.shapes, seed=training.seed)
        self.batches = Batches(training)
        prunes = self.batches.pruned is not None
        self._computes_when_sent = self._codecs.remember or not training.codec.fixed_size or prunes
        self._sent: dict[tuple[int, int], _SentGradient] = {}  # gradients computed and not used yet, by worker and draw
        self._gradient_bytes = training.codec.fresh(self._model.shapes).most_bytes(self._model.parameters.numel())
        self._buffer_bytes = 4 * self._model.buffers.numel()
        self._engine = make_engine(training.module, training.loss)
        self._snapshots = {0: self._snapshot()}
        self._update_bytes: dict[int, int] = {}
        self._plain_traffic = all_reduce_traffic(self._model.parameters.nbytes + self._buffer_bytes, max(1, ranks))
        self._ranks = None if encoded_ranks is None else _EncodedRanks(encoded_ranks, self._model, ranks)
        self.losses_of_steps: deque[list[LossSeen] | None] = deque()  # None: the run has diverged

    @property
    def parameters(self) -> torch.Tensor:
        """The model's parameters as they are now, in one vector."""
        return self._model.parameters

    @property
    def module(self) -> torch.nn.Module:
        """The model as it is now."""
        return self._model.module

    # -- the size of messages ----------------------------------------------------------------------------------

    @property
    def round_traffic(self) -> Traffic:
        return self._plain_traffic if self._ranks is None else self._ranks.traffic

    def up_bytes(self, task: Task) -> int:
        if not self._computes_when_sent:
            return self._gradient_bytes + self._buffer_bytes
        with threads_for(self._model.parameters.numel()):
            (row,) = self._gradients([task])
        self._sent[task.worker, task.draw] = row
        return row.payload_bytes + self._buffer_bytes

    def down_bytes(self, version: int, held_version: int) -> int:
        """Return the size of the changes since the version a worker holds, or of the whole model if that is less."""
        whole = self._state.outgoing.whole_bytes
        changes = [self._update_bytes.get(each, whole) for each in range(held_version + 1, version + 1)]
        if held_version < 0 or not changes or sum(changes) >= whole:
            return whole + self._buffer_bytes
        return sum(changes) + len(changes) * self._buffer_bytes

    # -- steps -------------------------------------------------------------------------------------------------

    def take(self, taken: TakenStep, oldest_version: int) -> None:
        """Take the step, and append its losses to `losses_of_steps`: None if the update is not finite."""
        with threads_for(self._model.parameters.numel()):
            self.losses_of_steps.append(self._take(taken, oldest_version))

    def _take(self, taken: TakenStep, oldest_version: int) -> list[LossSeen] | None:
        rows = self._gradients((*taken.late, *taken.fresh))
        shares = (*taken.step.late, *taken.step.fresh)
        found = {
            (share.worker, share.version): row.gradient
            for share, row in zip(shares, rows, strict=True)
            if row.gradient is not None
        }
        if len(found) < len(rows):
            return None
        changes = [row.buffers - self._snapshots[row.loss.version][1] for row in rows]
        if not self._move(taken.step, found, changes):
            return None
        version = self._state.version
        if update := self._state.outgoing.changes_since(version - 1):
            self._update_bytes[version] = update[0][1].numel()
        self._snapshots[version] = self._snapshot()
        oldest = min(oldest_version, version)
        while (first := next(iter(self._snapshots))) < oldest:  # they are in the order of their versions
            del self._snapshots[first]
        self._sent = {place: row for place, row in self._sent.items() if row.loss.version >= oldest}
        return [row.loss for row in rows]

    def _move(self, step: Step, found: Mapping[tuple[int, int], torch.Tensor], changes: Sequence[torch.Tensor]) -> bool:
        """Take the step with these gradients, by worker and version; return False if the run has diverged."""
        if self._ranks is None:
            return self._state.take(step, lambda share: found[share.worker, share.version], changes)
        update = self._ranks.update(step, found)
        return update is not None and self._state.take_sum(step, update, changes)

    def evaluate(self) -> Measurement:
        """Measure the model as it is now."""
        with threads_for(self._model.parameters.numel()):
            return measure(self._model.module, self._training)

    def _snapshot(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the parameters and buffers, as workers get them."""
        return self._state.outgoing.held.clone(), self._model.buffers

    # -- gradients ---------------------------------------------------------------------------------------------

    def _gradients(self, tasks: Sequence[Task]) -> list[_SentGradient]:
        """Return the gradient of each task; those of one version are computed together."""
        missing = [task for task in tasks if (task.worker, task.draw) not in self._sent]
        for version in sorted({task.version for task in missing}):
            self._compute(version, [task for task in missing if task.version == version])
        return [self._sent.pop((task.worker, task.draw)) for task in tasks]

    def _compute(self, version: int, tasks: Sequence[Task]) -> None:
        """Compute the gradients of tasks of one version, and put them into `_sent`."""
        assignments = [
            self.batches.assignment(
                worker=task.worker,
                draw=task.draw,
                blocks=task.blocks,
                blocks_done=task.blocks_done,
                place=BatchPlace(first=task.first, samples=task.samples) if task.samples else None,
            )
            for task in tasks
        ]
        result = self._engine.compute(*self._snapshots[version], assignments)
        means, variances = result.losses.tolist(), result.loss_variances.tolist()
        for index, task in enumerate(tasks):
            loss = LossSeen(
                worker=task.worker,
                version=version,
                mean=means[index],
                variance=variances[index],
                samples=assignments[index].samples_done,
            )
            gradient, payload_bytes = self._send(result.gradients[index], task)
            if gradient is not None:
                self.batches.judge(worker=task.worker, draw=task.draw, losses=result.sample_losses[index])
            self._sent[task.worker, task.draw] = _SentGradient(
                gradient=gradient, payload_bytes=payload_bytes, buffers=result.buffers[index], loss=loss
            )

    def _send(self, gradient: torch.Tensor, task: Task) -> tuple[torch.Tensor | None, int]:
        """Return a gradient as the server decodes it (None: it is not finite), and the bytes of its payload."""
        try:
            payload = self._codecs.encode(gradient, worker=task.worker, draw=task.draw)
        except NotFiniteError:
            return None, 0
        return self._codecs.decode(payload), payload.numel()
