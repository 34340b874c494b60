"""How a run stands while it goes on, and the line of text that says so where no terminal shows it.

    round 40 of 300, 12.3 s, 3.2 rounds/s, loss 0.5321, test 85.1%; late: worker 3

A batch system or a container keeps what a process prints: one line every few seconds is enough to see that a run lives,
where it is, and who is late. `PeriodicLines` is the one place that decides how often, for every long command.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.loggers import GuardedLog, Log
from paceline.terminal import WIDTH
from paceline.traces.worker_counts import CAME_TOO_LATE, WorkerCounts

if TYPE_CHECKING:
    from paceline.traces.journal import Arrival

LINE_SECONDS = 5.0
PACE_SECONDS = 10.0
COUNTED = ("worker", "used", "late", "dropped", "too_late", "blocks", "batch_samples")
MEASURED = ("loss", "accuracy", "test_loss")  # of a RunStatus
MOST_NAMED = 5  # workers in a line


@dataclass(slots=True, kw_only=True)
class WorkerStatus:
    """The state of one worker, for whoever watches the run.

    >>> WorkerStatus(worker=0, alive=True, last="on time", used=3, late=1, dropped=0, refused=0).used
    3
    """

    worker: int
    alive: bool = True
    last: str = ""
    used: int = 0
    late: int = 0
    dropped: int = 0
    refused: int = 0
    too_late: int = 0  # of the dropped ones, those that came too late
    blocks: int = 1
    batch_samples: int = 0

    @property
    def counts(self) -> WorkerCounts:
        """What became of its gradients."""
        return WorkerCounts(**{name: getattr(self, name) for name in COUNTED})

    def note_arrival(self, arrival: Arrival) -> None:
        """Note the size of its batches."""
        self.blocks = max(self.blocks, arrival.blocks)
        self.batch_samples = max(self.batch_samples, arrival.samples * arrival.blocks // max(1, arrival.blocks_done))

    def note_drop(self, reason: str) -> None:
        """Count a gradient that was dropped."""
        self.dropped += 1
        self.too_late += reason in CAME_TOO_LATE
        self.last = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of the run, for whoever watches it.

    >>> RunStatus(round=1, rounds=10, seconds=0.5, loss=None, accuracy=None, begun=True, workers=()).round
    1
    """

    round: int
    rounds: int
    seconds: float
    loss: float | None
    accuracy: float | None
    begun: bool
    workers: tuple[WorkerStatus, ...]
    noun: str = "worker"  # or "rank"
    figures: Mapping[str, float] = field(default_factory=dict)  # what else is worth logging
    test_loss: float | None = None
    begins_within_seconds: float | None = None  # with the workers that are here, however few; None: nobody knows


