"""A cluster that works in rounds, on a virtual clock: N simulated workers drive one strategy.

The clock is a queue of (time, what happens then). Every entry that is taken out moves the time on and puts in others:

    Send     the server sends a worker the model                              _send, _deliver
    ~~~>     the model arrives, after the network's time                      _delivered
    ####     the worker begins a task: its next batch, at this version        _begin
             the delay model's seconds later the task is finished             _finished
    ~~~>     the gradient arrives: GradientArrived goes to the strategy       _arrived
    Step     the strategy closes the round; the trainer moves the model       _step
    Send     and the workers get the new model: the next round

No gradient is computed here. The cluster deals in *tasks* (which worker, which version, how many blocks), and a
`Trainer` turns the tasks of a step into gradients. It also says how large messages are: with some codecs a payload's
size depends on the numbers in it.

A worker is late if it still computes when the next model arrives, because the round closed without it.

    late_work="partial"    it stops at the next block boundary, sends what it has, and begins the next round
        ####|####|####|####|####> sends 5 of 8 blocks (| is a block boundary), and begins the next round late
                             ^ the next model arrives

    late_work="complete"   the paper's simplification: its whole gradient arrives at that moment, and it begins the next
                           round at once; with `late_blocks` (the paper's figure 6) the gradient of its first so many
                           blocks, or of a number that is drawn anew for each batch

"complete" is the default, so that results can be held against the paper's figures. "partial" is what a real cluster
does. Every table and page names which it was.

With `on="ranks"` there is no server: a gradient stays where it is, and what arrives, a latency later, is a message of a
few bytes that it is there. One rank decides, and a latency later all know the step and add up in one ring:

    w0  ######>        |  ~~~~~~~~~|######         > says that its gradient is there     | the round closes
    w1  ##############>|  ~~~~~~~~~|######         ~ the ring; at its end all have the update, also those who are late
    w2  ###########################|##>            late: its gradient is not in this sum, and the ring does not wait

All begin with the same model, so the first round begins at once.

A real run costs more than computing and messages. Where that was measured, a setup has `MeasuredCosts`: the server is
busy after every step (S), and what arrives meanwhile waits; a worker does more than compute for every batch (o).

    server        |SSS|                 |SSS|           on ranks S is all that passes until everybody has the update
    w0            |    ~~oo######~~>....|    ~~oo####

Where the strategy gives workers shares by their speed, a task has as many samples as its worker was last assigned
(`Assign`). A delay is that of a batch of `batch_size` samples; `seconds_of_batch` says what another takes.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.drivers.simulated.delays import Delays, check_columns, check_not_negative
from paceline.drivers.simulated.network import Direction, Network, WorkerLink, traffic_seconds
from paceline.events import Action, Assign, Drop, GradientArrived, Joined, LossSeen, Send, Step
from paceline.randomness import seed_for, uniform
from paceline.strategies import Async, Running, Strategy, shares_of
from paceline.strategies.shares import SharesBySpeed
from paceline.traces import Outcome, Round, Work
from paceline.traces.records import KEPT_WORKS
from paceline.traces.share_recorder import ShareRecorder
from paceline.traffic import NO_TRAFFIC, Traffic

LateWork: TypeAlias = Literal["partial", "complete"]
LateBlocks: TypeAlias = int | Literal["random"] | None  # None: all
Place: TypeAlias = Literal["server", "ranks"]

_DRAWS_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class BaseSetup:
    """What decides the times of any simulated run, with a server or without one; `recipe` goes into the trace."""

    workers: int
    rounds: int
    delays: Delays
    network: Network = field(default_factory=Network)
    seed: int = 0
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("workers", "rounds", "blocks"):
            if getattr(self, name, 1) < 1:
                raise ValueError(f"{name} must be 1 or more ({name}={getattr(self, name)})")
        check_columns(self.delays, self.workers)


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """What a real run costs besides computing, as it was measured; each is nothing by default.

    `server_seconds` are what follows each step until the new model leaves, or on ranks until all have the update; they
    begin again at the top when they run out. `worker_seconds` are what a worker does for each batch before it computes.
    `links` are the workers' own.

    >>> MeasuredCosts(server_seconds=(0.5, 0.25)).after_step(3), bool(MeasuredCosts())
    (0.25, False)
    """

    server_seconds: tuple[float, ...] = ()
    worker_seconds: Delays | None = None
    links: tuple[WorkerLink, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.server_seconds or self.links) or self.worker_seconds is not None

    def after_step(self, version: int) -> float:
        """Return how long the server is busy after the step of a version."""
        return self.server_seconds[version % len(self.server_seconds)] if self.server_seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Setup(BaseSetup):
    """All that decides the times of a run in rounds, not what it trains; `on` says who adds up.

    `fixed_seconds` of a delay are the same for a batch of any size; it plays a part where shares are by speed. Where
    late work is complete, a straggler has done so many `late_blocks`, however far it was.

    >>> from paceline.drivers.simulated.delays import ShiftedExponential
    >>> from paceline.strategies import Full
    >>> Setup(name="full", strategy=Full(), workers=3, rounds=10, delays=ShiftedExponential()).late_work
    'partial'
    """

    name: str
    strategy: Strategy
    late_work: LateWork = "partial"
    late_blocks: LateBlocks = None
    blocks: int = 1
    on: Place = "server"
    costs: MeasuredCosts = field(default_factory=MeasuredCosts)
    fixed_seconds: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative("fixed_seconds", self.fixed_seconds)
        check_late_blocks(self.late_blocks, late_work=self.late_work, blocks=self.blocks)
        if self.shares is not None and self.shares.multiple % self.blocks:
            raise ValueError(
                f"shares must be multiples of the blocks, which are equal (multiple={self.shares.multiple}, "
                f"blocks={self.blocks})"
            )
        if self.costs.links and len(self.costs.links) != self.workers:
            raise ValueError(f"every worker needs a link (workers={self.workers}, links={len(self.costs.links)})")
        if self.costs.worker_seconds is not None:
            check_columns(self.costs.worker_seconds, self.workers)
        if self.on == "ranks" and isinstance(self.strategy, Async):
            raise ValueError(f"{self.name!r} has no rounds that ranks could add up (on={self.on!r})")

    @property
    def shares(self) -> SharesBySpeed | None:
        """How workers get batches by their speed; None where all of them have the same."""
        return shares_of(self.strategy)


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """One worker's work on one batch at one version of the model, and how many of its blocks the worker gets done.

    `draw` is the number of the batch in the worker's own sequence: 0 for its first batch. Where shares are by speed,
    the batch has so many `samples`, and the worker has drawn `first` samples before it; else both are 0.

    >>> Task(worker=0, version=0, draw=0, started_seconds=0.0, seconds=2.0, blocks=4,
    ...      finished_seconds=2.0, blocks_done=4).arrived_seconds is None
    True
    """

    worker: int
    version: int
    draw: int
    started_seconds: float
    seconds: float  # for the whole batch
    blocks: int
    finished_seconds: float  # moves forward when the worker is stopped at a block boundary
    blocks_done: int
    delivery_seconds: float = 0.0  # how long the model took to the worker
    arrived_seconds: float | None = None
    samples: int = 0
    first: int = 0


def blocks_by(
    elapsed_seconds: float | NDArray[np.float64], block_seconds: float | NDArray[np.float64], blocks: int
) -> NDArray[np.float64]:
    """Return the blocks that a worker has done when it stops at the next boundary: at least one, at most all.

    >>> float(blocks_by(0.3, 0.25, 4)), float(blocks_by(0.0, 0.25, 4)), float(blocks_by(9.9, 0.25, 4))
    (2.0, 1.0, 4.0)
    """
    return np.asarray(np.clip(np.ceil(elapsed_seconds / block_seconds), 1, blocks))


def check_late_blocks(late_blocks: LateBlocks, *, late_work: LateWork, blocks: int) -> None:
    """Refuse a number of late blocks where workers really stop, and one that a batch does not have.

    >>> check_late_blocks(5, late_work="complete", blocks=4)
    Traceback (most recent call last):
    ValueError: late_blocks must be between 1 and blocks (late_blocks=5, blocks=4), or random, or none for all
    """
    if late_blocks is None:
        return
    if late_work == "partial":
        raise ValueError(
            f"late_blocks needs late_work = complete (late_blocks={late_blocks}): with partial, late workers stop at "
            "the block that they are in"
        )
    if isinstance(late_blocks, int) and not 1 <= late_blocks <= blocks:
        given = f"late_blocks={late_blocks}, blocks={blocks}"
        raise ValueError(f"late_blocks must be between 1 and blocks ({given}), or random, or none for all")


def blocks_when_late(late_blocks: LateBlocks, blocks: int, *, seed: int, worker: int, draw: int) -> int:
    """Return how many blocks of its batch with this number a straggler has done, where late work is complete.

    A random number depends on the seed, the worker and the batch alone, and each from 1 to `blocks` is as likely.

    >>> [blocks_when_late("random", 4, seed=0, worker=2, draw=draw) for draw in range(8)]
    [4, 4, 2, 2, 4, 4, 1, 2]
    """
    if late_blocks != "random":
        return late_blocks or blocks
    return 1 + int(uniform(seed_for(seed, "late blocks"), worker, draw) * blocks)


def worker_delays(delays: Delays, worker: int) -> Iterator[float]:
    """Yield the seconds of a worker's batches in order; many are drawn at once, which is quicker."""
    for first in itertools.count(0, _DRAWS_AT_ONCE):
        draws = np.arange(first, first + _DRAWS_AT_ONCE, dtype=np.int64)
        yield from delays.seconds(np.asarray(worker, dtype=np.int64), draws).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenStep:
    """A step that the strategy asked for, and the tasks behind its shares, in the same order."""

    step: Step
    opened_seconds: float
    fresh: tuple[Task, ...]
    late: tuple[Task, ...]


