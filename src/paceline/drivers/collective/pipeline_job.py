"""What a rank of a recipe with a pipeline does: its stage of every batch, its optimiser, evaluation, checkpoints.

    replica 0   rank 0 ──> rank 1      batch 0 of worker 0, in micro-batches      one step of all ranks is a round:
    replica 1   rank 2 ──> rank 3      batch 0 of worker 1                        synchronous SGD

A replica is a worker of the recipe, and draws that worker's batches. Gradients are averaged over the replicas within a
step, and then every rank's optimiser moves what that rank holds; its state is of one tensor each, so that all of them
together are the optimiser that one process would have. Every rank knows the loss of every step, so all come to an end
together when it is not finite any more.

The model is measured through the pipeline: it need not fit on one device.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from paceline.distributed.stores import StoreGather
from paceline.drivers.collective.pipeline_story import PipelineStory
from paceline.drivers.collective.pipelining.pipeline import Pipeline
from paceline.drivers.ranks.checkpoints import RankCheckpoints
from paceline.drivers.ranks.run import Delay, DivergedError, OnEvaluation
from paceline.optim import make_optimizer
from paceline.pipeline.plan import Plan
from paceline.randomness import seed_for
from paceline.traces import Evaluation, Trace
from paceline.training import Batches, Training, measure


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineJob:
    """What is trained, by which plan, for how long, and where what is kept goes."""

    training: Training
    plan: Plan
    rounds: int
    folder: Path
    strategy: str = "full"
    evaluate_every: int = 10
    checkpoint_every: int = 50
    timeout_seconds: float = 600.0
    delay_seconds: Delay = lambda worker, draw: 0.0
    recipe: Mapping[str, Any] = field(default_factory=dict)


class StageRun:
    """One rank's side of a run; needs an initialised process group, and the roll of its ranks."""

    def __init__(
        self, job: PipelineJob, roll: StoreGather, *, on_progress: OnEvaluation = lambda evaluation: None
    ) -> None:
        self._job, self._roll, self._on_progress = job, roll, on_progress
        training = job.training
        self._names = [name for name, _ in training.module.named_parameters()]
        # Pieces of some models cannot be evaluated: then rank 0 puts the whole model together.
        self._whole = copy.deepcopy(training.module) if roll.rank == 0 and not job.plan.evaluates else None
        self._pipe = Pipeline(
            training.module,
            job.plan,
            codec=training.codec,
            timeout_seconds=job.timeout_seconds,
            free_others=True,
            seed=training.seed,
        )
        self._optimizer, self._schedule = make_optimizer(
            training.optimizer, _at_least_one(self._pipe.parameters()), total_steps=job.rounds
        )
        self._batches = Batches(training)
        self._keeper = RankCheckpoints(job.folder, roll.rank)
        replicas = roll.world // job.plan.stages
        self._story = PipelineStory(stages=job.plan.stages, replicas=replicas)
        self._one_replica = replicas == 1
        self.parameters: torch.Tensor | None = None

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self, state: Mapping[str, Any] | None = None) -> Trace | None:
        """Train to the end, from a state that was kept or from the beginning; rank 0 returns what happened."""
        with self._pipe:
            if state is not None:
                self._go_on(state)
            if not self._story.evaluations:
                self._evaluate(at_seconds=0.0)
            self._roll.gather("begin", self._done)  # clocks start together
            self._story.began(time.perf_counter())
            finished = self._over
            while not self._over:
                self._step()
                self._due()
            seconds = self._story.seconds(time.perf_counter())
            if not finished:
                self._keep()
            self._evaluate(at_seconds=seconds)
            whole = self._pipe.full_state_dict()
            self._story.gather(self._roll)
        if whole is None:
            return None
        self.parameters = torch.cat([whole[name].reshape(-1) for name in self._names])
        about = {
            "strategy": self._job.strategy,
            "seed": self._job.training.seed,
            "recipe": self._job.recipe,
            "rounds_done": self._done,
            "seconds": seconds,
        }
        return self._story.trace(about=about)

    @property
    def _done(self) -> int:
        return self._story.steps

    @property
    def _over(self) -> bool:
        return self._done >= self._job.rounds

    def _step(self) -> None:
        began, draw, worker = time.perf_counter(), self._done, self._pipe.replica
        assignment = self._batches.assignment(worker=worker, draw=draw, blocks=1)
        torch.default_generator.manual_seed(
            seed_for(self._job.training.seed, "pass", worker, draw, self._pipe.stage)  # stages must not draw alike
        )
        loss = float(self._pipe.step(assignment.inputs, assignment.targets, F.cross_entropy))
        _check(loss, draw)
        rest = self._job.delay_seconds(worker, draw) - (time.perf_counter() - began)
        if rest > 0:
            time.sleep(rest)
        self._optimizer.step()
        self._schedule.step()
        self._story.stepped(began, time.perf_counter())

    def _due(self) -> None:
        """What is due after this round; the end has its own."""
        if self._over:
            return
        if self._done % self._job.evaluate_every == 0:
            self._evaluate()
        if self._done % self._job.checkpoint_every == 0:
            self._keep()

    # -- measuring -----------------------------------------------------------------------------------------------------

    def _evaluate(self, at_seconds: float | None = None) -> None:
        """Measure replica 0's model; all ranks take part, and hear what it came to."""
        training = self._job.training
        seconds = self._story.seconds(time.perf_counter()) if at_seconds is None else at_seconds
        if self._job.plan.evaluates:
            loss, accuracy = measure(_Through(self._pipe), training.dataset, training.evaluation_samples)
        else:
            loss, accuracy = self._measured_whole(self._pipe.full_state_dict())
        if not self._one_replica or not self._job.plan.evaluates:
            loss, accuracy = self._roll.gather("measure the model", [loss, accuracy])[0]
        _check(loss, self._done)
        evaluation = Evaluation(round=self._done, seconds=seconds, loss=loss, accuracy=accuracy)
        self._story.evaluations.append(evaluation)
        self._on_progress(evaluation)

    def _measured_whole(self, state: Mapping[str, torch.Tensor] | None) -> tuple[float, float]:
        if self._whole is None or state is None:
            return 0.0, 0.0  # rank 0 says what it is
        self._whole.load_state_dict(state)
        return measure(self._whole, self._job.training.dataset, self._job.training.evaluation_samples)

    # -- keeping -------------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        state = {
            "model": dict(self._pipe.state_dict()),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "story": self._story.state_dict(time.perf_counter()),
            "recipe": dict(self._job.recipe),
        }
        self._keeper.keep(self._done, state)

    def _go_on(self, state: Mapping[str, Any]) -> None:
        held = self._pipe.state_dict()
        if held.keys() != state["model"].keys():
            raise ValueError(f"the checkpoint in {self._keeper.folder} is of other layers than this rank's")
        for name, tensor in held.items():
            tensor.copy_(state["model"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self._story.load_state_dict(state["story"])


class _Through(nn.Module):
    """The model as whoever measures it sees it. A rest is filled up: a size of its own would have to be traced."""

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__()
        self._predict: Callable[[torch.Tensor], torch.Tensor] = pipe.predict
        self._size = pipe.plan.batch.microbatch

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The model's outputs, on every rank of the replica."""
        missing = -len(inputs) % self._size
        filled = torch.cat([inputs, inputs[-1:].expand(missing, *inputs.shape[1:])]) if missing else inputs
        return self._predict(filled)[: len(inputs)]


def _check(loss: float, done: int) -> None:
    if not math.isfinite(loss):
        raise DivergedError(f"round {done}: the loss is {loss}; lower the learning rate")


def _at_least_one(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """An optimiser needs something to hold, and a stage may have nothing to train."""
    return list(parameters) or [nn.Parameter(torch.zeros(1))]
