"""One simulated run in rounds: the cluster says which steps are taken when, the learner takes them."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.drivers.simulated.cluster import Cluster, NoTraining, Setup
from paceline.drivers.simulated.learner import Learner
from paceline.drivers.simulated.progress import Evaluations, Progress, passes_made, pruned_of
from paceline.traces import Trace
from paceline.traces.records import works_left_out
from paceline.traffic import NO_TRAFFIC, Traffic
from paceline.training import Batches, Training


class Simulation:
    """A run that is watched round by round: iterate over it, then read its `trace`.

    Without `training` only the times are simulated, with messages of `up_bytes` and `down_bytes`, or with
    `round_traffic` where ranks add up.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        training: Training | None = None,
        evaluate_every: int = 10,
        up_bytes: int = 0,
        down_bytes: int = 0,
        round_traffic: Traffic = NO_TRAFFIC,
    ) -> None:
        self._setup = setup
        self._evaluate_every = evaluate_every
        ranks = setup.workers if setup.on == "ranks" else 0
        self.learner = Learner(training, ranks=ranks) if training else None
        without = NoTraining(up=up_bytes, down=down_bytes, round_traffic=round_traffic)
        self._cluster = Cluster(setup, trainer=self.learner or without)
        self._evaluations = Evaluations()
        self._rounds_done = 0

    def __iter__(self) -> Iterator[Progress]:
        steps_per_round = self._setup.strategy.updates_per_round(self._setup.workers)
        if self.learner:
            yield self._progress(self.learner)
        for steps, _ in enumerate(self._cluster.run(self._setup.rounds * steps_per_round), start=1):
            if self.learner:
                losses = self.learner.losses_of_steps.popleft()
                if losses is None:
                    self._evaluations.diverged = True
                    self._rounds_done = steps // steps_per_round
                    return
                self._cluster.pass_on(losses)
            if steps % steps_per_round == 0:
                self._rounds_done = steps // steps_per_round
                over = self._rounds_done == self._setup.rounds or passes_made(self.batches)
                due = self._rounds_done % self._evaluate_every == 0 or over
                yield self._progress(self.learner if due else None)
                if self._evaluations.diverged or over:
                    return

    def _progress(self, learner: Learner | None) -> Progress:
        """Return where the run stands; with a learner, its model is measured."""
        done, seconds = self._rounds_done, self._cluster.updated_seconds
        if learner is None:
            return self._evaluations.progress(round=done, seconds=seconds)
        return self._evaluations.add(round=done, seconds=seconds, measured=learner.evaluate())

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
        """What has happened so far."""
        record = self._cluster.record
        return Trace(
            strategy=self._setup.name,
            seed=self._setup.seed,
            workers=self._setup.workers,
            recipe=self._setup.recipe,
            rounds_done=self._rounds_done,
            seconds=self._cluster.updated_seconds,
            late_work=self._setup.late_work,
            diverged=self._evaluations.diverged,
            used=record.used,
            late=record.late,
            dropped=dict(record.dropped_reasons),
            sent_bytes=record.sent_bytes,
            received_bytes=record.received_bytes,
            rounds=tuple(record.rounds),
            works=tuple(record.works),
            evaluations=tuple(self._evaluations.all),
            pruned=pruned_of(self.batches),
            shares=None if record.shares is None else record.shares.summary(),
            missing=works_left_out(len(record.works)),
        )