class Trainer(Protocol):
    """Takes the cluster's steps, and knows the size of its messages."""

    @property
    def round_traffic(self) -> Traffic:
        """What ranks have put on the network to come to the sum of the step that was taken last."""

    def up_bytes(self, task: Task) -> int:
        """Return the size of the gradient of a task, which is being sent now."""

    def down_bytes(self, version: int, held_version: int) -> int:
        """Return the size of the model for a worker that holds an earlier version (-1: none)."""

    def take(self, taken: TakenStep, oldest_version: int) -> None:
        """Take a step. No gradient of a version before the oldest will be asked for any more."""


@dataclass(frozen=True, kw_only=True)
class NoTraining:
    """Messages of a fixed size, and steps that change nothing; ranks put `round_traffic` on the network for each.

    >>> NoTraining(up=10).down_bytes(version=3, held_version=2)
    0
    """

    up: int = 0
    down: int = 0
    round_traffic: Traffic = NO_TRAFFIC

    def up_bytes(self, task: Task) -> int:
        return self.up

    def down_bytes(self, version: int, held_version: int) -> int:
        return self.down

    def take(self, taken: TakenStep, oldest_version: int) -> None:
        """Change nothing."""


class ClusterRecord:
    """The counts of a simulated run, its rounds, and its first tasks in full.

    >>> ClusterRecord().used
    0
    """

    def __init__(self) -> None:
        self.used = self.late = 0
        self.dropped_reasons: Counter[str] = Counter()
        self.sent_bytes = self.received_bytes = 0  # by the server; on ranks, sent by all of them
        self.rounds: list[Round] = []
        self.works: list[Work] = []
        self.shares: ShareRecorder | None = None  # where they are by speed

    def add_step(self, taken: TakenStep) -> None:
        """Note that a round closed with these tasks in its update."""
        step, fresh, late = taken.step, len(taken.fresh), len(taken.late)
        self.used += fresh
        self.late += late
        closed = Round(
            version=step.version,
            opened_seconds=taken.opened_seconds,
            closed_seconds=step.at_seconds,
            k=fresh,
            used=fresh,
            late=late,
        )
        self.rounds.append(closed)
        if self.shares is not None:
            self.shares.closed(closed)
        for task in taken.fresh:
            self._keep(task, "used")
        for task in taken.late:
            self._keep(task, "late")

    def add_drop(self, task: Task, reason: str, now_seconds: float) -> None:
        """Note that a task's gradient is in no update."""
        self.dropped_reasons[reason] += 1
        self._keep(task, "dropped", reason, min(task.finished_seconds, now_seconds))

    def _keep(self, task: Task, outcome: Outcome, reason: str = "", finished_seconds: float | None = None) -> None:
        if len(self.works) < KEPT_WORKS:
            self.works.append(
                Work(
                    worker=task.worker,
                    version=task.version,
                    started_seconds=task.started_seconds,
                    finished_seconds=task.finished_seconds if finished_seconds is None else finished_seconds,
                    arrived_seconds=task.arrived_seconds,
                    blocks_done=task.blocks_done,
                    blocks=task.blocks,
                    outcome=outcome,
                    reason=reason,
                )
            )


