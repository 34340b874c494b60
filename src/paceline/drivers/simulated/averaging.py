"""One simulated run of workers that average among themselves: the pack says who does what when, the team trains.

A round is as many merged local steps as there are workers. The model is measured after the average that takes the run
past a round in which it is due, at the time that average ended; where everybody trains alone (psgd, one worker) it is
the first worker's own until the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.drivers.simulated.averaging_setup import AveragingSetup
from paceline.drivers.simulated.ledger import KEPT_WORKS
from paceline.drivers.simulated.pack import Average, Lap, NoTraining, Pack
from paceline.drivers.simulated.progress import Progress
from paceline.drivers.simulated.pruned import pruned_of
from paceline.traces import Evaluation, Round, Trace, Work

if TYPE_CHECKING:
    from paceline.training import Batches, Training
    from paceline.training.team import Team


class AveragedSimulation:
    """A run that can be watched average by average: iterate over it, then ask for its `trace`.

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
        message_bytes: int = 0,
        gathers: bool = False,
    ) -> None:
        if evaluate_every < 1:
            raise ValueError(f"evaluate_every must be 1 or more (evaluate_every={evaluate_every})")
        self._setup, self._evaluate_every = setup, evaluate_every
        self.learner = _team(training, setup) if training else None
        self._pack = Pack(setup, crew=self.learner or NoTraining(message_bytes=message_bytes, gathers=gathers))
        self._evaluations: list[Evaluation] = []
        self._rounds: list[Round] = []
        self._works: list[Work] = []
        self._sent_bytes = self._rounds_done = self._steps_seen = self._evaluated_steps = 0
        self._diverged = False

    def __iter__(self) -> Iterator[Progress]:
        if self.learner:
            yield self._evaluate(0, 0.0, worker=0)
        for happened in self._pack.run():
            if isinstance(happened, Average):
                self._write_down(happened)
            elif self._setup.workers == 1:
                self._write_down_alone(self._pack.now_seconds)
            elif happened.steps_so_far == self._setup.budget_steps:
                continue  # everybody's last step: the average that follows is the end
            if happened.steps_so_far == self._steps_seen:
                continue  # nobody brought anything: workers only agreed that they are done
            if self.learner and self.learner.diverged:
                self._diverged = True
            else:
                yield self._progress(happened)
            if self._diverged:
                return
        if self.learner and self._evaluated_steps < self._steps_seen:
            yield self._evaluate(self._rounds_done, self._pack.now_seconds, worker=0)

    def _progress(self, happened: Average | Lap) -> Progress:
        before, self._steps_seen = self._rounds_done, happened.steps_so_far
        self._rounds_done = self._steps_seen // self._setup.workers
        worker, seconds = 0, self._pack.now_seconds
        if isinstance(happened, Average):
            worker, seconds = happened.merged_by or 0, happened.ended_seconds
        every = self._evaluate_every
        due = self._rounds_done // every > before // every or self._steps_seen == self._setup.budget_steps
        if self.learner and due:
            return self._evaluate(self._rounds_done, seconds, worker=worker)
        last = self._evaluations[-1] if self._evaluations else None
        return Progress(
            round=self._rounds_done,
            seconds=seconds,
            loss=last.loss if last else None,
            accuracy=last.accuracy if last else None,
        )

    def _evaluate(self, after_round: int, seconds: float, *, worker: int) -> Progress:
        if self.learner is None:
            raise ValueError("a run without training has nothing to evaluate")
        loss, accuracy = self.learner.evaluate(worker)
        self._evaluated_steps = self._steps_seen
        self._diverged = self._diverged or not math.isfinite(loss)
        self._evaluations.append(Evaluation(round=after_round, seconds=seconds, loss=loss, accuracy=accuracy))
        return Progress(round=after_round, seconds=seconds, loss=loss, accuracy=accuracy)

    # -- the books ---------------------------------------------------------------------------------------------

    def _write_down(self, average: Average) -> None:
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

    def _write_down_alone(self, seconds: float) -> None:
        """One worker has nobody to average with: every step of its own is the model's."""
        number, opened = len(self._rounds), self._rounds[-1].closed_seconds if self._rounds else 0.0
        self._rounds.append(Round(version=number, opened_seconds=opened, closed_seconds=seconds, k=1, used=1, late=0))
        if len(self._works) < KEPT_WORKS:
            self._works.append(
                Work(
                    worker=0, version=number, started_seconds=opened, finished_seconds=seconds, arrived_seconds=seconds
                )
            )

    @property
    def batches(self) -> Batches | None:
        """What the workers draw from, and, where they prune, whom they left out; None without training."""
        return self.learner.batches if self.learner else None

    @property
    def trace(self) -> Trace:
        """What happened so far; `used` counts local steps."""
        pack, alone = self._pack, self._setup.workers == 1
        used = pack.steps_taken if alone else pack.steps_merged
        return Trace(
            strategy=self._setup.name,
            seed=self._setup.seed,
            workers=self._setup.workers,
            recipe=self._setup.recipe,
            rounds_done=self._rounds_done,
            seconds=pack.now_seconds,
            averaged=True,
            diverged=self._diverged,
            used=used,
            dropped={"the run ended": pack.steps_taken - used} if pack.steps_taken > used else {},
            sent_bytes=self._sent_bytes,
            rounds=tuple(self._rounds),
            works=tuple(self._works),
            evaluations=tuple(self._evaluations),
            pruned=pruned_of(self.batches),
        )


def _team(training: Training, setup: AveragingSetup) -> Team:
    from paceline.training.team import Team  # only those who train need torch

    return Team(training, setup.member, workers=setup.workers)
