"""N workers that average among themselves, on a virtual clock: who computes when, and which averages come of it.

Every worker has an averaging state of its own (`strategies/averaging`): it hears what happened and answers with orders
(`Begin`, `Wait`, `Merge`, `Release`), which are carried out here. The clock adds the times:

    w0 ####B####.####M          B begins average 0, and trains on (hpsgd)     M merges it at the next step boundary
    w1 #########B####M          the last one in: now the ring starts (.)
                .~~|            and ends after its cost (~)

A worker that waits wakes when the ring ends. How a run ends:

    members that wait         a worker leaves when it has taken `rounds` steps: all take as many
    members that overlap      all leave after the average that takes the merged steps to rounds * workers: a fast worker
                              takes more of them, a slow one fewer

A run that ends by passes over the shards (`ended`) ends when every worker has made them, if that comes first.

What is on its way or in an open window then is merged before they part. A `ReplicaTrainer` holds the workers' models;
the same queue runs with and without one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.drivers.simulated.cluster import BaseSetup, worker_delays
from paceline.drivers.simulated.network import traffic_seconds
from paceline.events import Asked, Averaged, Begin, Merge, Order, Release, Standing, Stepped, Wait, Window
from paceline.strategies.averaging import Averaging, AveragingState
from paceline.traffic import NO_TRAFFIC, Traffic

_STEPPED = Stepped()
_LEAVING = Asked(standing=Standing.LEAVING)


@dataclass(frozen=True, kw_only=True)
class AveragingSetup(BaseSetup):
    """All that decides the times of a run without a server, not what it trains.

    `rounds` times `workers` local steps are taken in all, whoever takes them, so that members compare like with like.

    >>> from paceline.drivers.simulated.delays import ShiftedExponential
    >>> from paceline.strategies.averaging import make_averaging
    >>> AveragingSetup(member=make_averaging("hpsgd"), workers=3, rounds=10, delays=ShiftedExponential()).budget_steps
    30
    """

    member: Averaging
    name: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name:
            object.__setattr__(self, "name", self.member.name)

    @property
    def budget_steps(self) -> int:
        """The local steps of all workers together."""
        return self.rounds * self.workers

    @property
    def alone(self) -> bool:
        """Whether every worker trains alone until the end, and nothing is averaged before it."""
        return self.member.alone(self.workers)


class ReplicaTrainer(Protocol):
    """Holds the models of all workers, and trains and merges them."""

    def compute(self, worker: int, draw: int) -> None:
        """Compute a worker's batch number `draw`; where changes are averaged, take its local step too."""

    def enter(self, worker: int, begin: Begin) -> None:
        """Let a worker enter an average."""

    def add_up(self, number: int, windows: Sequence[Window]) -> Traffic:
        """Add up average `number`, which every worker has entered; return what that puts on the network."""

    def merge(self, worker: int, merge: Merge) -> None:
        """Let a worker take in the sum of an average."""

    def settle(self, worker: int) -> None:
        """Finish a worker's step: all orders of this moment are carried out, and it trains on or is done."""


@dataclass(frozen=True, kw_only=True)
class NoReplicas:
    """Averages that all put the same on the network, and no models.

    >>> NoReplicas(traffic=Traffic(hops=2)).add_up(0, [Window(steps=1)])
    Traffic(hops=2, given_bytes=0.0)
    """

    traffic: Traffic = NO_TRAFFIC

    def enter(self, worker: int, begin: Begin) -> None:
        """Do nothing."""

    def compute(self, worker: int, draw: int) -> None:
        """Do nothing."""

    def add_up(self, number: int, windows: Sequence[Window]) -> Traffic:
        return self.traffic

    def merge(self, worker: int, merge: Merge) -> None:
        """Do nothing."""

    def settle(self, worker: int) -> None:
        """Do nothing."""


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedAverage:
    """One average: the windows that the workers brought, and when. It is yielded when the first worker merges it."""

    number: int
    windows: list[Window]
    opened_seconds: list[float]  # when each worker's window began
    entered_seconds: list[float]
    began_seconds: float = math.inf  # when the last one entered
    ended_seconds: float = math.inf
    sent_bytes: int = 0
    steps: int = 0  # of all workers, in this average
    steps_so_far: int = 0  # and in all averages up to this one
    merged_by: int | None = None  # who was the first
    missing: int  # how many have not entered
    behind: int  # how many have not merged
    waiting: list[int] = field(default_factory=list)
    event: Averaged | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoneSteps:
    """One more round of local steps, as many as there are workers, where every worker trains alone.

    >>> LoneSteps(steps_so_far=4)
    LoneSteps(steps_so_far=4)
    """

    steps_so_far: int