@dataclass(slots=True)
class _Worker:
    """What the cluster knows of one worker."""

    delays: Iterator[float]
    costs: Iterator[float]  # besides computing
    samples: int = 0  # of its next batch, where shares are by speed
    drawn: int = 0  # samples of all batches begun, where shares are by speed
    task: Task | None = None  # that it computes now
    draws: int = 0  # batches begun
    held_version: int = -1  # newest model that has arrived
    sent_version: int = -1  # newest model that it is to get
    version_on_the_wire: int | None = None  # one model at a time is on its way; then the newest follows
    delivery_seconds: float = 0.0


class _VersionsInUse:
    """How often each version is held, on its way, or computed at. The oldest of them never goes back."""

    def __init__(self) -> None:
        self._uses: dict[int, int] = {}
        self._oldest = 0

    def add(self, version: int) -> None:
        self._uses[version] = self._uses.get(version, 0) + 1

    def remove(self, version: int) -> None:
        self._uses[version] -= 1
        if not self._uses[version]:
            del self._uses[version]

    def oldest(self, newest: int) -> int:
        """Return the oldest version in use; the newest if there is none."""
        while self._oldest < newest and self._oldest not in self._uses:
            self._oldest += 1
        return self._oldest


def _seconds_of_batches(setup: Setup) -> Callable[[float, int], float]:
    """Return the seconds of a batch, given its delay and its samples."""
    if (shares := setup.shares) is None:
        return lambda seconds, samples: seconds
    from paceline.workers.paced import seconds_of_batch  # it loads torch

    return functools.partial(seconds_of_batch, batch_size=shares.batch_size, fixed_seconds=setup.fixed_seconds)


