"""What the records of a run come to, as far as they have come: the state that the live page and Prometheus show.

    records of trace.jsonl ──> JournalState ──┐
    records of times/*.jsonl ──> RankSteps ───┼──> document: plain values, of bounded size
    traces.json.gz ──────────> TraceState ────┘

A state takes one record after the other and keeps counts, not records. What grows with a run is thinned: a `Curve` has
at most MOST_POINTS points, and drops every second one when it is full, so 100,000 rounds take as much room as 1,000.
The counts are those of `traces.history.trace_of`, which reads the whole journal: both count with `RunCounts`.

A server that was started again went on from a checkpoint, and what was recorded after that checkpoint is void. The last
records are therefore kept until they are many, and counted again as far as they are valid (`valid_at`); of those
before, the counts are kept as they were at the last few checkpoints. A checkpoint is noted while rounds go on, so the
steps that its note comes late for are void too:

    step 8   step 9   step 10   checkpointed 9   step 11         resumed at 9
                      '-------- void then ---------------'       counts = those after step 8
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, TypeAlias

from paceline.quantities import duration_text, percent_text
from paceline.traces.history import ENDED, RunCounts
from paceline.traces.holes import HoleFinder, hole_sentences
from paceline.traces.journal import (
    Arrived,
    Checkpointed,
    Evaluated,
    Extended,
    JournalRecord,
    Refused,
    Resumed,
    RunBegan,
    RunEnded,
    StepRecord,
    WorkerJoined,
    WorkerLeft,
)
from paceline.traces.journal_files import valid_at
from paceline.traces.records import Trace, summarise
from paceline.traces.step_clock import PHASES
from paceline.traces.step_times import StepTimes, TimesBegan, TimesEnded, TimesRecord
from paceline.traces.worker_counts import WorkerCounts, dropped_sentence, mostly_dropped

Json: TypeAlias = dict[str, Any]

MOST_POINTS = 400  # of a curve
MOST_ROWS = 1_000  # workers that the page names; of more, those of whom there is something to say come first
MOST_EVENTS = 40
MOST_WARNINGS = 5
MOST_TEXT = 200  # characters of a reason or a host, as somebody else wrote it
PACE_SECONDS = 10.0
_PACE_STEPS = 2_000
_CHECKPOINTS = 8  # that counts are kept for
_KEPT_GRADIENTS = 20_000  # of the last records, which can be taken out again
_RECENT_LINES = 50  # of step times
_ORDER = {"gone": 0, "dropped": 1, "late": 2, "refused": 3}


class Curve:
    """Points in the order in which they come, thinned to at most `most`; the last one is always there.

    A point is a tuple that begins with its place (a version, a round), by which `cut` finds those that are void.

    >>> curve = Curve(most=4)
    >>> for number in range(100):
    ...     curve.add((number, number / 2))
    >>> curve.points
    [(0, 0.0), (64, 32.0), (99, 49.5)]
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most, self._stride, self._count = most, 1, 0
        self._kept: list[tuple[Any, ...]] = []
        self._last: tuple[Any, ...] | None = None

    def add(self, point: tuple[Any, ...]) -> None:
        """Add a point after all others."""
        if self._count % self._stride == 0:
            if len(self._kept) >= self._most - 1:
                self._kept = self._kept[::2]
                self._stride *= 2
            if self._count % self._stride == 0:
                self._kept.append(point)
        self._last = point
        self._count += 1

    def cut(self, place: float, *, by: int = 0) -> None:
        """Leave out all points from a place on; `by` says which number of a point is its place."""
        self._kept = [point for point in self._kept if point[by] < place]
        self._count = len(self._kept) * self._stride
        self._last = self._kept[-1] if self._kept else None

    @property
    def points(self) -> list[tuple[Any, ...]]:
        """All points that are kept, and the last one."""
        extra = [self._last] if self._last is not None and (not self._kept or self._kept[-1] != self._last) else []
        return [*self._kept, *extra]


# -- runs with a journal -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class LiveWorker:
    """What is known of a worker that a journal names."""

    alive: bool = False
    last: str = ""  # on time, late, dropped, joined; why it is gone, where it is
    host: str = ""
    refused: int = 0