class AveragingCluster:
    """Drives the averaging states of N workers; `run` yields the averages, or where there are none the rounds.

    >>> from paceline.drivers.simulated.delays import Recorded
    >>> from paceline.strategies.averaging import make_averaging
    >>> delays = Recorded(rows=((1.0, 2.0),))
    >>> setup = AveragingSetup(member=make_averaging("local-sgd", period=3), workers=2, rounds=6, delays=delays)
    >>> [average.ended_seconds for average in AveragingCluster(setup).run() if average.steps]
    [6.0, 12.0]
    """

    def __init__(
        self,
        setup: AveragingSetup,
        *,
        trainer: ReplicaTrainer | None = None,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        workers = setup.workers
        self._setup, self._ended_early = setup, ended
        self._trainer: ReplicaTrainer = trainer if trainer is not None else NoReplicas()
        self._states = [AveragingState(setup.member, workers) for _ in range(workers)]
        self._steps = [0] * workers
        self._steps_known_merged = [0] * workers  # by all workers, as far as each of them knows
        self._opened_seconds: list[float | None] = [0.0] * workers
        self._delays = [worker_delays(setup.delays, worker) for worker in range(workers)]
        self._averages: dict[int, SimulatedAverage] = {}
        self._queue: list[
            tuple[float, int, int]
        ] = []  # when, in which order, whose step (or ~number: that average ends)
        self._order = itertools.count()
        self._happened: list[SimulatedAverage | LoneSteps] = []
        self.now_seconds = 0.0
        self.steps_taken = self.steps_merged = 0

    def run(self) -> Iterator[SimulatedAverage | LoneSteps]:
        """Go on until every worker has left."""
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
        held_up = [worker for worker, state in enumerate(self._states) if not state.finished]
        if held_up:
            raise RuntimeError(f"workers {held_up[:10]} wait for an average that cannot end")

    # -- what happens ------------------------------------------------------------------------------------------

    def _schedule(self, seconds: float, who: int) -> None:
        heapq.heappush(self._queue, (seconds, next(self._order), who))

    def _stepped(self, worker: int) -> None:
        """A worker has computed a batch: it merges an average that has ended meanwhile, or does what is ordered."""
        self._trainer.compute(worker, self._steps[worker])
        self._steps[worker] += 1
        self.steps_taken += 1
        if self._setup.alone and self.steps_taken % self._setup.workers == 0:
            self._happened.append(LoneSteps(steps_so_far=self.steps_taken))
        state = self._states[worker]
        before = state.in_flight  # an average that begins now is looked at from the next step boundary on
        orders = state.handle(_STEPPED)
        if before and self._averages[state.averages - 1].ended_seconds <= self.now_seconds:
            self._averaged(worker, self._averages[state.averages - 1])
        else:
            self._carry_out(worker, orders)

    def _ended(self, average: SimulatedAverage) -> None:
        """A ring has ended: whoever waits for it wakes."""
        waiting, average.waiting = average.waiting, []
        for worker in waiting:
            self._averaged(worker, average)

    def _averaged(self, worker: int, average: SimulatedAverage) -> None:
        if average.event is None:
            raise RuntimeError(f"average {average.number} is not done, and worker {worker} merges it")
        if average.merged_by is None:
            average.merged_by = worker
            self._happened.append(average)
        average.behind -= 1
        if not average.behind:
            del self._averages[average.number]
        self._steps_known_merged[worker] = average.steps_so_far
        self._carry_out(worker, self._states[worker].handle(average.event))

    # -- what is ordered ---------------------------------------------------------------------------------------

    def _carry_out(self, worker: int, orders: list[Order]) -> None:
        waits = False
        for order in orders:
            match order:
                case Begin():
                    self._enter(worker, order)
                case Merge():
                    self._trainer.merge(worker, order)
                case Wait():
                    waits = True
                case Release():
                    self._trainer.settle(worker)
                    return
        if not waits:
            self._go_on(worker)
            return
        average = self._averages[self._states[worker].averages - 1]
        if average.ended_seconds <= self.now_seconds:
            self._averaged(worker, average)
        else:
            average.waiting.append(worker)

    def _go_on(self, worker: int) -> None:
        self._trainer.settle(worker)
        if self._setup.member.counts_own_steps(self._setup.workers):
            enough = self._steps[worker] >= self._setup.rounds
        else:
            enough = self._steps_known_merged[worker] >= self._setup.budget_steps
        if enough or self._ended_early():
            self._carry_out(worker, self._states[worker].handle(_LEAVING))
        else:
            self._begin_computing(worker)

    def _begin_computing(self, worker: int) -> None:
        if self._opened_seconds[worker] is None:
            self._opened_seconds[worker] = self.now_seconds
        self._schedule(self.now_seconds + next(self._delays[worker]), worker)

    def _enter(self, worker: int, begin: Begin) -> None:
        average = self._averages.get(begin.number)
        if average is None:
            everybody = self._setup.workers
            average = self._averages[begin.number] = SimulatedAverage(
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
        self._trainer.enter(worker, begin)
        average.missing -= 1
        if not average.missing:
            self._start_ring(average)

    def _start_ring(self, average: SimulatedAverage) -> None:
        average.event = Averaged(number=average.number, windows=tuple(average.windows))
        traffic = self._trainer.add_up(average.number, average.event.windows)
        average.sent_bytes = round(self._setup.workers * traffic.given_bytes)
        cost = traffic_seconds(self._setup.network, traffic)
        average.began_seconds, average.ended_seconds = self.now_seconds, self.now_seconds + cost
        average.steps = sum(window.brought for window in average.windows)
        self.steps_merged += average.steps
        average.steps_so_far = self.steps_merged
        self._schedule(average.ended_seconds, ~average.number)
