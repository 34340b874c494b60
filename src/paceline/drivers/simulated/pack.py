"""N workers that average among themselves, on a virtual clock: who computes when, and which averages come of it.

Every worker has a `AveragingState` of its own, which is told what happened and is obeyed. The clock adds the times:

    w0 ####B####.####M          B begins average 0, and trains on (hpsgd)     M merges it at the next step boundary
    w1 #########B####M          the last one in: now the ring starts (.)
                .~~|            and ends after its cost (~)

A worker that waits wakes when the ring ends. How a run ends:

    members that wait         a worker leaves when it has taken `rounds` steps: all take as many
    members that overlap      all leave after the average that takes the merged steps to rounds * workers: a fast worker
                              takes more of them, a slow one fewer

What is on its way or in an open window then is merged before they part. Whoever trains is the pack's `Crew`: the same
queue runs with and without one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from paceline.drivers.simulated.averaging_setup import AveragingSetup
from paceline.drivers.simulated.ring import ring_seconds
from paceline.events import Asked, Averaged, Begin, Merge, Order, Release, Standing, Stepped, Wait, Window
from paceline.strategies.averaging import AveragingState

_DRAWS_AT_ONCE = 256
_STEPPED = Stepped()
_LEAVING = Asked(standing=Standing.LEAVING)


class Crew(Protocol):
    """Whoever trains, for all workers."""

    @property
    def gathers(self) -> bool:
        """Whether messages cannot be added up on their way, and go round whole."""

    def compute(self, worker: int, draw: int) -> None:
        """A worker's batch number `draw` is computed; where changes are averaged, its local step is taken too."""

    def leave(self, worker: int, begin: Begin) -> int:
        """A worker enters an average; returns the bytes it sends."""

    def gathered(self, number: int, windows: Sequence[Window]) -> None:
        """Everybody is in average `number`."""

    def merge(self, worker: int, merge: Merge) -> None:
        """A worker takes in the sum of an average."""

    def settle(self, worker: int) -> None:
        """All orders of this moment are carried out: the worker is about to train on, or is gone."""


@dataclass(frozen=True, kw_only=True)
class NoTraining:
    """Messages of a fixed weight, with nothing in them.

    >>> NoTraining(message_bytes=10).leave(0, Begin(number=0, window=Window(steps=1)))
    10
    """

    message_bytes: int = 0
    gathers: bool = False

    def compute(self, worker: int, draw: int) -> None:
        """Nothing is computed."""

    def leave(self, worker: int, begin: Begin) -> int:
        """The same for every message."""
        return self.message_bytes

    def gathered(self, number: int, windows: Sequence[Window]) -> None:
        """Nothing is added up."""

    def merge(self, worker: int, merge: Merge) -> None:
        """Nothing moves."""

    def settle(self, worker: int) -> None:
        """Nothing moves."""


@dataclass(slots=True, eq=False, kw_only=True)
class Average:
    """One average: what each worker brought, and when. It is done, and the first worker has merged it."""

    number: int
    windows: list[Window]
    opened_seconds: list[float]  # when each worker's window began
    entered_seconds: list[float]
    began_seconds: float = math.inf  # when the last one entered
    ended_seconds: float = math.inf
    sent_bytes: int = 0
    most_bytes: int = 0
    steps: int = 0  # of all workers, in this average
    steps_so_far: int = 0  # and in all averages up to this one
    merged_by: int | None = None  # who was the first
    missing: int  # how many have not entered
    behind: int  # how many have not merged
    waiting: list[int] = field(default_factory=list)
    event: Averaged | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """As many steps as there are workers, where everybody trains alone.

    >>> Lap(steps_so_far=4)
    Lap(steps_so_far=4)
    """

    steps_so_far: int