class JournalState:
    """The state of a run with a server, or with rounds on ranks: `take` its records one after the other.

    >>> state = JournalState()
    >>> state.take(RunBegan(format=3, paceline="0.2.0", strategy="lgc", seed=0, workers=2, blocks=1,
    ...                     recipe={"rounds": 9}, signature="", codec="none"))
    >>> state.take(StepRecord(at_seconds=0.5, version=0, opened_seconds=0.0, fresh=((0, 0),), late=(), dropped=(),
    ...                       arrivals=(), fingerprint=0, sent_bytes=10, received_bytes=20))
    >>> state.round, state.rounds, state.k, state.figures()["used"]
    (1, 9, 1, 1)
    """

    def __init__(self) -> None:
        self.began: RunBegan | None = None
        self.ended: RunEnded | None = None
        self.rounds: int | None = None
        self.version = 0
        self.steps_closed = 0  # also those that are void
        self.k: int | None = None
        self.workers: dict[int, LiveWorker] = {}
        self.events: deque[tuple[float, str]] = deque(maxlen=MOST_EVENTS)
        self.loss: float | None = None
        self.accuracy: float | None = None
        self.test_loss: float | None = None
        self.diverged = False
        self._counts = RunCounts(on_ranks=False)  # of all records
        self._before = self._counts.copy()  # of all but the last, which are in `_last`
        self._before_version = 0
        self._last: deque[JournalRecord] = deque()
        self._last_gradients = 0
        self._checkpoints: dict[int, RunCounts | None] = {}  # as `_before` was then; None: it has not got there
        self._losses, self._steps = Curve(), Curve()
        self._holes = HoleFinder()
        self._pace: deque[float] = deque(maxlen=_PACE_STEPS)

    # -- records

    def take(self, record: JournalRecord) -> None:
        """Take the next record of the journal; ValueError where it cannot stand at its place."""
        if isinstance(record, RunBegan) != (self.began is None):
            first = self.began is None
            raise ValueError("a journal begins with run_began" if first else "run_began is only for the first line")
        self._holes.take(record)
        match record:
            case RunBegan():
                self.began, self.rounds = record, _whole(record.recipe.get("rounds"))
                self._counts, self._before = (RunCounts(on_ranks=record.on == "ranks") for _ in range(2))
            case StepRecord():
                self._take_step(record)
            case Arrived():
                self._tell_dropped(record)
            case WorkerJoined():
                worker = self._worker(record.worker)
                worker.alive, worker.last, worker.host = True, "joined", record.host[:MOST_TEXT]
                self._tell(record.at_seconds, f"{self.noun} {record.worker} joined from {worker.host or 'here'}")
            case WorkerLeft():
                worker = self._worker(record.worker)
                worker.alive, worker.last = False, record.reason[:MOST_TEXT]
                self._tell(record.at_seconds, f"{self.noun} {record.worker} left: {worker.last}")
            case Refused():
                who = record.peer if record.worker is None else f"{self.noun} {record.worker}"
                if record.worker is not None:
                    self._worker(record.worker).refused += 1
                self._tell(record.at_seconds, f"refused {who}: {record.reason}")
            case Evaluated():
                self.loss, self.accuracy, self.test_loss = record.loss, record.accuracy, record.test_loss
                self.diverged = self.diverged or record.loss is None
                self._losses.add((record.round, record.at_seconds, record.loss, record.accuracy, record.test_loss))
            case Checkpointed():
                self._note_checkpoint(record.version)
            case Resumed():
                self._go_back(record)
            case Extended():
                self.rounds, self.ended = record.rounds, None
                self._tell(record.at_seconds, f"extended to {record.rounds:,} rounds")
            case RunEnded():
                self.ended, self.diverged = record, self.diverged or record.diverged
                self._tell(record.at_seconds, f"ended: {record.reason}")
        self._count(record)

    def _take_step(self, step: StepRecord) -> None:
        if step.version < self.version:
            raise ValueError(f"step {step.version} comes after step {self.version - 1}")
        self.version, self.k = step.version + 1, len(step.fresh)
        self.steps_closed += 1
        for gradients, word in ((step.fresh, "on time"), (step.late, "late")):
            for number, _ in gradients:
                worker = self._worker(number)
                worker.alive, worker.last = True, word
        self._tell_dropped(step)
        self._steps.add((step.version, step.at_seconds, self.k))
        self._pace.append(step.at_seconds)
        while step.at_seconds - self._pace[0] > PACE_SECONDS and len(self._pace) > 2:
            self._pace.popleft()

    def _tell_dropped(self, record: StepRecord | Arrived) -> None:
        for drop in record.dropped:
            worker = self._worker(drop.worker)
            worker.last = "dropped" if worker.alive else worker.last

    def _count(self, record: JournalRecord) -> None:
        self._counts.take(record)
        self._last.append(record)
        self._last_gradients += _gradients(record)
        while self._last_gradients > _KEPT_GRADIENTS and len(self._last) > 1:
            first = self._last.popleft()
            self._last_gradients -= _gradients(first)
            if isinstance(first, StepRecord):
                for version, kept in self._checkpoints.items():
                    if kept is None and self._before_version <= version <= first.version:
                        self._checkpoints[version] = self._before.copy()
                self._before_version = first.version + 1
            self._before.take(first)

    def _worker(self, number: int) -> LiveWorker:
        if (found := self.workers.get(number)) is None:
            found = self.workers[number] = LiveWorker()
        return found

    def _tell(self, at_seconds: float, text: str) -> None:
        self.events.append((at_seconds, text[:MOST_TEXT]))

    # -- checkpoints

    def _note_checkpoint(self, version: int) -> None:
        kept = self._checkpoints.pop(version, None)
        self._checkpoints[version] = kept
        while len(self._checkpoints) > _CHECKPOINTS:
            del self._checkpoints[next(iter(self._checkpoints))]

    def _go_back(self, record: Resumed) -> None:
        if record.version >= self._before_version:
            valid = valid_at(tuple(self._last), record.version)
            ids = set(map(id, valid))
            void = (each.at_seconds for each in self._last if isinstance(each, Evaluated) and id(each) not in ids)
            self._losses.cut(next(void, math.inf), by=1)
            self._last = deque(valid)
        else:  # further than the last records go
            fresh = None if record.version else RunCounts(on_ranks=self.noun == "rank")
            kept = self._checkpoints.get(record.version) or fresh or self._before
            self._before = kept.copy()  # a second restart from there finds it as it is
            self._before_version, self._last = record.version, deque()
            self._losses.cut(record.version // self._versions_a_round + 1)
        self._checkpoints = {version: each for version, each in self._checkpoints.items() if version <= record.version}
        self._last_gradients = sum(map(_gradients, self._last))
        self._counts = self._before.copy()
        for each in self._last:
            self._counts.take(each)
        self._pace.clear()
        self.version, self.ended = record.version, None
        self._steps.cut(record.version)
        last = self._losses.points[-1:]
        self.loss, self.accuracy, self.test_loss = last[0][2:] if last else (None, None, None)
        self.diverged = any(point[2] is None for point in self._losses.points)
        for worker in self.workers.values():
            worker.alive, worker.last = False, record.reason[:MOST_TEXT]
        self._tell(record.at_seconds, f"went on from round {self.round:,}: {record.reason}")

    # -- what is shown

    @property
    def noun(self) -> str:
        """What those who compute are called."""
        return "rank" if self.began is not None and self.began.on == "ranks" else "worker"

    @property
    def _versions_a_round(self) -> int:
        return self.began.workers if self.began is not None and self.began.strategy == "async" else 1

    @property
    def round(self) -> int:
        """The rounds that are done."""
        return self.version // self._versions_a_round

    @property
    def rounds_closed(self) -> int:
        """The rounds that were closed, also those that were done again after a restart."""
        return self.steps_closed // self._versions_a_round

    @property
    def pace(self) -> float:
        """Rounds a second, of the last ten seconds on the run's clock."""
        if len(self._pace) < 2 or self._pace[-1] <= self._pace[0]:
            return 0.0
        return (len(self._pace) - 1) / (self._pace[-1] - self._pace[0]) / self._versions_a_round

    def counts(self, *, over: bool = False) -> RunCounts:
        """Return what became of gradients so far; where the run is `over`, what waits for a later step is dropped."""
        if self.ended is None and not over:
            return self._counts
        counts = self._counts.copy()
        counts.drop_waiting(ENDED)
        return counts

    @property
    def missing(self) -> list[str]:
        """What is not in the journal, a sentence for each hole."""
        return hole_sentences(self._holes.holes)

    def warnings(self) -> list[str]:
        """Return a sentence for each worker whose work is mostly dropped, the worst first."""
        strategy = self.began.strategy if self.began is not None else ""
        found = mostly_dropped(self._counts.by_worker.values())
        return [dropped_sentence(strategy, each) for each in found[:MOST_WARNINGS]]

    def rows(self, *, over: bool = False) -> list[Json]:
        """Return a row for each worker, in order of their numbers."""
        found, by_worker = [], self.counts(over=over).by_worker
        for number in sorted({*self.workers, *by_worker}):
            worker = self.workers.get(number) or LiveWorker()
            counts = by_worker.get(number) or WorkerCounts(worker=number)
            goodbye = self.ended is not None and (worker.alive or worker.last == self.ended.reason[:MOST_TEXT])
            word = "ended" if goodbye else worker.last if worker.alive else "gone"
            found.append(
                {
                    "number": number,
                    "state": word,
                    "remark": "" if worker.alive or goodbye else worker.last,
                    "host": worker.host,
                    "used": counts.used,
                    "late": counts.late,
                    "dropped": counts.dropped,
                    "refused": worker.refused,
                }
            )
        return found

    def figures(self, *, over: bool = False) -> Json:
        """Return the figures of the whole run."""
        counts = self.counts(over=over)
        measured = (None, None, None) if self.diverged else (self.loss, self.accuracy, self.test_loss)
        return {
            "round": self.round,
            "rounds": self.rounds,
            "seconds": round(counts.seconds("" if self.ended is None else self.ended.reason), 3),
            "rounds_per_second": round(self.pace, 3),
            **dict(zip(("loss", "accuracy", "test_loss"), measured, strict=True)),
            "k": self.k,
            "sent_bytes": counts.sent_bytes,
            "received_bytes": counts.received_bytes,
            "used": counts.used,
            "late": counts.late,
            "dropped": counts.dropped.total(),
            "here": sum(worker.alive for worker in self.workers.values()),
            "workers": self.began.workers if self.began is not None else None,
        }

    def curves(self) -> dict[str, list[list[float]]]:
        """Return the curves over seconds: loss, accuracy, test loss, rounds a second, K."""
        return {
            **measured_curves(self._losses.points),
            "pace": pace_curve(self._steps.points, self._versions_a_round),
            "k": [[at, k] for _, at, k in self._steps.points],
        }


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _gradients(record: JournalRecord) -> int:
    held = len(record.dropped) + len(record.arrivals) if isinstance(record, StepRecord | Arrived) else 0
    return 1 + held + (len(record.fresh) + len(record.late) if isinstance(record, StepRecord) else 0)


def measured_curves(points: Iterable[tuple[Any, ...]]) -> dict[str, list[list[float]]]:
    """Return loss, accuracy and test loss over seconds, each where it is known, from points (round, seconds, them).

    >>> measured_curves([(0, 0.0, 2.5, 0.1, None), (10, 1.0, None, None, 2.0)])
    {'loss': [[0.0, 2.5]], 'accuracy': [[0.0, 0.1]], 'test_loss': [[1.0, 2.0]]}
    """
    names = ("loss", "accuracy", "test_loss")
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for _, at, *values in points:
        for name, value in zip(names, values, strict=True):
            if value is not None:
                found[name].append([at, value])
    return found


def pace_curve(points: list[tuple[Any, ...]], versions_a_round: int = 1, most: int = 80) -> list[list[float]]:
    """Return rounds a second over seconds, from points (version, seconds, ...), each the mean over some points.

    >>> pace_curve([(number, number / 4, 7) for number in range(9)], most=2)
    [[1.0, 4.0], [2.0, 4.0]]
    """
    step = max(1, -(-(len(points) - 1) // most))
    marks = [*points[::step], *(points[-1:] if (len(points) - 1) % step else [])]
    if len(marks) > 2 and marks[-1][0] - marks[-2][0] < marks[-2][0] - marks[-3][0]:
        del marks[-2]  # a mean over fewer rounds than the others would end the curve with a spike
    return [
        [after[1], round((after[0] - before[0]) / (after[1] - before[1]) / versions_a_round, 3)]
        for before, after in pairwise(marks)
        if after[1] > before[1]
    ]


# -- step times --------------------------------------------------------------------------------------------------------


_NUMBERS = 3 + len(PHASES)  # that are kept of a line


class RankSteps:
    """The times of one rank or worker: how fast it steps, and what its last steps were spent on.

    Of the last lines eight numbers each are kept, 4 kB for a rank, since there may be thousands of them. A curve takes
    twenty times as much, and is kept where `with_curve` asks for it: for the one that the page draws.

    >>> times = RankSteps()
    >>> times.take(TimesBegan(format=1, paceline="0.2.0", noun="rank", number=2, workers=4, host="node-7",
    ...                       launch="1a2b", sync="ddp"))
    >>> for step in range(5):
    ...     times.take(StepTimes(step=step, started_seconds=step / 4, seconds=0.25, wait_seconds=0.05))
    >>> times.steps, times.pace, times.means()["wait"]
    (5, 4.0, 0.05)
    """

    def __init__(self, *, with_curve: bool = False) -> None:
        self.began: TimesBegan | None = None
        self.ended: TimesEnded | None = None
        self.steps = 0
        self.seconds = 0.0
        self._recent = array("d")  # started, seconds, steps and the phases, of one line after the other
        self._sums: tuple[float, ...] | None = None  # of the last seconds; None when there are new lines
        self._curve = Curve() if with_curve else None

    def take(self, record: TimesRecord) -> None:
        """Take the next record of the file."""
        match record:
            case TimesBegan():
                self.began, self.ended = record, None
                self._recent, self._sums = array("d"), None
            case _ if self.began is None:
                raise ValueError("a file of step times begins with times_began")
            case StepTimes():
                self._take_step(record)
            case TimesEnded():
                self.ended = record
            case _:
                pass  # buckets, links and the server's own times are for `paceline diagnose`

    def _take_step(self, record: StepTimes) -> None:
        if self._curve is not None and record.step < self.steps:
            self._curve.cut(record.step)
        self.steps = record.step + record.steps
        self.seconds = record.started_seconds + record.seconds
        numbers = (record.started_seconds, record.seconds, float(record.steps))
        self._recent.extend((*numbers, *(getattr(record, f"{phase}_seconds") for phase in PHASES)))
        del self._recent[: -_RECENT_LINES * _NUMBERS]
        self._sums = None
        if self._curve is not None:
            mean, wait = record.seconds / record.steps, record.wait_seconds / record.steps
            self._curve.add((record.step, self.seconds, mean, wait))

    def drop_curve(self) -> None:
        """Forget the curve, and keep none from now on."""
        self._curve = None

    @property
    def pace(self) -> float:
        """Steps a second, of the last ten seconds."""
        seconds, steps, *_ = self._last_sums()
        return steps / seconds if seconds > 0 else 0.0

    def _last_sums(self) -> tuple[float, ...]:
        """Return seconds, steps and the seconds of the phases, summed over the last ten seconds."""
        if self._sums is None:
            since, lines = self.seconds - PACE_SECONDS, range(0, len(self._recent), _NUMBERS)
            last = [at for at in lines if self._recent[at] >= since] or lines[-1:]
            self._sums = tuple(sum(self._recent[at + place] for at in last) for place in range(1, _NUMBERS))
        return self._sums

    def means(self) -> dict[str, float]:
        """Return the mean seconds of a step and of its phases, of the last steps; empty before the first."""
        seconds, steps, *phases = self._last_sums()
        if not steps:
            return {}
        found: dict[str, float] = {**dict(zip(PHASES, phases, strict=True)), "step": seconds}
        return {name: round(each / steps, 6) for name, each in found.items()}

    def curves(self) -> dict[str, list[list[float]]]:
        """Return the seconds of a step, and of its wait, over seconds; nothing where no curve is kept."""
        if self._curve is None:
            return {}
        points = self._curve.points
        return {
            "step_seconds": [[at, round(step, 6)] for _, at, step, _ in points],
            "wait_seconds": [[at, round(wait, 6)] for _, at, _, wait in points],
        }

    def row(self, number: int) -> Json:
        """Return the rank's row, as far as its times tell."""
        ended = "" if self.ended is None else self.ended.reason[:MOST_TEXT]
        return {
            "number": number,
            "state": "" if self.ended is None else "ended",
            "remark": ended,
            "host": self.began.host[:MOST_TEXT] if self.began is not None else "",
            "steps": self.steps,
            "steps_per_second": round(self.pace, 3),
            "times": self.means(),
        }


def waited_for(times: Mapping[int, RankSteps], noun: str = "rank") -> str:
    """Return a sentence that names the one for whom the others wait, in steps that all take together; "" for none.

    Whoever comes last waits for nobody. This is about the last steps alone; `paceline diagnose` weighs all of them.

    >>> waited_for({})
    ''
    """
    together = {
        number: each for number, each in times.items() if each.began is not None and each.began.sync in _TOGETHER
    }
    means = {number: each.means() for number, each in together.items() if each.ended is None}
    shares = {number: found["wait"] / found["step"] for number, found in means.items() if found.get("step")}
    if len(shares) < 2:
        return ""
    last = min(shares, key=lambda number: (shares[number], number))
    others = median(share for number, share in shares.items() if number != last)
    if others < _MUCH_WAITING or shares[last] > others / 3:
        return ""
    return (
        f"The others wait for {noun} {last}: of their last steps they wait {percent_text(others)}, and it waits "
        f"{percent_text(shares[last])}."
    )


_TOGETHER = ("ddp", "fsdp")
_MUCH_WAITING = 0.15  # of a step


# -- runs without a journal that are over ------------------------------------------------------------------------------


class TraceState:
    """The state of a run that is over and has left its trace: ranks that averaged, or a simulation.

    >>> TraceState(Trace(strategy="hpsgd", seed=0, workers=2, recipe={"rounds": 5}, rounds_done=5, seconds=1.0,
    ...                  clock="real", averaged=True)).figures()["round"]
    5
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._steps, self._losses = Curve(), Curve()
        for each in trace.rounds:
            self._steps.add((each.version, each.closed_seconds, each.k))
        for evaluation in trace.evaluations:
            measured = _finite(evaluation.loss), evaluation.accuracy, evaluation.test_loss
            self._losses.add((evaluation.round, evaluation.seconds, *measured))

    def figures(self) -> Json:
        """Return the figures of the whole run."""
        trace, summary = self.trace, summarise(self.trace)
        last = self.trace.rounds[-1:]
        return {
            "round": trace.rounds_done if trace.rounds_asked is None else min(trace.rounds_done, trace.rounds_asked),
            "rounds": trace.rounds_asked,
            "seconds": round(trace.seconds, 3),
            "rounds_per_second": round(trace.rounds_done / trace.seconds, 3) if trace.seconds > 0 else 0.0,
            "loss": None if summary.loss is None else _finite(summary.loss),
            "accuracy": None if summary.accuracy is None else _finite(summary.accuracy),
            "test_loss": None if summary.test_loss is None else _finite(summary.test_loss),
            "k": last[0].k if last and not trace.averaged else None,
            "sent_bytes": trace.sent_bytes,
            "received_bytes": None if trace.averaged and not trace.received_bytes else trace.received_bytes,
            "used": trace.used,
            "late": trace.late,
            "dropped": summary.dropped,
            "here": 0,
            "workers": trace.workers,
        }

    def rows(self) -> list[Json]:
        """Return a row for each worker that the trace counts gradients of."""
        return [
            {"number": each.worker, "state": "ended", "remark": "", "host": "", "used": each.used, "late": each.late,
             "dropped": each.dropped, "refused": 0}
            for each in self.trace.by_worker
        ]  # fmt: skip

    def curves(self) -> dict[str, list[list[float]]]:
        """Return the curves over seconds: loss, accuracy, test loss, rounds a second, K."""
        return {
            **measured_curves(self._losses.points),
            "pace": pace_curve(self._steps.points),
            "k": [] if self.trace.averaged else [[at, k] for _, at, k in self._steps.points],
        }


def _finite(value: float) -> float | None:
    return value if value - value == 0 else None


# -- rows --------------------------------------------------------------------------------------------------------------


def merged_rows(rows: Iterable[Json], times: Mapping[int, RankSteps]) -> Iterator[Json]:
    """Yield the rows of all workers or ranks, each with its step times where there are any.

    >>> list(merged_rows([{"number": 0, "state": "late"}], {}))
    [{'number': 0, 'state': 'late'}]
    """
    left = dict(times)
    for row in rows:
        found = left.pop(row["number"], None)
        timed = {} if found is None else found.row(row["number"])
        yield timed | {name: value for name, value in row.items() if value != "" or name not in timed}
    for number, found in sorted(left.items()):
        yield found.row(number)


def shown_rows(rows: list[Json], most: int = MOST_ROWS) -> list[Json]:
    """Return at most so many rows, in order of their numbers: first those who are gone, dropped or late.

    >>> [row["number"] for row in shown_rows([{"number": n, "state": "gone" if n > 7 else ""} for n in range(10)], 3)]
    [0, 8, 9]
    """
    if len(rows) <= most:
        return rows
    chosen = sorted(rows, key=lambda row: (_ORDER.get(row["state"], 9), row["number"]))[:most]
    return sorted(chosen, key=lambda row: row["number"])


def quiet_text(seconds: float) -> str:
    """Return for how long nothing was written.

    >>> quiet_text(75.2)
    'nothing new for 75 s'
    """
    return f"nothing new for {duration_text(float(round(seconds)), trim=True)}"
