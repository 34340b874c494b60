"""N workers and a server on a virtual clock: who computes when, and which steps come of it.

The cluster deals in *tasks* (who, which version, how many blocks). Whoever trains is its `Cargo`: it takes the steps,
and says what messages weigh, for some codecs give payloads whose size depends on what is in them.

What becomes of a worker that is still computing when it hears that its round has closed:

    late_work="partial"    it stops at the next block boundary, sends what it has, begins the next round
        round closed ------->|
        ####|####|####|####|##|#> sends 5 of 8 blocks, joins the next round late

    late_work="complete"   the paper's simplification: its whole gradient is there at once, for nothing
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline.drivers.simulated.ledger import Ledger
from paceline.drivers.simulated.network import Direction
from paceline.drivers.simulated.setup import Setup
from paceline.drivers.simulated.task import Task, blocks_by
from paceline.events import Drop, GradientArrived, Joined, LossSeen, Send, Step
from paceline.strategies import Running

_DRAWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A step the strategy asked for, and the tasks behind its shares, in the same order."""

    step: Step
    k: int
    opened_seconds: float
    fresh: tuple[Task, ...]
    late: tuple[Task, ...]


class Cargo(Protocol):
    """What the messages carry."""

    def up_bytes(self, task: Task) -> int:
        """What the gradient of a task weighs, which is being sent now."""

    def down_bytes(self, version: int, held_version: int) -> int:
        """What the model weighs for a worker that holds an earlier version (-1: none)."""

    def closed(self, closed: Closed, oldest_version: int) -> None:
        """A step is to be taken, now; of versions before the oldest no gradient will be asked for any more."""


@dataclass(frozen=True, kw_only=True)
class Ballast:
    """Messages of a fixed weight, with nothing in them.

    >>> Ballast(up=10).down_bytes(version=3, held_version=2)
    0
    """

    up: int = 0
    down: int = 0

    def up_bytes(self, task: Task) -> int:
        """The same for every task."""
        return self.up

    def down_bytes(self, version: int, held_version: int) -> int:
        """The same for every version."""
        return self.down

    def closed(self, closed: Closed, oldest_version: int) -> None:
        """Nothing is trained."""