class Pack:
    """Drives N courses; `run` yields the averages, and the laps of those who have none.

    >>> from paceline.drivers.simulated.delays import Recorded
    >>> from paceline.strategies.averaging import make_averaging
    >>> delays = Recorded(rows=((1.0, 2.0),))
    >>> pack = Pack(AveragingSetup(member=make_averaging("local-sgd", period=3), workers=2, rounds=6, delays=delays))
    >>> [average.ended_seconds for average in pack.run() if average.steps]
    [6.0, 12.0]
    """

    def __init__(self, setup: AveragingSetup, *, crew: Crew | None = None) -> None:
        workers = setup.workers
        self._setup = setup
        self._crew: Crew = crew if crew is not None else NoTraining()
        self._courses = [AveragingState(setup.member, workers) for _ in range(workers)]
        self._steps = [0] * workers
        self._steps_heard_of = [0] * workers  # of all workers, merged: as each of them knows
        self._opened_seconds: list[float | None] = [0.0] * workers
        self._delay_chunks: list[list[float]] = [[] for _ in range(workers)]
        self._averages: dict[int, Average] = {}
        self._queue: list[tuple[float, int, int]] = []  # when, in which order, which worker (or ~average, which ends)
        self._order = itertools.count()
        self._happened: list[Average | Lap] = []
        self.now_seconds = 0.0
        self.steps_taken = self.steps_merged = 0

    def run(self) -> Iterator[Average | Lap]:
        """Go on until everybody has left."""
        for worker in range(self._setup.workers):
            self._begin_computing(worker)
        while self._queue:
            self.now_seconds, _, who = heapq.heappop(self._queue)
            if who >= 0:
                self._stepped(who)
            elif ~who in self._averages:  # else all have merged it at this same moment
                self._ended(self._averages[~who])
            if self._happened:
                yield from self._happened
                self._happened = []
        held_up = [worker for worker, course in enumerate(self._courses) if not course.finished]
        if held_up:
            raise RuntimeError(f"workers {held_up[:10]} wait for an average that cannot end")

    # -- what happens ------------------------------------------------------------------------------------------

    def _at(self, seconds: float, who: int) -> None:
        heapq.heappush(self._queue, (seconds, next(self._order), who))

    def _stepped(self, worker: int) -> None:
        self._crew.compute(worker, self._steps[worker])
        self._steps[worker] += 1
        self.steps_taken += 1
        if self._setup.alone and self.steps_taken % self._setup.workers == 0:
            self._happened.append(Lap(steps_so_far=self.steps_taken))
        course = self._courses[worker]
        before = course.in_flight  # an average that begins now is looked at from the next step boundary on
        orders = course.handle(_STEPPED)
        if before and self._averages[course.averages - 1].ended_seconds <= self.now_seconds:
            self._averaged(worker, self._averages[course.averages - 1])
        else:
            self._carry_out(worker, orders)

    def _ended(self, average: Average) -> None:
        waiting, average.waiting = average.waiting, []
        for worker in waiting:
            self._averaged(worker, average)

    def _averaged(self, worker: int, average: Average) -> None:
        if average.event is None:
            raise RuntimeError(f"average {average.number} is not done, and worker {worker} merges it")
        if average.merged_by is None:
            average.merged_by = worker
            self._happened.append(average)
        average.behind -= 1
        if not average.behind:
            del self._averages[average.number]
        self._steps_heard_of[worker] = average.steps_so_far
        self._carry_out(worker, self._courses[worker].handle(average.event))

    # -- what is ordered ---------------------------------------------------------------------------------------

    def _carry_out(self, worker: int, orders: list[Order]) -> None:
        waits = False
        for order in orders:
            match order:
                case Begin():
                    self._enter(worker, order)
                case Merge():
                    self._crew.merge(worker, order)
                case Wait():
                    waits = True
                case Release():
                    self._crew.settle(worker)
                    return
        if not waits:
            self._go_on(worker)
            return
        average = self._averages[self._courses[worker].averages - 1]
        if average.ended_seconds <= self.now_seconds:
            self._averaged(worker, average)
        else:
            average.waiting.append(worker)

    def _go_on(self, worker: int) -> None:
        self._crew.settle(worker)
        if self._setup.member.counts_own_steps(self._setup.workers):
            enough = self._steps[worker] >= self._setup.rounds
        else:
            enough = self._steps_heard_of[worker] >= self._setup.budget_steps
        if enough:
            self._carry_out(worker, self._courses[worker].handle(_LEAVING))
        else:
            self._begin_computing(worker)

    def _begin_computing(self, worker: int) -> None:
        if self._opened_seconds[worker] is None:
            self._opened_seconds[worker] = self.now_seconds
        self._at(self.now_seconds + self._delay(worker, self._steps[worker]), worker)

    def _enter(self, worker: int, begin: Begin) -> None:
        average = self._averages.get(begin.number)
        if average is None:
            everybody = self._setup.workers
            average = self._averages[begin.number] = Average(
                number=begin.number,
                windows=[begin.window] * everybody,
                opened_seconds=[self.now_seconds] * everybody,
                entered_seconds=[self.now_seconds] * everybody,
                missing=everybody,
                behind=everybody,
            )
        opened = self._opened_seconds[worker]
        average.windows[worker] = begin.window
        average.opened_seconds[worker] = self.now_seconds if opened is None else opened
        average.entered_seconds[worker] = self.now_seconds
        self._opened_seconds[worker] = None
        message_bytes = self._crew.leave(worker, begin)
        average.sent_bytes += message_bytes
        average.most_bytes = max(average.most_bytes, message_bytes)
        average.missing -= 1
        if not average.missing:
            self._start_ring(average)

    def _start_ring(self, average: Average) -> None:
        cost = ring_seconds(
            self._setup.network,
            workers=self._setup.workers,
            message_bytes=average.most_bytes,
            gathers=self._crew.gathers,
        )
        average.began_seconds, average.ended_seconds = self.now_seconds, self.now_seconds + cost
        average.event = Averaged(number=average.number, windows=tuple(average.windows))
        average.steps = sum(window.brought for window in average.windows)
        self.steps_merged += average.steps
        average.steps_so_far = self.steps_merged
        self._crew.gathered(average.number, average.event.windows)
        self._at(average.ended_seconds, ~average.number)

    def _delay(self, worker: int, draw: int) -> float:
        place = draw % _DRAWS_AT_ONCE
        if place == 0:
            draws = np.arange(draw, draw + _DRAWS_AT_ONCE, dtype=np.int64)
            self._delay_chunks[worker] = self._setup.delays.seconds(np.asarray(worker, dtype=np.int64), draws).tolist()
        return self._delay_chunks[worker][place]
