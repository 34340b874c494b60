"""One simulated run: the cluster says which steps are taken when, the learner takes them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paceline.drivers.simulated.cluster import Ballast, Cluster
from paceline.drivers.simulated.learner import Learner
from paceline.drivers.simulated.progress import Progress
from paceline.drivers.simulated.pruned import pruned_of
from paceline.drivers.simulated.setup import Setup
from paceline.traces import Evaluation, Trace
from paceline.training import Batches, Training


class Simulation:
    """A run that can be watched round by round: iterate over it, then ask for its `trace`."""

    def __init__(
        self,
        setup: Setup,
        *,
        training: Training | None = None,
        evaluate_every: int = 10,
        up_bytes: int = 0,
        down_bytes: int = 0,
    ) -> None:
        self._setup = setup
        self._evaluate_every = evaluate_every
        self._steps_per_round = setup.strategy.updates_per_round(setup.workers)
        self.learner = Learner(training) if training else None
        self._cluster = Cluster(setup, cargo=self.learner or Ballast(up=up_bytes, down=down_bytes))
        self._evaluations: list[Evaluation] = []
        self._rounds_done = 0
        self._diverged = False

    def __iter__(self) -> Iterator[Progress]:
        if self.learner:
            yield self._evaluate(0)
        for steps, _ in enumerate(self._cluster.run(self._setup.rounds * self._steps_per_round), start=1):
            if self.learner:
                losses = self.learner.taken.popleft()
                if losses is None:
                    self._diverged = True
                    self._rounds_done = steps // self._steps_per_round
                    return
                self._cluster.tell(losses)
            if steps % self._steps_per_round == 0:
                self._rounds_done = steps // self._steps_per_round
                yield self._progress()
                if self._diverged:
                    return

    def _progress(self) -> Progress:
        due = self._rounds_done % self._evaluate_every == 0 or self._rounds_done == self._setup.rounds
        if self.learner and due:
            return self._evaluate(self._rounds_done)
        last = self._evaluations[-1] if self._evaluations else None
        return Progress(
            round=self._rounds_done,
            seconds=self._cluster.now_seconds,
            loss=last.loss if last else None,
            accuracy=last.accuracy if last else None,
        )

    def _evaluate(self, after_round: int) -> Progress:
        if self.learner is None:
            raise ValueError("a run without training has nothing to evaluate")
        loss, accuracy = self.learner.evaluate()
        self._diverged = self._diverged or not math.isfinite(loss)
        seconds = self._cluster.now_seconds
        self._evaluations.append(Evaluation(round=after_round, seconds=seconds, loss=loss, accuracy=accuracy))
        return Progress(round=after_round, seconds=seconds, loss=loss, accuracy=accuracy)

    @property
    def batches(self) -> Batches | None:
        """What the workers draw from, and, where they prune, whom they left out; None without training."""
        return self.learner.batches if self.learner else None

    @property
    def trace(self) -> Trace:
        """What happened so far."""
        ledger = self._cluster.ledger
        return Trace(
            strategy=self._setup.name,
            seed=self._setup.seed,
            workers=self._setup.workers,
            recipe=self._setup.recipe,
            rounds_done=self._rounds_done,
            seconds=self._cluster.now_seconds,
            late_work=self._setup.late_work,
            diverged=self._diverged,
            used=ledger.used,
            late=ledger.late,
            dropped=dict(ledger.dropped_reasons),
            sent_bytes=ledger.sent_bytes,
            received_bytes=ledger.received_bytes,
            rounds=tuple(ledger.rounds),
            works=tuple(ledger.works),
            evaluations=tuple(self._evaluations),
            pruned=pruned_of(self.batches),
        )
