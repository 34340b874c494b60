"""One simulated run without a server: the cluster says who averages when, and all workers' models are trained here.

A round is as many merged local steps as there are workers. The model is measured after the average that takes the run
past a round in which it is due, at the time that average ended. Where every worker trains alone (psgd, one worker), the
first worker's model is measured until the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.drivers.simulated.averaging_cluster import (
    AveragingCluster,
    AveragingSetup,
    LoneSteps,
    NoReplicas,
    SimulatedAverage,
)
from paceline.drivers.simulated.progress import Evaluations, Progress, passes_made, pruned_of
from paceline.traces import Round, Trace, Work
from paceline.traces.records import KEPT_WORKS, works_left_out
from paceline.traffic import Traffic, all_reduce_traffic

if TYPE_CHECKING:
    from paceline.training import Batches, Training
    from paceline.training.averaging_workers import AveragingWorkers


class AveragedSimulation:
    """A run that is watched average by average: iterate over it, then read its `trace`.

    Without `training` every average puts the same on the network: `traffic`, or an all-reduce of `message_bytes`.

    >>> from paceline.drivers.simulated.delays import Recorded
    >>> from paceline.strategies.averaging import make_averaging
    >>> delays = Recorded(rows=((1.0, 2.0),))
    >>> setup = AveragingSetup(member=make_averaging("local-sgd", period=2), workers=2, rounds=4, delays=delays)
    >>> run = AveragedSimulation(setup)
    >>> [(progress.round, progress.seconds) for progress in run]
    [(2, 4.0), (4, 8.0)]
    >>> run.trace.used
    8
    """

    def __init__(
        self,
        setup: AveragingSetup,
        *,
        training: Training | None = None,
        evaluate_every: int = 10,
        traffic: Traffic | None = None,
        message_bytes: int = 0,
    ) -> None:
        if evaluate_every < 1:
            raise ValueError(f"evaluate_every must be 1 or more (evaluate_every={evaluate_every})")
        self._setup, self._evaluate_every = setup, evaluate_every
        self.learner: AveragingWorkers | None = None
        if training:
            from paceline.training.averaging_workers import AveragingWorkers  # only those who train need torch

            self.learner = AveragingWorkers(training, setup.member, workers=setup.workers)
        without = NoReplicas(traffic=traffic or all_reduce_traffic(message_bytes, setup.workers))
        batches = self.batches  # the cluster does not hold what holds it: who lets go of a run lets go of its data
        self._cluster = AveragingCluster(setup, trainer=self.learner or without, ended=lambda: passes_made(batches))
        self._evaluations = Evaluations()
        self._rounds: list[Round] = []
        self._works: list[Work] = []
        self._sent_bytes = self._rounds_done = self._steps_seen = self._evaluated_steps = 0

    def __iter__(self) -> Iterator[Progress]:
        if self.learner:
            yield self._evaluate(self.learner, 0.0)
        for happened in self._cluster.run():
            if isinstance(happened, SimulatedAverage):
                self._record_average(happened)
            elif self._setup.workers == 1:
                self._record_lone_steps(self._cluster.now_seconds)
            elif happened.steps_so_far == self._setup.budget_steps:
                continue  # the last step of all: the average that follows is the end
            if happened.steps_so_far == self._steps_seen:
                continue  # no worker brought a step: they only agreed that they are done
            if self.learner and self.learner.diverged:
                self._evaluations.diverged = True
            else:
                yield self._progress(happened)
            if self._evaluations.diverged:
                return
        if self.learner and self._evaluated_steps < self._steps_seen:
            yield self._evaluate(self.learner, self._cluster.now_seconds)

    def _progress(self, happened: SimulatedAverage | LoneSteps) -> Progress:
        before, self._steps_seen = self._rounds_done, happened.steps_so_far
        self._rounds_done = self._steps_seen // self._setup.workers
        worker, seconds = 0, self._cluster.now_seconds
        if isinstance(happened, SimulatedAverage):
            worker, seconds = happened.merged_by or 0, happened.ended_seconds
        every = self._evaluate_every
        due = self._rounds_done // every > before // every or self._steps_seen == self._setup.budget_steps
        if self.learner and due:
            return self._evaluate(self.learner, seconds, worker=worker)
        return self._evaluations.progress(round=self._rounds_done, seconds=seconds)

    def _evaluate(self, workers: AveragingWorkers, seconds: float, *, worker: int = 0) -> Progress:
        self._evaluated_steps = self._steps_seen
        return self._evaluations.add(round=self._rounds_done, seconds=seconds, measured=workers.evaluate(worker))

    # -- the trace ---------------------------------------------------------------------------------------------

    def _record_average(self, average: SimulatedAverage) -> None:
        self._sent_bytes += average.sent_bytes
        if not average.steps:
            return
        bringing = [worker for worker, window in enumerate(average.windows) if window.brought]
        self._rounds.append(
            Round(
                version=average.number,
                opened_seconds=self._rounds[-1].closed_seconds if self._rounds else 0.0,
                closed_seconds=average.ended_seconds,
                k=self._setup.workers,
                used=len(bringing),
                late=0,
            )
        )
        for worker in bringing[: max(0, KEPT_WORKS - len(self._works))]:
            self._works.append(
                Work(
                    worker=worker,
                    version=average.number,
                    started_seconds=average.opened_seconds[worker],
                    finished_seconds=average.entered_seconds[worker],
                    sent_seconds=average.began_seconds,
                    arrived_seconds=average.ended_seconds,
                )
            )

    def _record_lone_steps(self, seconds: float) -> None:
        """Record a step of a single worker: it has nobody to average with, and every step moves the model."""
        number, opened = len(self._rounds), self._rounds[-1].closed_seconds if self._rounds else 0.0
        self._rounds.append(Round(version=number, opened_seconds=opened, closed_seconds=seconds, k=1, used=1, late=0))
        if len(self._works) < KEPT_WORKS:
            self._works.append(
                Work(
                    worker=0, version=number, started_seconds=opened, finished_seconds=seconds, arrived_seconds=seconds
                )
            )

    @property
    def rounds(self) -> int:
        """The most rounds that it may have."""
        return self._setup.rounds

    @property
    def batches(self) -> Batches | None:
        """What the workers draw from, with what pruning has left out; None without training."""
        return self.learner.batches if self.learner else None

    @property
    def trace(self) -> Trace:
        """What has happened so far; `used` counts local steps."""
        cluster, alone = self._cluster, self._setup.workers == 1
        used = cluster.steps_taken if alone else cluster.steps_merged
        return Trace(
            strategy=self._setup.name,
            seed=self._setup.seed,
            workers=self._setup.workers,
            recipe=self._setup.recipe,
            rounds_done=self._rounds_done,
            seconds=cluster.now_seconds,
            averaged=True,
            diverged=self._evaluations.diverged,
            used=used,
            dropped={"the run ended": cluster.steps_taken - used} if cluster.steps_taken > used else {},
            sent_bytes=self._sent_bytes,
            rounds=tuple(self._rounds),
            works=tuple(self._works),
            evaluations=tuple(self._evaluations.all),
            pruned=pruned_of(self.batches),
            missing=works_left_out(len(self._works)),
        )
