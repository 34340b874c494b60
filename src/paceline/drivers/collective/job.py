"""What a rank of a recipe does: its own batches and optimiser, averages with the others, evaluation, checkpoints.

    step ── averaging (hooked into the optimiser's step) ──> merged: all ranks read the same counts in the same average
                                                               ├─ evaluation: rank 0 measures the shared model
                                                               ├─ checkpoint: all settle, each keeps its own state
                                                               └─ the end:    all leave

What is due follows from the steps that all workers have brought to the averages, so all ranks come to it after the same
average, whatever their speed. `rounds` x ranks local steps are a run. Where training waits for averages every rank
takes `rounds` of them; where it does not, fast ranks take more than slow ones, and the run is over after the average
that takes the merged steps to the sum.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.distributed.stores import StoreGather
from paceline.drivers.collective.averaging import Averager
from paceline.drivers.collective.keeping import Keeper
from paceline.drivers.collective.story import Story
from paceline.optim import make_optimizer
from paceline.strategies.averaging import Averaging
from paceline.traces import Evaluation, Trace
from paceline.training import Batches, Training, measure
from paceline.training.local import local_gradient

Delay = Callable[[int, int], float]
OnEvaluation = Callable[[Evaluation], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """What is trained, how ranks average, for how long, and where what is kept goes."""

    training: Training
    member: Averaging
    rounds: int
    folder: Path
    evaluate_every: int = 10
    checkpoint_every: int = 50
    silence_seconds: float = 15.0
    timeout_seconds: float = 600.0
    delay_seconds: Delay = lambda worker, draw: 0.0
    recipe: Mapping[str, Any] = field(default_factory=dict)


class DivergedError(ValueError):
    """The loss is not finite any more.

    >>> raise DivergedError("round 30: the loss is nan; lower the learning rate")
    Traceback (most recent call last):
    paceline.drivers.collective.job.DivergedError: round 30: the loss is nan; lower the learning rate
    """


class RankRun:
    """One rank's side of a run; needs an initialised process group, and the roll of its ranks."""

    def __init__(self, job: Job, roll: StoreGather, *, on_progress: OnEvaluation = lambda evaluation: None) -> None:
        self._job, self._roll, self._on_progress = job, roll, on_progress
        self.rank, self._world = dist.get_rank(), dist.get_world_size()
        self._module = job.training.module
        self._optimizer, self._schedule = make_optimizer(
            job.training.optimizer, self._module.parameters(), total_steps=job.rounds
        )
        self._batches = Batches(job.training)
        self._keeper = Keeper(job.folder, self.rank)
        self._sync = Averager(
            self._module,
            self._optimizer,
            job.member,
            codec=job.training.codec,
            seed=job.training.seed,
            silence_seconds=job.silence_seconds,
            timeout_seconds=job.timeout_seconds,
            record=True,
        )
        self._draws = 0
        self._story = Story(self._world)

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self, state: Mapping[str, Any] | None = None) -> Trace | None:
        """Train to the end, from a state that was kept or from the beginning; rank 0 returns what happened."""
        with self._sync:
            if state is not None:
                self._go_on(state)
            if not self._story.evaluations:
                self._evaluate(at_seconds=0.0)
            # Clocks start together. A flush would do, but a run that goes on may have open windows, and it closes them.
            self._sync.gather_numbers([self._rounds_done])
            self._story.began(time.perf_counter())
            finished, sent_bytes = self._over, self._sync.sent_bytes
            while not self._over:
                before = self._rounds_done
                self._step()
                self._due(before)
        seconds = self._story.seconds(time.perf_counter())
        if finished:
            self._sync.history.clear()  # only to leave again: the run had ended before
        else:
            self._follow_schedule()
            self._keep()
            sent_bytes = self._sync.sent_bytes
        self._story.gather(self._sync.history, self._roll, sent_bytes=sent_bytes)
        if self.rank != 0:
            return None  # nobody has to wait for rank 0 to measure the model once more
        self._evaluate(at_seconds=seconds)
        about = {
            "strategy": self._job.member.name,
            "seed": self._job.training.seed,
            "recipe": self._job.recipe,
            "rounds_done": self._rounds_done,
            "seconds": seconds,
            "used": self._draws if self._world == 1 else self._sync.merged_steps,
        }
        return self._story.trace(self._sync.history, about=about)

    @property
    def _alone(self) -> bool:
        return self._job.member.alone(self._world)

    @property
    def _rounds_done(self) -> int:
        return self._draws if self._alone else self._sync.merged_steps // self._world

    @property
    def _over(self) -> bool:
        own = self._job.member.counts_own_steps(self._world)
        return (self._draws if own else self._rounds_done) >= self._job.rounds

    def _step(self) -> None:
        began = time.perf_counter()
        local_gradient(self._module, self._batches, worker=self.rank, draw=self._draws)
        rest = self._job.delay_seconds(self.rank, self._draws) - (time.perf_counter() - began)
        if rest > 0:
            time.sleep(rest)
        self._draws += 1
        self._optimizer.step()

    def _due(self, before: int) -> None:
        """What the rounds done since `before` call for; a checkpoint may itself bring more rounds to an end."""
        done = self._rounds_done
        self._follow_schedule()
        if self._over:
            return
        if done // self._job.evaluate_every > before // self._job.evaluate_every:
            self._evaluate()
        if done // self._job.checkpoint_every > before // self._job.checkpoint_every:
            self._keep()
            self._follow_schedule()

    def _follow_schedule(self) -> None:
        while self._schedule.last_epoch < min(self._rounds_done, self._job.rounds):
            self._schedule.step()

    @property
    def parameters(self) -> torch.Tensor:
        """This rank's parameters in one vector; after the end, those of all ranks."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self._module.parameters()])

    # -- measuring -----------------------------------------------------------------------------------------------------

    def _evaluate(self, at_seconds: float | None = None) -> None:
        if self.rank != 0:
            return
        training = self._job.training
        module = copy.deepcopy(self._module)
        if self._job.member.period is not None:
            module.load_state_dict(self._sync.shared, strict=False)
        seconds = self._story.seconds(time.perf_counter()) if at_seconds is None else at_seconds
        loss, accuracy = measure(module, training.dataset, training.evaluation_samples)
        evaluation = Evaluation(round=self._rounds_done, seconds=seconds, loss=loss, accuracy=accuracy)
        if not math.isfinite(loss):
            raise DivergedError(f"round {evaluation.round}: the loss is {loss}; lower the learning rate")
        self._story.evaluations.append(evaluation)
        self._on_progress(evaluation)

    # -- keeping -------------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        sync = self._sync.state_dict()  # settles: all ranks are at the same average now
        state = {
            "model": dict(self._module.state_dict()),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "sync": sync,
            "draws": self._draws,
            "pruning": self._batches.state_dict(),
            "story": self._story.state_dict(self._sync.history, time.perf_counter()),
            "recipe": dict(self._job.recipe),
        }
        self._keeper.keep(self._rounds_done, state)

    def _go_on(self, state: Mapping[str, Any]) -> None:
        self._module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self._sync.load_state_dict(state["sync"])
        self._draws = int(state["draws"])
        self._batches.load_state_dict(state.get("pruning", {}))  # older runs kept none
        self._story.load_state_dict(state["story"])
