"""The history that a journal records: the trace of a real run, and the delays that its workers had.

A gradient may wait for a later step after its arrival: an arrival is pending until a record says that it is used, late
or dropped. Void records (see `effective`) count for nothing; the time they took does,
as far as the journal's clock counted it (a server that is started again sets it back to its checkpoint).
"""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean, median

from paceline.files import replacing
from paceline.strategies.shares import SpeedEstimate
from paceline.traces.holes import hole_sentences, holes_in
from paceline.traces.journal import (
    Arrival,
    Arrived,
    Checkpointed,
    Evaluated,
    JournalError,
    JournalRecord,
    Resumed,
    RunBegan,
    RunEnded,
    StepRecord,
    WorkerJoined,
    WorkerLeft,
)
from paceline.traces.journal_files import Journal, effective
from paceline.traces.records import (
    KEPT_WORKS,
    NOT_YET,
    Absence,
    Evaluation,
    Outcome,
    Round,
    Trace,
    Work,
    labelled_with_shares,
    shares_of,
    works_left_out,
)
from paceline.traces.share_recorder import ShareRecorder
from paceline.traces.worker_counts import WorkerCounts, with_gradient

ENDED = "the run ended"  # why a gradient is dropped that waited for a later step
KEPT_ABSENCES = 100_000
MOST_RECORDED = 5_000_000  # as many as the simulator reads
SHORTEST_SECONDS = 1e-6  # a journal's times are rounded to microseconds, and no work takes no time


def trace_of(journal: Journal) -> Trace:
    """Return the trace of a real run, also of one that was killed; it can be summarised and drawn like a simulated one.

    >>> from paceline.traces.journal import RunBegan
    >>> began = RunBegan(format=3, paceline="0.1.0", strategy="full", seed=0, workers=1, blocks=1, recipe={},
    ...                  signature="", codec="none")
    >>> arrival = Arrival(worker=0, version=0, draw=0, blocks_done=1, blocks=1, at_seconds=2.0, work_seconds=1.0,
    ...                   transfer_seconds=0.5, loss_mean=None, loss_variance=None, samples=8)
    >>> step = StepRecord(at_seconds=2.0, version=0, opened_seconds=0.0, fresh=((0, 0),), late=(), dropped=(),
    ...                arrivals=(arrival,), fingerprint=0, sent_bytes=10, received_bytes=20)
    >>> trace = trace_of(Journal(records=(began, step), torn=False))
    >>> trace.clock, trace.rounds_done, trace.works[0].started_seconds, trace.works[0].finished_seconds
    ('real', 1, 0.75, 1.75)
    """
    began = journal.began
    records = effective(journal.records)
    counts, presence = RunCounts(on_ranks=began.on == "ranks", most_works=KEPT_WORKS), _Presence()
    shares = ShareRecorder() if shares_of(began.recipe) == "speed" else None
    for record in records:
        counts.take(record)
        presence.take(record)
        if shares is not None:
            _hear_of_shares(shares, record)
    counts.drop_waiting(ENDED)
    steps = [record for record in records if isinstance(record, StepRecord)]
    evaluated = [record for record in records if isinstance(record, Evaluated)]
    ended = records[-1].reason if isinstance(records[-1], RunEnded) else ""
    versions = steps[-1].version + 1 if steps else 0
    return Trace(
        strategy=labelled_with_shares(began.strategy, began.recipe),
        seed=began.seed,
        workers=began.workers,
        recipe=began.recipe,
        rounds_done=versions // (began.workers if began.strategy == "async" else 1),
        seconds=counts.seconds(ended),
        clock="real",
        late_work="partial",
        diverged=any(record.loss is None for record in evaluated)
        or any(isinstance(record, RunEnded) and record.diverged for record in records),
        used=counts.used,
        late=counts.late,
        dropped=dict(counts.dropped),
        sent_bytes=counts.sent_bytes,
        received_bytes=counts.received_bytes,
        rounds=tuple(_round(step) for step in steps),
        works=tuple(counts.works),
        evaluations=tuple(_evaluation(record) for record in evaluated),
        absences=presence.absences(began.workers),
        ended=ended,
        by_worker=tuple(each for _, each in sorted(counts.by_worker.items())),
        shares=None if shares is None else shares.summary(),
        missing=(*hole_sentences(holes_in(journal.records)), *works_left_out(len(counts.works), KEPT_WORKS)),
    )