class Cluster:
    """Drives one strategy with simulated workers.

    >>> from paceline.drivers.simulated.delays import Recorded
    >>> from paceline.strategies import Full
    >>> delays = Recorded(rows=((1.0, 2.0),))
    >>> cluster = Cluster(Setup(name="full", strategy=Full(), workers=2, rounds=3, delays=delays))
    >>> [closed.step.at_seconds for closed in cluster.run(3)]
    [2.0, 4.0, 6.0]
    """

    def __init__(self, setup: Setup, *, cargo: Cargo | None = None, ledger: Ledger | None = None) -> None:
        workers = setup.workers
        self.ledger = ledger if ledger is not None else Ledger()
        self.now_seconds = 0.0
        self._setup = setup
        self._strategy: Running = setup.strategy.start()
        self._cargo: Cargo = cargo if cargo is not None else Ballast()
        self._up, self._down = Direction(setup.network, workers), Direction(setup.network, workers)
        self._workers = [_Worker() for _ in range(workers)]
        self._delay_chunks: list[tuple[int, list[float]]] = [(-1, [])] * workers
        self._tasks: dict[tuple[int, int], Task] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._closed: list[Closed] = []
        self._opened_seconds = 0.0

    @property
    def oldest_version(self) -> int:
        """The oldest version whose gradients may still be asked for: worked on, about to be, or on its way."""
        worked_on = {version for _, version in self._tasks}
        coming = {version for state in self._workers for version in state.versions_coming}
        return min(worked_on | coming, default=self._strategy.version)

    def run(self, steps: int) -> Iterator[Closed]:
        """Go on until so many steps were taken, and yield each."""
        if steps < 1:
            raise ValueError(f"steps must be 1 or more (steps={steps})")
        for worker in range(len(self._workers)):
            self._act(self._strategy.handle(Joined(worker=worker)))
        taken = 0
        try:
            while taken < steps:
                self.now_seconds, _, happen = heapq.heappop(self._queue)
                happen()
                while self._closed and taken < steps:
                    taken += 1
                    yield self._closed.pop(0)
        finally:  # also when nobody wants the steps that are left: training diverged
            for task in self._tasks.values():
                self.ledger.dropped(task, "the run ended", self.now_seconds)

    def tell(self, losses: Iterable[LossSeen]) -> None:
        """Pass on what gradients were the gradients of."""
        for loss in losses:
            self._strategy.handle(loss)

    # -- what happens ------------------------------------------------------------------------------------------

    def _at(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (seconds, next(self._order), happen))

    def _delivered(self, worker: int, version: int) -> None:
        state = self._workers[worker]
        state.newest_version, state.version_on_the_wire = version, None
        if state.newest_sent > version:
            self._deliver(worker)  # while this one was on the wire the model moved on
        task = state.task
        if task is None:
            self._begin(worker)
        elif self._setup.late_work == "complete":
            task.finished_seconds = self.now_seconds
            self.ledger.received(self._cargo.up_bytes(task))
            self._at(self.now_seconds, lambda: self._arrived(task))
            self._begin(worker)
        else:
            self._stop_at_block_boundary(task)

    def _begin(self, worker: int) -> None:
        state = self._workers[worker]
        seconds = self._delay(worker, state.draws)
        task = Task(
            worker=worker,
            version=state.newest_version,
            draw=state.draws,
            started_seconds=self.now_seconds,
            seconds=seconds,
            blocks=self._setup.blocks,
            finished_seconds=self.now_seconds + seconds,
            blocks_done=self._setup.blocks,
            delivery_seconds=state.delivery_seconds,
        )
        state.task, state.draws = task, state.draws + 1
        self._tasks[worker, task.version] = task
        self._schedule_finish(task)

    def _schedule_finish(self, task: Task) -> None:
        finish = task.finished_seconds
        self._at(finish, lambda: self._finished(task, finish))

    def _stop_at_block_boundary(self, task: Task) -> None:
        done = blocks_by(self.now_seconds - task.started_seconds, task.seconds / task.blocks, task.blocks)
        if done < task.blocks_done:
            task.blocks_done = int(done)
            boundary = task.started_seconds + int(done) * (task.seconds / task.blocks)
            task.finished_seconds = max(boundary, self.now_seconds)  # rounding must not turn the clock back
            self._schedule_finish(task)

    def _finished(self, task: Task, scheduled_seconds: float) -> None:
        state = self._workers[task.worker]
        if state.task is not task or task.finished_seconds != scheduled_seconds:
            return  # it was stopped earlier than this
        state.task = None
        weight = self._cargo.up_bytes(task)
        arrival = self._up.arrival(worker=task.worker, at_seconds=self.now_seconds, message_bytes=weight)
        self.ledger.received(weight)
        self._at(arrival, lambda: self._arrived(task))
        if state.newest_version > task.version:
            self._begin(task.worker)

    def _arrived(self, task: Task) -> None:
        task.arrived_seconds = self.now_seconds
        event = GradientArrived(
            worker=task.worker,
            version=task.version,
            blocks_done=task.blocks_done,
            blocks=task.blocks,
            at_seconds=self.now_seconds,
            work_seconds=task.seconds * task.blocks_done / task.blocks,
            transfer_seconds=task.delivery_seconds + (self.now_seconds - task.finished_seconds),
        )
        self._act(self._strategy.handle(event))

    # -- what is asked -----------------------------------------------------------------------------------------

    def _act(self, actions: list[Step | Send | Drop]) -> None:
        for action in actions:
            match action:
                case Step():
                    self._step(action)
                case Send():
                    for worker in action.workers:
                        self._send(worker)
                case Drop():
                    task = self._tasks.pop((action.worker, action.version))
                    self.ledger.dropped(task, action.reason, self.now_seconds)

    def _step(self, step: Step) -> None:
        fresh = tuple(self._tasks.pop((share.worker, share.version)) for share in step.fresh)
        late = tuple(self._tasks.pop((share.worker, share.version)) for share in step.late)
        closed = Closed(step=step, k=len(fresh), opened_seconds=self._opened_seconds, fresh=fresh, late=late)
        self.ledger.closed(closed.step, closed.opened_seconds, fresh, late)
        self._cargo.closed(closed, self.oldest_version)
        self._closed.append(closed)
        self._opened_seconds = self.now_seconds

    def _send(self, worker: int) -> None:
        state = self._workers[worker]
        state.newest_sent = self._strategy.version
        if state.version_on_the_wire is None:
            self._deliver(worker)

    def _deliver(self, worker: int) -> None:
        state = self._workers[worker]
        version = state.version_on_the_wire = state.newest_sent
        weight = self._cargo.down_bytes(version, state.newest_version)
        arrival = self._down.arrival(worker=worker, at_seconds=self.now_seconds, message_bytes=weight)
        state.delivery_seconds = arrival - self.now_seconds
        self.ledger.sent(weight)
        self._at(arrival, lambda: self._delivered(worker, version))

    def _delay(self, worker: int, draw: int) -> float:
        chunk, times = self._delay_chunks[worker]
        if draw // _DRAWS_AT_ONCE != chunk:
            chunk = draw // _DRAWS_AT_ONCE
            draws = np.arange(chunk * _DRAWS_AT_ONCE, (chunk + 1) * _DRAWS_AT_ONCE, dtype=np.int64)
            times = self._setup.delays.seconds(np.asarray(worker, dtype=np.int64), draws).tolist()
            self._delay_chunks[worker] = chunk, times
        return times[draw % _DRAWS_AT_ONCE]


@dataclass(slots=True)
class _Worker:
    """What the cluster knows of one worker."""

    task: Task | None = None
    draws: int = 0
    newest_version: int = -1
    newest_sent: int = -1
    version_on_the_wire: int | None = None
    delivery_seconds: float = 0.0

    @property
    def versions_coming(self) -> list[int]:
        """The versions it may begin on next: the one it has and has not begun, and the one on its way."""
        has = [] if self.task is not None and self.task.version == self.newest_version else [self.newest_version]
        coming = [] if self.version_on_the_wire is None else [self.version_on_the_wire]
        return [version for version in has + coming if version >= 0]