class Pace:
    """The rounds per second of the last ten seconds.

    The wait for workers is no part of it: the run has a pace once it has begun.

    >>> from dataclasses import replace
    >>> begun = RunStatus(round=10, rounds=90, seconds=0.0, loss=None, accuracy=None, begun=True, workers=())
    >>> pace = Pace()
    >>> pace.add(replace(begun, begun=False, round=0), now=0.0)
    0.0
    >>> pace.add(begun, now=8.0), pace.add(replace(begun, round=30), now=12.0)
    (0.0, 5.0)
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, status: RunStatus, *, now: float) -> float:
        """Note the rounds that are done at a moment, and return the pace."""
        if not status.begun:
            return 0.0
        self._seen.append((now, status.round))
        while now - self._seen[0][0] > PACE_SECONDS:
            self._seen.popleft()
        began, before = self._seen[0]
        return (status.round - before) / (now - began) if now > began else 0.0


class PeriodicLines:
    """Writes a line at most every few seconds, the first after as long: a short run needs none.

    >>> lines = PeriodicLines(print, clock=iter([0.0, 3.0, 6.0]).__next__)
    >>> lines.offer(lambda: "too early")
    >>> lines.offer(lambda: "round 2 of 9")
    round 2 of 9
    """

    def __init__(self, write: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock, self._last = write, clock, clock()

    def offer(self, line: Callable[[], str]) -> None:
        """Write a line if it is time for one; `line` is called only then."""
        now = self._clock()
        if now - self._last >= LINE_SECONDS:
            self._last = now
            self._write(line())


class StatusLines:
    """Writes how a run stands, a line every few seconds.

    >>> lines = StatusLines(print, clock=iter([0.0, 5.0, 5.0]).__next__)
    >>> lines.show(RunStatus(round=0, rounds=9, seconds=5.0, loss=None, accuracy=None, begun=False, workers=()))
    waiting for workers: 0 here
    """

    def __init__(self, write: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines, self._pace, self._clock = PeriodicLines(write, clock=clock), Pace(), clock

    def show(self, status: RunStatus) -> None:
        """Write a line about the run, if it is time for one."""
        pace = self._pace.add(status, now=self._clock())
        self._lines.offer(lambda: status_line(status, pace))


class StatusLog:
    """Hands the figures of a run to a log, whenever more rounds are done; a loss, once for each time it was measured.

    >>> status_log = StatusLog(lambda figures, step: print(step, figures))
    >>> status = RunStatus(round=3, rounds=9, seconds=1.5, loss=0.5, accuracy=None, begun=True, workers=())
    >>> status_log.show(status)
    3 {'paceline/loss': 0.5, 'paceline/seconds': 1.5}
    >>> status_log.show(status)
    """

    def __init__(self, log: Log | None) -> None:
        self._log, self._round = GuardedLog(log), -1
        self._measured: tuple[float | None, ...] = (None, None, None)

    def show(self, status: RunStatus) -> None:
        """Log where the run stands, unless that is logged already."""
        measured = (status.loss, status.accuracy, status.test_loss)
        if not self._log or not status.begun or (status.round <= self._round and measured == self._measured):
            return
        figures = status_figures(status)
        if measured == self._measured:
            figures = {name: value for name, value in figures.items() if name not in MEASURED}
        self._round, self._measured = max(status.round, self._round), measured
        self._log(figures, self._round)


def status_figures(status: RunStatus) -> dict[str, float]:
    """Return the figures of a run: what was measured last, who is there, and what became of gradients so far.

    >>> workers = (WorkerStatus(worker=0, used=3, late=1), WorkerStatus(worker=1, alive=False, dropped=2))
    >>> status_figures(
    ...     RunStatus(round=4, rounds=9, seconds=1.0, loss=None, accuracy=None, begun=True, workers=workers)
    ... )
    {'seconds': 1.0, 'workers': 1, 'used': 3, 'late': 1, 'dropped': 2, 'refused': 0}
    """
    measured = {name: getattr(status, name) for name in MEASURED}
    figures = {name: value for name, value in measured.items() if value is not None} | {"seconds": status.seconds}
    if status.workers:
        figures[f"{status.noun}s"] = sum(worker.alive for worker in status.workers)
        figures |= {
            name: sum(getattr(worker, name) for worker in status.workers)
            for name in ("used", "late", "dropped", "refused")
        }
    return figures | dict(status.figures)


def status_facts(status: RunStatus, rounds_per_second: float) -> list[str]:
    """Return what there is to say of a run's pace and model, beside its rounds.

    >>> status_facts(RunStatus(round=1, rounds=9, seconds=1, loss=0.5, accuracy=0.8, begun=True, workers=()), 2.0)
    ['1.0 s', '2.0 rounds/s', 'loss 0.5000', 'test 80.0%']
    """
    facts = [f"{status.seconds:.1f} s"]
    if rounds_per_second:  # 0 until it is known
        facts.append(f"{rounds_per_second:.1f} rounds/s")
    if status.loss is not None:
        facts.append(f"loss {status.loss:.4f}")
    if status.accuracy is not None:
        facts.append(f"test {status.accuracy:.1%}")
    elif status.test_loss is not None:  # nothing is guessed
        facts.append(f"test loss {status.test_loss:.4f}")
    return facts


def status_line(status: RunStatus, rounds_per_second: float) -> str:
    """Return how a run stands, in one line of at most 80 columns: many workers are counted, not named.

    >>> workers = (WorkerStatus(worker=0, last="late"), WorkerStatus(worker=1, last="on time"))
    >>> status_line(
    ...     RunStatus(round=1, rounds=9, seconds=1.0, loss=None, accuracy=None, begun=True, workers=workers), 2.0
    ... )
    'round 1 of 9, 1.0 s, 2.0 rounds/s; late: worker 0'
    """
    if not status.begun:
        return waiting_text(status)
    facts = [f"round {status.round} of {status.rounds}", *status_facts(status, rounds_per_second)]
    absent: dict[str, list[int]] = {"late": [], "dropped": [], "gone": []}
    for worker in status.workers:
        absent.get(worker.last if worker.alive else "gone", []).append(worker.worker)
    found = {word: numbers for word, numbers in absent.items() if numbers}
    named = "".join(f"; {word}: {named_workers(numbers, status.noun)}" for word, numbers in found.items())
    counted = "".join(f"; {len(numbers)} {word}" for word, numbers in found.items())
    lines = [f"{', '.join(facts)}{named}", f"{', '.join(facts)}{counted}"]
    while len(facts) > 1:  # the loss and the accuracy say most: time and pace go first
        del facts[1]
        lines.append(f"{', '.join(facts)}{counted}")
    return next((line for line in lines if len(line) <= WIDTH), lines[-1])


def waiting_text(status: RunStatus) -> str:
    """Return what a run waits for that has not begun, and for how long.

    >>> status = RunStatus(round=0, rounds=9, seconds=5.0, loss=None, accuracy=None, begun=False, workers=())
    >>> waiting_text(status)
    'waiting for workers: 0 here'
    >>> from dataclasses import replace
    >>> waiting_text(replace(status, workers=(WorkerStatus(worker=0),), begins_within_seconds=42.3))
    'waiting for workers: 1 here, begins without the others in 43 s'
    """
    here = sum(worker.alive for worker in status.workers)
    text, left = f"waiting for workers: {here} here", status.begins_within_seconds
    return text if left is None or not here else f"{text}, begins without the others in {math.ceil(left)} s"


def named_workers(numbers: Sequence[int], noun: str = "worker") -> str:
    """Return the numbers of workers in words; of many, the first few.

    >>> named_workers([3]), named_workers([3, 7]), named_workers(range(9))
    ('worker 3', 'workers 3, 7', 'workers 0, 1, 2, 3, 4 and 4 more')
    """
    shown = ", ".join(map(str, numbers[:MOST_NAMED]))
    rest = f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else ""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {shown}{rest}"