def _hear_of_shares(shares: ShareRecorder, record: JournalRecord) -> None:
    if isinstance(record, StepRecord | Arrived):
        for arrival in record.arrivals:
            if arrival.work_seconds is not None and arrival.batch_samples:
                whole = arrival.blocks / arrival.blocks_done
                shares.arrived(
                    worker=arrival.worker,
                    version=arrival.version,
                    samples=arrival.batch_samples,
                    seconds=arrival.work_seconds * whole + arrival.transfer_seconds,
                )
    if isinstance(record, StepRecord):
        shares.closed(_round(record))
    elif isinstance(record, WorkerLeft):
        shares.left(record.worker)


def _round(step: StepRecord) -> Round:
    return Round(
        version=step.version,
        opened_seconds=min(step.opened_seconds, step.at_seconds),
        closed_seconds=step.at_seconds,
        k=len(step.fresh),
        used=len(step.fresh),
        late=len(step.late),
    )


def _evaluation(record: Evaluated) -> Evaluation:
    loss = math.nan if record.loss is None else record.loss
    return Evaluation(
        round=record.round,
        seconds=record.at_seconds,
        loss=loss,
        accuracy=record.accuracy,
        test_loss=record.test_loss,
    )


class RunCounts:
    """What the records of a run come to in numbers, one after the other: gradients by their outcome, bytes, seconds.

    Whoever reads a whole journal and whoever follows one as it grows count here, so that they say the same. What waits
    when a server is started again is lost; a checkpoint of ranks holds it. Of the first `most_works` arrivals it is
    kept who did what when.
    """

    def __init__(self, *, on_ranks: bool, most_works: int = 0) -> None:
        self._on_ranks, self._most_works = on_ranks, most_works
        self.used = self.late = self.sent_bytes = self.received_bytes = 0
        self.dropped: Counter[str] = Counter()
        self.works: list[Work] = []
        self.by_worker: dict[int, WorkerCounts] = {}
        self._waiting: dict[tuple[int, int], list[Arrival]] = {}
        self._seconds = 0.0
        self._left: list[tuple[float, str]] = []  # the last who left, and the last who left for another reason

    def copy(self) -> RunCounts:
        """Return the same counts, to go on with apart."""
        twin = RunCounts(on_ranks=self._on_ranks, most_works=self._most_works)
        twin.__dict__.update(self.__dict__)
        twin.dropped, twin.works, twin.by_worker = self.dropped.copy(), [*self.works], self.by_worker.copy()
        twin._waiting = {gradient: [*arrivals] for gradient, arrivals in self._waiting.items()}
        twin._left = [*self._left]
        return twin

    def seconds(self, ended: str) -> float:
        """Return the time that the run took; `ended` is the reason of its end, "" where it has none.

        The time after the last round is no part of it: checkpoints, and goodbyes.
        """
        return max([self._seconds, *(at for at, reason in self._left if not ended or reason != ended)])

    def take(self, record: JournalRecord) -> None:
        """Take the next record."""
        if isinstance(record, Resumed) and not self._on_ranks:
            self.drop_waiting("the server was restarted")
        if isinstance(record, WorkerLeft):
            left = sorted([*self._left, (record.at_seconds, record.reason)], reverse=True)
            self._left = [left[0], *[each for each in left if each[1] != left[0][1]][:1]]
        elif not isinstance(record, Checkpointed):
            self._seconds = max(self._seconds, _last_seconds(record))
        if not isinstance(record, StepRecord | Arrived):
            return
        for arrival in record.arrivals:
            self._waiting.setdefault((arrival.worker, arrival.version), []).append(arrival)
        if isinstance(record, StepRecord):
            self._take_step(record)
        for drop in record.dropped:
            self.dropped[drop.reason] += 1
            # Of a gradient that came twice it is the second that is dropped.
            self._settle((drop.worker, drop.version), "dropped", place=-1, reason=drop.reason)

    def _take_step(self, step: StepRecord) -> None:
        self.used += len(step.fresh)
        self.late += len(step.late)
        self.sent_bytes += step.sent_bytes
        self.received_bytes += step.received_bytes
        for gradient in step.fresh:
            # An incomplete gradient of an open round is dropped, and the whole one that follows it is used.
            whole = [arrival.blocks_done == arrival.blocks for arrival in self._waiting.get(gradient, ())]
            place = whole.index(True) if any(whole) else 0
            self._settle(gradient, "used", place=place, closed_seconds=step.at_seconds)
        for gradient in step.late:
            self._settle(gradient, "late", place=0)

    def drop_waiting(self, reason: str) -> None:
        """Count what waits for a later step as dropped."""
        for arrivals in self._waiting.values():
            for arrival in arrivals:
                self.dropped[reason] += 1
                self._count(arrival, "dropped", reason)
        self._waiting.clear()

    def _settle(
        self,
        gradient: tuple[int, int],
        outcome: Outcome,
        *,
        place: int,
        reason: str = "",
        closed_seconds: float | None = None,
    ) -> None:
        """Note what became of an arrival. One that is in no record (a full disk) is counted all the same."""
        arrivals = self._waiting.get(gradient)
        if arrivals:
            self._count(arrivals.pop(place), outcome, reason, closed_seconds)
            if not arrivals:
                del self._waiting[gradient]

    def _count(self, arrival: Arrival, outcome: Outcome, reason: str = "", closed_seconds: float | None = None) -> None:
        """Count an arrival for its worker. It waited until `closed_seconds`, if its round was still open."""
        waited = 0.0 if closed_seconds is None else max(0.0, closed_seconds - arrival.at_seconds)
        before = self.by_worker.get(arrival.worker, WorkerCounts(worker=arrival.worker))
        self.by_worker[arrival.worker] = with_gradient(before, arrival, outcome, reason=reason, waited_seconds=waited)
        self._keep(arrival, outcome, reason)

    def _keep(self, arrival: Arrival, outcome: Outcome, reason: str) -> None:
        if len(self.works) >= self._most_works:
            return
        # Half of the time on the wire was the model's way to the worker.
        finished = max(0.0, arrival.at_seconds - arrival.transfer_seconds / 2)
        self.works.append(
            Work(
                worker=arrival.worker,
                version=arrival.version,
                started_seconds=max(0.0, finished - (arrival.work_seconds or 0.0)),
                finished_seconds=finished,
                arrived_seconds=arrival.at_seconds,
                blocks_done=arrival.blocks_done,
                blocks=arrival.blocks,
                outcome=outcome,
                reason=reason,
            )
        )