class Cluster:
    """Drives one strategy with simulated workers.

    >>> from paceline.drivers.simulated.delays import Recorded
    >>> from paceline.strategies import Full
    >>> delays = Recorded(rows=((1.0, 2.0),))
    >>> cluster = Cluster(Setup(name="full", strategy=Full(), workers=2, rounds=3, delays=delays))
    >>> [taken.step.at_seconds for taken in cluster.run(3)]
    [2.0, 4.0, 6.0]
    """

    def __init__(self, setup: Setup, *, trainer: Trainer | None = None) -> None:
        self.record = ClusterRecord()
        self.now_seconds = 0.0
        self._setup = setup
        if setup.shares is not None:
            self.record.shares = ShareRecorder()
        self._strategy: Running = setup.strategy.start()
        self._trainer: Trainer = trainer if trainer is not None else NoTraining()
        links = setup.costs.links
        self._up = Direction(setup.network, setup.workers, [link.up for link in links])
        self._down = Direction(setup.network, setup.workers, [link.down for link in links])
        beside = setup.costs.worker_seconds
        self._seconds_of = _seconds_of_batches(setup)
        self._workers = [
            _Worker(
                worker_delays(setup.delays, worker),
                itertools.repeat(0.0) if beside is None else worker_delays(beside, worker),
                samples=0 if setup.shares is None else setup.shares.batch_size,
            )
            for worker in range(setup.workers)
        ]
        self._tasks: dict[tuple[int, int], Task] = {}  # by worker and version: begun, and neither used nor dropped yet
        self._in_use = _VersionsInUse()  # of these tasks, and of what workers hold or are about to
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()  # what was scheduled first happens first, at the same time
        self._taken: list[TakenStep] = []
        self._opened_seconds = 0.0
        self._server_free = 0.0  # when the server is done with the newest step
        self.updated_seconds = 0.0  # when the newest update is there: as its round closes, on ranks after the ring

    @property
    def oldest_version(self) -> int:
        """The oldest version whose gradients may still be asked for: worked on, about to be, or on its way."""
        return self._in_use.oldest(self._strategy.version)

    @property
    def draws(self) -> tuple[int, ...]:
        """How many batches each worker has begun."""
        return tuple(state.draws for state in self._workers)

    def run(self, steps: int) -> Iterator[TakenStep]:
        """Go on until so many steps were taken, and yield each."""
        if steps < 1:
            raise ValueError(f"steps must be 1 or more (steps={steps})")
        for worker in range(len(self._workers)):
            self._carry_out(self._strategy.handle(Joined(worker=worker)))
        taken = 0
        try:
            while taken < steps:
                self.now_seconds, _, happen = heapq.heappop(self._queue)
                happen()
                while self._taken and taken < steps:
                    taken += 1
                    yield self._taken.pop(0)
        finally:  # also when nobody wants the steps that are left: training diverged
            for task in self._tasks.values():
                self.record.add_drop(task, "the run ended", self.now_seconds)
            self._queue.clear()  # what would have happened holds the cluster, and with it the model and the data

    def pass_on(self, losses: Iterable[LossSeen]) -> None:
        """Pass the losses of a step's gradients on to the strategy."""
        for loss in losses:
            self._strategy.handle(loss)

    # -- what happens ------------------------------------------------------------------------------------------

    def _schedule(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (seconds, next(self._order), happen))

    def _delivered(self, worker: int, version: int) -> None:
        """A model has arrived: the worker begins on it, or, if it is late, comes to an end with the one before."""
        state = self._workers[worker]
        if state.held_version >= 0:
            self._in_use.remove(state.held_version)
        state.held_version, state.version_on_the_wire = version, None
        if state.sent_version > version:
            self._deliver(worker)  # while this one was on the wire the model moved on
        task = state.task
        if task is None:
            self._begin(worker)
        elif self._setup.late_work == "complete":
            task.finished_seconds, task.blocks_done = self.now_seconds, self._blocks_when_late(task)
            self._send_up(task)
            self._schedule(self.now_seconds, lambda: self._arrived(task))
            self._begin(worker)
        else:
            self._stop_at_block_boundary(task)

    def _blocks_when_late(self, task: Task) -> int:
        setup = self._setup
        return blocks_when_late(setup.late_blocks, task.blocks, seed=setup.seed, worker=task.worker, draw=task.draw)

    def _begin(self, worker: int) -> None:
        state = self._workers[worker]
        seconds = self._seconds_of(next(state.delays), state.samples)
        started = self.now_seconds + next(state.costs)
        task = Task(
            worker=worker,
            version=state.held_version,
            draw=state.draws,
            started_seconds=started,
            seconds=seconds,
            blocks=self._setup.blocks,
            finished_seconds=started + seconds,
            blocks_done=self._setup.blocks,
            delivery_seconds=state.delivery_seconds,
            samples=state.samples,
            first=state.drawn,
        )
        state.task, state.draws, state.drawn = task, state.draws + 1, state.drawn + state.samples
        self._tasks[worker, task.version] = task
        self._in_use.add(task.version)
        self._schedule_finish(task)

    def _schedule_finish(self, task: Task) -> None:
        finish = task.finished_seconds
        self._schedule(finish, lambda: self._finished(task, finish))

    def _stop_at_block_boundary(self, task: Task) -> None:
        done = blocks_by(max(0.0, self.now_seconds - task.started_seconds), task.seconds / task.blocks, task.blocks)
        if done < task.blocks_done:
            task.blocks_done = int(done)
            boundary = task.started_seconds + int(done) * (task.seconds / task.blocks)
            task.finished_seconds = max(boundary, self.now_seconds)  # rounding must not turn the clock back
            self._schedule_finish(task)

    def _finished(self, task: Task, scheduled_seconds: float) -> None:
        """A task has come to its end: its gradient is sent, and the next task begins if a newer model is there."""
        state = self._workers[task.worker]
        if state.task is not task or task.finished_seconds != scheduled_seconds:
            return  # it was stopped earlier than this
        state.task = None
        size = self._send_up(task)
        arrival = self._up.arrival(worker=task.worker, at_seconds=self.now_seconds, message_bytes=size)
        self._schedule(arrival, lambda: self._arrived(task))
        if state.held_version > task.version:
            self._begin(task.worker)

    def _send_up(self, task: Task) -> int:
        """Send a gradient, or on ranks only word of it; return the bytes that count."""
        size = self._trainer.up_bytes(task)  # it may compute the gradient, so it is called on ranks too
        if self._setup.on == "ranks":
            return 0
        self.record.received_bytes += size
        return size

    def _arrived(self, task: Task) -> None:
        if self._setup.on == "server" and self._server_free > self.now_seconds:
            self._schedule(self._server_free, lambda: self._arrived(task))
            return
        task.arrived_seconds = self.now_seconds
        event = GradientArrived(
            worker=task.worker,
            version=task.version,
            blocks_done=task.blocks_done,
            blocks=task.blocks,
            at_seconds=self.now_seconds,
            work_seconds=task.seconds * task.blocks_done / task.blocks,
            transfer_seconds=task.delivery_seconds + (self.now_seconds - task.finished_seconds),
            samples=task.samples,
        )
        if self.record.shares is not None:
            self.record.shares.arrived(
                worker=task.worker,
                version=task.version,
                samples=task.samples,
                seconds=task.seconds + event.transfer_seconds,
            )
        self._carry_out(self._strategy.handle(event))

    # -- what the strategy asks for ----------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Step():
                    self._step(action)
                case Assign():
                    for worker, samples in action.samples:
                        self._workers[worker].samples = samples
                case Send():
                    for worker in action.workers:
                        self._send(worker)
                case Drop():
                    task = self._pop_task(action.worker, action.version)
                    self.record.add_drop(task, action.reason, self.now_seconds)

    def _step(self, step: Step) -> None:
        """Let the trainer take a step with the tasks of its shares: fresh ones, and late ones of the round before."""
        fresh, late = (
            tuple(self._pop_task(share.worker, share.version) for share in shares) for shares in (step.fresh, step.late)
        )
        taken = TakenStep(step=step, opened_seconds=self._opened_seconds, fresh=fresh, late=late)
        self.record.add_step(taken)
        self._trainer.take(taken, self.oldest_version)
        self._taken.append(taken)
        self._opened_seconds = self.updated_seconds = self.now_seconds
        self._server_free = self.now_seconds + self._setup.costs.after_step(step.version)
        if self._setup.on == "ranks":
            self._add_up()

    def _pop_task(self, worker: int, version: int) -> Task:
        self._in_use.remove(version)
        return self._tasks.pop((worker, version))

    def _add_up(self) -> None:
        """Let the step reach all ranks, and the ring take it round."""
        network, traffic = self._setup.network, self._trainer.round_traffic
        self.updated_seconds = self._server_free + (network.latency_seconds + traffic_seconds(network, traffic))
        self.record.sent_bytes += round(self._setup.workers * traffic.given_bytes)

    def _send(self, worker: int) -> None:
        state = self._workers[worker]
        state.sent_version = self._strategy.version
        if state.version_on_the_wire is None:
            self._deliver(worker)

    def _deliver(self, worker: int) -> None:
        state = self._workers[worker]
        version = state.version_on_the_wire = state.sent_version
        self._in_use.add(version)
        leaves = self.now_seconds
        if self._setup.on == "ranks":
            arrival = self.updated_seconds
        else:
            leaves = max(leaves, self._server_free)
            size = self._trainer.down_bytes(version, state.held_version)
            arrival = self._down.arrival(worker=worker, at_seconds=leaves, message_bytes=size)
            self.record.sent_bytes += size
        state.delivery_seconds = arrival - leaves
        self._schedule(arrival, lambda: self._delivered(worker, version))
