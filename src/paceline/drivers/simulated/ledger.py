"""What a simulated run writes down: counts of everything, and the work of the first rounds in full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from paceline.drivers.simulated.task import Task
from paceline.events import Step
from paceline.traces import Outcome, Round, Work

KEPT_WORKS = 100_000


class Ledger:
    """The books of one run.

    >>> Ledger().used
    0
    """

    def __init__(self, *, kept_works: int = KEPT_WORKS) -> None:
        self.used = 0
        self.late = 0
        self.dropped_reasons: Counter[str] = Counter()
        self.sent_bytes = 0
        self.received_bytes = 0
        self.rounds: list[Round] = []
        self.works: list[Work] = []
        self._kept_works = kept_works

    def sent(self, message_bytes: int) -> None:
        """The server sent a message."""
        self.sent_bytes += message_bytes

    def received(self, message_bytes: int) -> None:
        """A worker sent the server a message."""
        self.received_bytes += message_bytes

    def closed(self, step: Step, opened_seconds: float, fresh: Iterable[Task], late: Iterable[Task]) -> None:
        """A round closed with these tasks in its update."""
        self.used += len(step.fresh)
        self.late += len(step.late)
        self.rounds.append(
            Round(
                version=step.version,
                opened_seconds=opened_seconds,
                closed_seconds=step.at_seconds,
                k=len(step.fresh),
                used=len(step.fresh),
                late=len(step.late),
            )
        )
        for task in fresh:
            self._keep(task, "used", "")
        for task in late:
            self._keep(task, "late", "")

    def dropped(self, task: Task, reason: str, now_seconds: float) -> None:
        """A task's gradient is in no update."""
        self.dropped_reasons[reason] += 1
        self._keep(task, "dropped", reason, now_seconds)

    def _keep(self, task: Task, outcome: Outcome, reason: str, now_seconds: float | None = None) -> None:
        if len(self.works) >= self._kept_works:
            return
        finished = task.finished_seconds if now_seconds is None else min(task.finished_seconds, now_seconds)
        self.works.append(
            Work(
                worker=task.worker,
                version=task.version,
                started_seconds=task.started_seconds,
                finished_seconds=finished,
                arrived_seconds=task.arrived_seconds,
                blocks_done=task.blocks_done,
                blocks=task.blocks,
                outcome=outcome,
                reason=reason,
            )
        )