class _Presence:
    """The absences of workers: who, from when to when, and why."""

    def __init__(self) -> None:
        self._over: list[Absence] = []
        self._away: dict[int, Absence] = {}
        self._known: set[int] = set()
        self._any_joined = False
        self._latest_seconds = 0.0

    def take(self, record: JournalRecord) -> None:
        match record:
            case WorkerJoined():
                self._any_joined = True
                if record.worker not in self._known:
                    self._gone(record.worker, 0.0, NOT_YET)
                self._there(record.worker, record.at_seconds)
            case WorkerLeft():
                self._gone(record.worker, record.at_seconds, record.reason)
            case StepRecord() | Arrived():
                # Who delivers is there, also where the record of its coming is lost (a full disk).
                for arrival in record.arrivals:
                    self._there(arrival.worker, max(0.0, arrival.at_seconds - (arrival.work_seconds or 0.0)))
            case Resumed():
                # What was done after the checkpoint is void: for the run, everybody was away since.
                since = min(self._latest_seconds, record.at_seconds)
                for worker in sorted(self._known):
                    self._gone(worker, since, record.reason)
        self._latest_seconds = max(self._latest_seconds, _last_seconds(record))

    def absences(self, workers: int) -> tuple[Absence, ...]:
        """Return all absences of a run with so many workers, in the order of their beginning."""
        never = (worker for worker in range(workers if self._any_joined else 0) if worker not in self._known)
        for worker in list(islice(never, KEPT_ABSENCES)):
            self._gone(worker, 0.0, NOT_YET)
        found = sorted([*self._over, *self._away.values()], key=lambda absence: (absence.from_seconds, absence.worker))
        return tuple(found[:KEPT_ABSENCES])

    def _there(self, worker: int, at_seconds: float) -> None:
        self._known.add(worker)
        absence = self._away.pop(worker, None)
        if absence is not None and (absence.reason != NOT_YET or at_seconds > 0):
            self._over.append(replace(absence, to_seconds=max(absence.from_seconds, at_seconds)))

    def _gone(self, worker: int, at_seconds: float, reason: str) -> None:
        self._known.add(worker)
        absence = Absence(worker=worker, from_seconds=at_seconds, to_seconds=None, reason=reason)
        self._away.setdefault(worker, absence)


