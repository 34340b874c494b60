"""The run loop of a rank of a recipe, and the record of what happened in it.

    begin ── step ── step ── step ── ...  ── end ── checkpoint ── gather times ── evaluate ── trace
                ├─ evaluation, every `evaluate_every` rounds
                └─ checkpoint, every `checkpoint_every` rounds

`RankRun` has two subclasses, `AveragingRun` (drivers/averaging/job.py) and `PipelineRun` (drivers/pipelining/job.py),
which define what a step and a round are. All ranks reach a given `rounds_done` at the same average (or pipeline step),
so they evaluate, write checkpoints and end together. Ranks that take rounds have a loop of their own
(drivers/rounds/job.py), because their record is a journal; they share the settings and the checkpoints.

Each rank measures times on its own clock, which starts when all ranks are ready (`begin_together`); they are gathered
once, at the end (`RunRecorder`).
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch

from paceline.decoding import AS_ARRAY, Count, decode
from paceline.distributed.agreement import raise_refusals
from paceline.distributed.stores import StoreGather
from paceline.drivers.ranks.checkpoints import ROUNDS, RankCheckpoints
from paceline.drivers.ranks.times import RankTimes
from paceline.errors import PacelineError
from paceline.events import Window
from paceline.traces import Evaluation, Round, Trace, Work
from paceline.traces.journal import Seconds
from paceline.traces.records import KEPT_WORKS, works_left_out
from paceline.traces.run_status import RunStatus, WorkerStatus
from paceline.training import Batches, Measurement, Training
from paceline.training.saved_state import (
    SavedStateError,
    check_optimizer,
    check_schedule,
    refusing,
)
from paceline.workers.paced import Delay, no_delay

OnStanding = Callable[[RunStatus], None]
STARTED, BEGUN, DONE = range(3)
MOST_WINDOWS = 1_000_000  # 24 bytes each, of all workers; a replay needs every one of them
Evaluations: TypeAlias = tuple[Annotated[Evaluation, AS_ARRAY], ...]


class DivergedError(PacelineError, ValueError):
    """The loss is not finite any more.

    >>> raise DivergedError("round 30: the loss is nan; lower the learning rate")
    Traceback (most recent call last):
    paceline.drivers.ranks.run.DivergedError: round 30: the loss is nan; lower the learning rate
    """


def check_loss(loss: float, rounds: int) -> None:
    """Raise DivergedError if a loss is not finite.

    >>> check_loss(0.5, 30)
    """
    if not math.isfinite(loss):
        raise DivergedError(f"round {rounds}: the loss is {loss}; lower the learning rate")


@dataclass(frozen=True, kw_only=True, eq=False)
class RankJob:
    """The settings of a rank's run: what is trained, for how many rounds, and the folder for checkpoints.

    `delay_seconds(worker, draw)` is the least duration of a step (draw: the number of the worker's batch), to slow
    workers down on purpose; `recipe` is stored in every checkpoint. `timeout_seconds` limits waits for other ranks.
    `describe` writes what is in the folder beside checkpoints, if somebody has deleted the folder.
    """

    training: Training
    rounds: int
    folder: Path
    evaluate_every: int = 10
    checkpoint_every: int = 50
    timeout_seconds: float = 600.0
    delay_seconds: Delay = no_delay
    recipe: Mapping[str, Any] = field(default_factory=dict)
    describe: Callable[[], None] = lambda: None


class RunRecorder(ABC):
    """The clock, the evaluations and the times of a run, through all attempts of its launch.

    Windows and times are kept of the first rounds, MOST_WINDOWS of all workers together, for each rank holds them and
    writes them into every checkpoint. `recorded` counts all rounds.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.evaluations: list[Evaluation] = []
        self.every_time = torch.empty((0, workers, 3), dtype=torch.float64)  # rounds x workers x (started, begun, done)
        self._zero = self._earlier_seconds = 0.0
        self.recorded = 0

    @property
    def has_room(self) -> bool:
        """Whether the windows and times of the next round are kept."""
        return self.recorded < MOST_WINDOWS // self.workers

    def start_clock(self, now: float) -> None:
        """Begin to count seconds; a run that goes on begins where it had come to."""
        self._zero = now - self._earlier_seconds

    def seconds(self, now: float) -> float:
        """Return the seconds of the run at a moment of time.perf_counter()."""
        return now - self._zero

    @abstractmethod
    def times(self) -> torch.Tensor:
        """Return this rank's own times, a row for each round."""

    @abstractmethod
    def windows(self) -> list[tuple[Window, ...]]:
        """Return, for each round, every worker's window: the local steps that it contributed."""

    def state_dict(self, now: float) -> dict[str, Any]:
        """Return all of it, as tensors and plain values."""
        return {
            "times": self.times(),
            "recorded": self.recorded,
            "seconds": self.seconds(now),
            "evaluations": [[e.round, e.seconds, e.loss, e.accuracy, e.test_loss] for e in self.evaluations],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._earlier_seconds = decode(Seconds, state["seconds"], "seconds")
        self.recorded = decode(Count, state.get("recorded", len(state["times"])), "recorded")
        self.evaluations = list(decode(Evaluations, _with_test_losses(state["evaluations"]), "evaluations"))

    def trace(self, **about: Any) -> Trace:
        """Return the whole run, once `every_time` is gathered; `about` is what a Trace says besides."""
        rounds, works = rounds_and_works(self.windows(), self.every_time)
        cut = f"the times of the first {len(rounds):,} of {self.recorded:,} averages or steps of all ranks are kept"
        return Trace(
            workers=self.workers,
            clock="real",
            averaged=True,
            rounds=rounds,
            works=works,
            evaluations=tuple(self.evaluations),
            missing=(*((cut,) if len(rounds) < self.recorded else ()), *works_left_out(len(works))),
            **about,
        )


def _with_test_losses(stored: object) -> object:
    """Return the evaluations of a checkpoint; those of an older one have no test loss, which is None then."""
    if not isinstance(stored, list):
        return stored
    before = len(fields(Evaluation)) - 1
    return [[*each, None] if isinstance(each, list) and len(each) == before else each for each in stored]


def rounds_and_works(
    windows: Sequence[Sequence[Window]], times: torch.Tensor
) -> tuple[tuple[Round, ...], tuple[Work, ...]]:
    """Return a Round for each average, and the first KEPT_WORKS works: a worker's window of at least one step in it.

    `times` are averages x workers x (started its steps, entered the average, average done), in seconds of the run.

    >>> times = torch.tensor([[[0.0, 1.0, 2.5], [0.0, 2.0, 2.4]]])
    >>> rounds, works = rounds_and_works([(Window(steps=1), Window(steps=2))], times)
    >>> [round(work.sent_seconds - work.finished_seconds, 3) for work in works]
    [1.0, 0.0]
    """
    rounds: list[Round] = []
    works: list[Work] = []
    opened = 0.0
    for number, (average, moments) in enumerate(zip(windows, times.tolist(), strict=True)):
        sent = max(moment[BEGUN] for moment in moments)  # an all-reduce starts when the last rank enters it
        done = max(sent, min(moment[DONE] for moment in moments))
        brought = [worker for worker, window in enumerate(average) if window.brought]
        rounds.append(
            Round(
                version=number,
                opened_seconds=opened,
                closed_seconds=max(done, opened),
                k=len(average),
                used=len(brought),
                late=0,
            )
        )
        opened = rounds[-1].closed_seconds
        works += [
            Work(
                worker=worker,
                version=number,
                started_seconds=moments[worker][STARTED],
                finished_seconds=moments[worker][BEGUN],
                arrived_seconds=done,
                sent_seconds=sent,
            )
            for worker in brought[: max(0, KEPT_WORKS - len(works))]
        ]
    return tuple(rounds), tuple(works)


def rank_status(
    done: int,
    rounds: int,
    seconds: float,
    measured: Evaluation | None = None,
    workers: Sequence[WorkerStatus] = (),
    figures: Mapping[str, float] | None = None,
) -> RunStatus:
    """Return the state of a run of ranks, with what was last measured.

    >>> rank_status(3, 9, 1.5).loss is None
    True
    """
    return RunStatus(
        round=min(done, rounds),  # windows in flight at the end may make it more
        rounds=rounds,
        seconds=seconds,
        loss=None if measured is None else measured.loss,
        accuracy=None if measured is None else measured.accuracy,
        test_loss=None if measured is None else measured.test_loss,
        begun=True,
        workers=tuple(replace(worker) for worker in workers),
        noun="rank",
        figures={} if figures is None else dict(figures),
    )


class RankRun(ABC):
    """One rank's side of a run; needs an initialised process group.

    A subclass sets `optimizer`, `schedule` and `recorder` when it is constructed, and `times` if it keeps step times.
    """

    job: RankJob
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    recorder: RunRecorder
    times: RankTimes | None = None

    def __init__(self, job: RankJob, ranks: StoreGather, *, on_standing: OnStanding = lambda standing: None) -> None:
        self.job, self.ranks, self._on_standing = job, ranks, on_standing
        self.batches = Batches(job.training)
        self.checkpoints = RankCheckpoints(job.folder, ranks.rank)

    # -- what averaging and pipelines do differently -------------------------------------------------------------------

    @abstractmethod
    def connected(self) -> AbstractContextManager[Any]:
        """Return the context manager of the connection between the ranks, which `run` enters and leaves."""

    @property
    @abstractmethod
    def rounds_done(self) -> int:
        """The rounds that all ranks have done."""

    @property
    def over(self) -> bool:
        """Whether this rank has taken its last step."""
        return self.rounds_done >= self.job.rounds

    @abstractmethod
    def begin_together(self) -> None:
        """Wait until all ranks are ready to take the first step, so that their clocks start together."""

    @abstractmethod
    def step(self) -> None:
        """Take one step."""

    @abstractmethod
    def end(self, *, was_over: bool) -> None:
        """Make all ranks' models equal after the last step; `was_over`: the run was loaded when it had ended."""

    @abstractmethod
    def measure_model(self) -> Measurement | None:
        """Measure the model; return None on a rank that only takes part in it."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what is kept in a checkpoint beside the optimiser, its schedule, the record and the recipe."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from the `state` in a checkpoint."""

    @abstractmethod
    def gather_times(self) -> None:
        """Bring all ranks' times together in the recorder. All ranks must come here."""

    @property
    def steps_taken(self) -> int:
        """The steps that this rank has taken by now."""
        return self.rounds_done

    @property
    def step_version(self) -> int | None:
        """The `version` in the step times of the last step; None where steps have none."""
        return None

    def figures(self) -> dict[str, float]:
        """Return what is worth logging by now, of this rank."""
        return {}

    @abstractmethod
    def trace(self, **about: Any) -> Trace | None:
        """Return the trace of the run on rank 0, and None on the others."""

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self, state: Mapping[str, Any] | None = None) -> Trace | None:
        """Train to the end, from a state that was kept or from the beginning; rank 0 returns what happened."""
        with self.connected(), nullcontext() if self.times is None else self.times:
            if state is not None:
                self._load(state)
            if not self.recorder.evaluations:
                self._evaluate(0.0)
            self.begin_together()
            self.recorder.start_clock(time.perf_counter())
            was_over = self.over
            if self.times is not None and not was_over:
                self.times.begin(step=self.steps_taken, seconds=self.recorder.seconds(time.perf_counter()))
            while not self.over:
                before = self.rounds_done
                self.step()
                self._do_due(before)
                self._show(self.recorder.seconds(time.perf_counter()))
                if self.times is not None:
                    self.times.end_step(version=self.step_version)
            self.end(was_over=was_over)
            seconds = self.recorder.seconds(time.perf_counter())
            if not was_over:
                self._follow_schedule()
                self._keep()
            self.gather_times()
            if self.times is not None:
                self.times.end("all rounds are done")
            self._evaluate(seconds)
            return self.trace(
                seed=self.job.training.seed, recipe=self.job.recipe, rounds_done=self.rounds_done, seconds=seconds
            )

    def _do_due(self, before: int) -> None:
        """Evaluate and write a checkpoint if one is due since round `before`; writing one may complete more rounds."""
        done, job = self.rounds_done, self.job
        self._follow_schedule()
        if self.over:
            return
        if done // job.evaluate_every > before // job.evaluate_every:
            self._evaluate(self.recorder.seconds(time.perf_counter()))
        if done // job.checkpoint_every > before // job.checkpoint_every:
            self._keep()
            self._follow_schedule()

    def _follow_schedule(self) -> None:
        while self.schedule.last_epoch < min(self.rounds_done, self.job.rounds):
            self.schedule.step()

    def wait_for_delay(self, began: float, worker: int, draw: int) -> None:
        """Sleep for what is left of a step's least duration, if the recipe asks for one."""
        rest = self.job.delay_seconds(worker, draw) - (time.perf_counter() - began)
        if rest > 0:
            time.sleep(rest)

    def _evaluate(self, seconds: float) -> None:
        measured = self.measure_model()
        if measured is None:
            return
        evaluation = Evaluation(
            round=self.rounds_done,
            seconds=seconds,
            loss=measured.loss,
            accuracy=measured.accuracy,
            test_loss=measured.test_loss,
        )
        check_loss(evaluation.loss, evaluation.round)
        self.recorder.evaluations.append(evaluation)
        self._show(seconds)

    def _show(self, seconds: float) -> None:
        measured = self.recorder.evaluations[-1] if self.recorder.evaluations else None
        figures = self.figures() | self.batches.figures()
        self._on_standing(rank_status(self.rounds_done, self.job.rounds, seconds, measured, figures=figures))

    def _keep(self) -> None:
        state = self.state()  # first: where ranks average they come to the same average here
        common = {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "story": self.recorder.state_dict(time.perf_counter()),  # the recorder's state; stored under this key
            "recipe": dict(self.job.recipe),
        }
        keep_checkpoint(self.checkpoints, self.job, self.ranks.launch, self.rounds_done, state | common)

    def _load(self, state: Mapping[str, Any]) -> None:
        with loading_together(self.checkpoints, self.ranks):
            load_optimizer(state, self.optimizer, self.schedule)  # first: an averager goes on with what it finds
            self.load_state(state)
            self.recorder.load_state_dict(state["story"])
            check_rounds(state, self.rounds_done)


# -- what every run of ranks does with its checkpoints -----------------------------------------------------------------


@contextmanager
def loading_together(checkpoints: RankCheckpoints, ranks: StoreGather) -> Iterator[None]:
    """Go on from a checkpoint; if that of one rank is no state of this run, all ranks raise the same ValueError."""
    refused = ""
    try:
        with refusing(f"the checkpoint in {checkpoints.folder}"):
            yield
    except SavedStateError as error:
        refused = str(error)
    raise_refusals(ranks.gather("load its checkpoint", refused))


def load_optimizer(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler
) -> None:
    """Load the optimiser and its schedule from a checkpoint's state, if they fit."""
    check_optimizer(state["optimizer"], optimizer)
    check_schedule(state["schedule"], schedule)
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])


def check_rounds(state: Mapping[str, Any], rounds_done: int) -> None:
    """Refuse a checkpoint whose state is of another round than its name says.

    >>> check_rounds({ROUNDS: 50}, 40)
    Traceback (most recent call last):
    ValueError: it is of round 50, and its state is of round 40
    """
    if rounds_done != state.get(ROUNDS, rounds_done):
        raise ValueError(f"it is of round {state[ROUNDS]}, and its state is of round {rounds_done}")


def keep_checkpoint(
    checkpoints: RankCheckpoints, job: RankJob, launch: str, rounds: int, state: dict[str, Any]
) -> None:
    """Write a rank's checkpoint; if somebody has deleted the folder, what belongs beside it is written again."""
    if checkpoints.claim_again(launch):
        job.describe()
    checkpoints.keep(rounds, state)
