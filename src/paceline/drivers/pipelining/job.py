"""One rank of a recipe with a pipeline: its stage of every batch, its optimiser, evaluation, checkpoints.

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
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from paceline.distributed.collectives import gather_vector
from paceline.distributed.stores import StoreGather
from paceline.drivers.pipelining.pipeline import Pipeline
from paceline.drivers.ranks.run import OnStanding, RankJob, RankRun, RunRecorder, check_loss
from paceline.events import Window
from paceline.optim import make_optimizer
from paceline.pipeline.plan import Plan
from paceline.randomness import seed_for
from paceline.traces import Trace
from paceline.training import Measurement, measure
from paceline.training.saved_state import check_model, check_tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineJob(RankJob):
    """A RankJob with the plan of its pipeline."""

    plan: Plan
    strategy: str = "full"


class PipelineRecorder(RunRecorder):
    """The steps of a run of pipelines.

        replica 0   |### step 0 ###|### step 1 ###|       a replica is a worker, a step of all replicas is a round
        replica 1   |## step 0 ####|#### step 1 ##|

    A step holds the average over the replicas, which all of them wait for; from outside the two cannot be told apart.
    Times are a rank's own, on its own clock since all began together; those of each replica's first stage are taken.

    >>> recorder = PipelineRecorder(stages=2, replicas=1)
    >>> recorder.start_clock(100.0)
    >>> recorder.add_step(100.0, 101.5)
    >>> recorder.seconds(102.0), recorder.steps
    (2.0, 1)
    """

    def __init__(self, *, stages: int, replicas: int) -> None:
        super().__init__(replicas)
        self._stages = stages
        self._earlier = torch.empty((0, 2), dtype=torch.float64)
        self._new: list[tuple[float, float]] = []

    def add_step(self, began: float, ended: float) -> None:
        """Record a step that was taken between these moments of time.perf_counter()."""
        if self.has_room:
            self._new.append((self.seconds(began), self.seconds(ended)))
        self.recorded += 1

    @property
    def steps(self) -> int:
        """The number of steps that were taken."""
        return self.recorded

    def times(self) -> torch.Tensor:
        return torch.cat([self._earlier, torch.tensor(self._new, dtype=torch.float64).reshape(-1, 2)])

    def windows(self) -> list[tuple[Window, ...]]:
        return [tuple(Window(steps=1) for _ in range(self.workers))] * len(self.every_time)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        times = state["times"]
        steps = len(times) if isinstance(times, torch.Tensor) and times.ndim else 0
        check_tensor("times", times, self._earlier.new_empty((steps, 2)))
        self._earlier, self._new = times, []

    def gather(self, ranks: StoreGather) -> None:
        """Bring all ranks' times together. All ranks must come here."""
        ours = self.times()
        steps = dict(enumerate(ranks.gather("tell its times", len(ours))))
        if set(steps.values()) != {len(ours)}:
            raise RuntimeError(f"the ranks have taken different numbers of steps: {steps}")
        every = gather_vector(ours.reshape(-1), ranks).reshape(-1, len(ours), 2)
        first_stages = every[:: self._stages].transpose(0, 1)  # steps x replicas x (began, ended)
        self.every_time = torch.cat([first_stages, first_stages[:, :, 1:]], dim=2)


class PipelineRun(RankRun):
    """One rank's side of a run of pipelines; needs an initialised process group."""

    job: PipelineJob
    recorder: PipelineRecorder

    def __init__(
        self, job: PipelineJob, ranks: StoreGather, *, on_standing: OnStanding = lambda standing: None
    ) -> None:
        super().__init__(job, ranks, on_standing=on_standing)
        training, plan = job.training, job.plan
        self._names = [name for name, _ in training.module.named_parameters()]
        # Pieces of some models cannot be evaluated: then rank 0 puts the whole model together.
        self._whole = copy.deepcopy(training.module) if ranks.rank == 0 and not plan.evaluates else None
        self._pipe = Pipeline(
            training.module,
            plan,
            codec=training.codec,
            timeout_seconds=job.timeout_seconds,
            free_others=True,
            seed=training.seed,
        )
        # An optimiser needs something to hold, and a stage may have nothing to train.
        parameters = list(self._pipe.parameters()) or [nn.Parameter(torch.zeros(1))]
        self.optimizer, self.schedule = make_optimizer(training.optimizer, parameters, total_steps=job.rounds)
        self.recorder = PipelineRecorder(stages=plan.stages, replicas=ranks.world // plan.stages)
        self.parameters: torch.Tensor | None = None
        self.whole: dict[str, torch.Tensor] | None = None

    def connected(self) -> Pipeline:
        return self._pipe

    @property
    def rounds_done(self) -> int:
        return self.recorder.steps

    def begin_together(self) -> None:
        self.ranks.gather("begin", self.rounds_done)

    def step(self) -> None:
        began, draw, worker = time.perf_counter(), self.rounds_done, self._pipe.replica
        assignment = self.batches.assignment(worker=worker, draw=draw, blocks=1)
        torch.default_generator.manual_seed(
            seed_for(self.job.training.seed, "pass", worker, draw, self._pipe.stage)  # stages must not draw alike
        )
        loss = float(self._pipe.step(assignment.inputs, assignment.targets, self._mean_loss))
        check_loss(loss, draw)
        self.wait_for_delay(began, worker, draw)
        self.optimizer.step()
        self.recorder.add_step(began, time.perf_counter())

    def _mean_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.job.training.loss(outputs, targets).mean()

    def end(self, *, was_over: bool) -> None:
        """Do nothing: all ranks are at the same model after every step."""

    def measure_model(self) -> Measurement:
        """Measure replica 0's model; all ranks take part, and hear what it came to."""
        training, evaluates = self.job.training, self.job.plan.evaluates
        measured = Measurement(loss=0.0)
        if evaluates:
            measured = measure(_PipelineModule(self._pipe), training)
        else:
            state = self._pipe.full_state_dict()
            if self._whole is not None and state is not None:
                self._whole.load_state_dict(state)
                measured = measure(self._whole, training)
        if self.recorder.workers > 1 or not evaluates:
            measured = Measurement(**self.ranks.gather("measure the model", asdict(measured))[0])
        return measured

    def state(self) -> dict[str, Any]:
        return {"model": dict(self._pipe.state_dict())}

    def load_state(self, state: Mapping[str, Any]) -> None:
        held = self._pipe.state_dict()
        check_model("model", state["model"], held)
        for name, tensor in held.items():
            tensor.copy_(state["model"][name])

    def gather_times(self) -> None:
        self.recorder.gather(self.ranks)

    def trace(self, **about: Any) -> Trace | None:
        whole = self._pipe.full_state_dict()
        if whole is None:
            return None
        self.whole = dict(whole)
        self.parameters = torch.cat([whole[name].reshape(-1) for name in self._names])
        used = self.rounds_done * self.recorder.workers
        return self.recorder.trace(strategy=self.job.strategy, used=used, **about)


class _PipelineModule(nn.Module):
    """The model for `measure`. A rest is filled up: a size of its own would have to be traced."""

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__()
        self._predict: Callable[[torch.Tensor], torch.Tensor] = pipe.predict
        self._size = pipe.plan.batch.microbatch

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the model's outputs, on every rank of the replica."""
        missing = -len(inputs) % self._size
        filled = torch.cat([inputs, inputs[-1:].expand(missing, *inputs.shape[1:])]) if missing else inputs
        return self._predict(filled)[: len(inputs)]