def _last_seconds(record: JournalRecord) -> float:
    arrivals = record.arrivals if isinstance(record, StepRecord | Arrived) else ()
    return max([getattr(record, "at_seconds", 0.0), *(arrival.at_seconds for arrival in arrivals)])


def recorded_delays(journal: Journal) -> tuple[tuple[float, ...], ...]:
    """Return how long the workers computed: a row per draw, a column per worker, as the simulator reads delays.

    Work that stopped early is scaled to all blocks, and a batch by speed to `batch_size` samples, by what its worker's
    batches of several sizes tell of its speed. A draw that was not measured gets its worker's median, a worker that was
    never measured the median of all.

    >>> from paceline.traces.journal import RunBegan
    >>> began = RunBegan(format=3, paceline="0.1.0", strategy="full", seed=0, workers=2, blocks=4, recipe={},
    ...                  signature="", codec="none")
    >>> half = Arrival(worker=0, version=0, draw=1, blocks_done=2, blocks=4, at_seconds=2.0, work_seconds=1.0,
    ...                transfer_seconds=0.5, loss_mean=None, loss_variance=None, samples=8)
    >>> recorded_delays(Journal(records=(began, Arrived(arrivals=(half,), dropped=())), torn=False))
    ((2.0, 2.0), (2.0, 2.0))
    """
    measured: defaultdict[int, dict[int, float]] = defaultdict(dict)
    sizes: defaultdict[int, dict[int, int]] = defaultdict(dict)  # where batches are by speed
    for record in effective(journal.records):
        if isinstance(record, StepRecord | Arrived):
            for arrival in record.arrivals:
                if arrival.work_seconds is not None:
                    seconds = arrival.work_seconds * arrival.blocks / arrival.blocks_done
                    measured[arrival.worker][arrival.draw] = max(seconds, SHORTEST_SECONDS)
                    if arrival.batch_samples:
                        sizes[arrival.worker][arrival.draw] = arrival.batch_samples
    for worker, of_draws in sizes.items():
        _scale_to(_batch_size(journal.began), measured[worker], of_draws)
    if not measured:
        raise JournalError("the journal holds no measured work to replay")
    draws = 1 + max(draw for column in measured.values() for draw in column)
    workers = max(journal.began.workers, 1 + max(measured))
    if draws * workers > MOST_RECORDED:
        raise JournalError(f"{draws:,} draws of {workers:,} workers are too many to replay (at most {MOST_RECORDED:,})")
    of_all = median(seconds for column in measured.values() for seconds in column.values())
    columns = [measured.get(worker, {}) for worker in range(workers)]
    usual = [median(column.values()) if column else of_all for column in columns]
    return tuple(
        tuple(column.get(draw, typical) for column, typical in zip(columns, usual, strict=True))
        for draw in range(draws)
    )


def _batch_size(began: RunBegan) -> int | None:
    settings = began.recipe.get("worker")
    found = settings.get("batch_size") if isinstance(settings, Mapping) else None
    return found if isinstance(found, int) and found > 0 else None


def _scale_to(batch_size: int | None, seconds: dict[int, float], sizes: Mapping[int, int]) -> None:
    """Scale the times of one worker's draws, of so many samples, to those of `batch_size`; None: the mean size."""
    estimate = SpeedEstimate()
    for draw, samples in sorted(sizes.items()):
        estimate.observe(samples, seconds[draw])
    offset, size = estimate.offset, batch_size or fmean(sizes.values())
    for draw, samples in sizes.items():
        seconds[draw] = max(seconds[draw] * (offset + size) / (offset + samples), SHORTEST_SECONDS)


def write_recorded(path: str | Path, rows: Sequence[Sequence[float]]) -> None:
    """Write delays as the simulator reads them: a line per draw, a column of seconds per worker, no heading.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "delays.csv")
    >>> write_recorded(file, ((1.0, 1.25), (1.5, 2.0)))
    >>> file.read_text()
    '1.0,1.25\\n1.5,2.0\\n'
    """
    with replacing(Path(path)) as temporary, temporary.open("w", newline="", encoding="utf-8") as lines:
        csv.writer(lines, lineterminator="\n").writerows(rows)
