"""Every kind of recorded run in one form: who was ready when in each round, and how long each phase took.

A round is a step of DDP, a version of a server's model, an average. Rows are rounds, columns are ranks or workers:

    arrival      seconds from the round's begin (any moment that is the same for all) until its gradient was there
    k            with how many arrivals the round went on: all of them, or the first K
    wait, wire   what each waited for the others in the round; what nobody could have avoided by being earlier
    phases       what it did itself: input, forward, backward, optimiser; computing, transfer where no more is known

Clocks of different machines are never compared. In DDP all go on at one moment, so the one that waited least came last:

    rank 0   ####......~~|##       wait 8     arrival 0     of which wire 2 = the least wait, waiting for others 6
    rank 1   #######...~~|##       wait 5     arrival 3
    rank 2   ##########~~|##       wait 2     arrival 6     it came last: the others' waiting is charged to it

A server sees all arrivals on its own clock. Where nobody waits for anybody (HPSGD, async), `arrival` is how long each
took for the round, and no time is lost by waiting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.quantities import counted
from paceline.traces import step_clock
from paceline.traces.journal import Arrived, StepRecord, WorkerJoined
from paceline.traces.journal_files import effective
from paceline.traces.recorded_run import NoRunError, RecordedRun
from paceline.traces.records import Absence, Trace
from paceline.traces.step_times import StepTimes, WorkerTimes

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Whole: TypeAlias = NDArray[np.int64]
Coupling: TypeAlias = Literal["all", "first", "none"]

PHASES: tuple[str, ...] = tuple(name for name in step_clock.PHASES if name != "wait")
SKIPPED_STEPS = 3  # compilation, first touch of memory, caches
MOST_SKIPPED_SHARE = 0.1
MOST_CELLS = 50_000_000  # rounds times workers
PROCESS = re.compile(r" pid \d+$")
MOST_LOOKED_FOR = 100_000  # ranks up to which it is noted who has no file
A_FEW = 0.05  # of the steps
LEAST_WAIT_SHARE = 0.002  # of the time; below it nobody waits


@dataclass(frozen=True, kw_only=True, eq=False)
class Timings:
    """The times of a run as arrays. `parts` are each worker's seconds by where they went; they add up to `run_seconds`.

    `steps` is how many steps a row stands for, `start` when it began, `seconds` how long it took. `present` says who
    took part. The first `skipped_steps` steps are a warm-up: they count in `parts` as such, and are in no row here.
    `missing` are those of whom nothing, or not all, is here: what the others wait for them looks like time on the wire.
    """

    noun: Literal["rank", "worker"]
    numbers: tuple[int, ...]
    hosts: tuple[str, ...]
    coupling: Coupling
    step: Whole
    steps: Whole
    start: Floats
    seconds: Floats
    arrival: Floats
    present: Bools
    k: Whole
    phases: Mapping[str, Floats]
    wait: Floats
    wire: Floats
    parts: Mapping[str, Floats]
    run_seconds: float
    processor: Floats | None = None
    skipped_steps: int = 0
    skipped_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    by_design: str = ""
    missing: tuple[int, ...] = ()

    @property
    def computing(self) -> Floats:
        """What each did itself in each round, all phases but the transfer."""
        own = [values for name, values in self.phases.items() if name not in ("transfer", "other")]
        return np.asarray(sum(own, np.zeros_like(self.arrival)))


def medians(values: Floats) -> Floats:
    """Return the median of each row without what is missing; nan where all of it is.

    >>> medians(np.array([[1.0, 2.0, 4.0], [1.0, np.nan, 4.0]]))
    array([2. , 2.5])
    """
    ordered = np.sort(values, axis=1)
    there = np.maximum(1, (~np.isnan(values)).sum(axis=1))
    rows = np.arange(len(values))
    return np.asarray((ordered[rows, (there - 1) // 2] + ordered[rows, there // 2]) / 2)


def timings_of(run: RecordedRun, *, skip: int | None = None) -> Timings:
    """Return the times of a recorded run; `skip` is how many first steps are a warm-up, None: a few of a real run."""
    if run.kind == "watched":
        files = {number: times for number, times in run.times.get("rank", {}).items() if times.steps}
        if not files:
            raise NoRunError(f"{run.folder} has no step times yet: its files hold no step")
        return _of_ranks(files, run.workers, skip)
    if run.trace is None:
        raise NoRunError(f"{run.folder} holds no times to diagnose")
    if run.trace.averaged:
        return _of_averages(run, run.trace, skip)
    return _of_rounds(run, run.trace, skip)


# -- a script that is watched: ranks in lockstep -----------------------------------------------------------------------


def _of_ranks(files: Mapping[int, WorkerTimes], workers: int, skip: int | None) -> Timings:
    numbers, notes = tuple(files), list(_notes_on_files(files, workers))
    lines, left_out = _same_steps(files)
    if left_out:
        notes.append(f"{counted(left_out, 'line')} of step times left out: other ranks have no line of the same steps")
    if not lines:
        raise NoRunError(
            "no two ranks have a line of the same steps, so they cannot be compared: are these files of one launch?"
        )
    keys = sorted(lines)
    _refuse_too_many(len(keys), len(numbers))
    columns = _columns(keys, lines, numbers)
    steps = np.array([count for _, count in keys], dtype=np.int64)
    columns, steps, first = _at_synchronisations(columns, steps, np.array([step for step, _ in keys], dtype=np.int64))
    seconds, waits = columns["seconds"], columns["wait"]
    present = ~np.isnan(seconds)
    least = _least(waits)
    wire = np.where(present, least[:, None], np.nan)
    arrival = np.where(present, _most(waits)[:, None] - waits, np.nan)
    phases = {name: columns[name] for name in PHASES}
    own = np.nansum(np.stack(list(phases.values())), axis=0)
    phases["other"] = np.where(present, np.maximum(0.0, seconds - own - waits), np.nan)
    coupling: Coupling = "all" if len(numbers) > 1 else "none"
    by_design = ""
    if coupling == "all" and np.nansum(waits) < LEAST_WAIT_SHARE * np.nansum(seconds):
        coupling, by_design = "none", "no rank waits for another one in a step"
    if coupling == "none":
        arrival, wire = np.where(present, own, np.nan), np.where(present, waits, np.nan)
    typical = medians(seconds)
    timings = Timings(
        noun="rank",
        numbers=numbers,
        hosts=tuple(times.began.host for times in files.values()),
        coupling=coupling,
        step=first,
        steps=steps,
        start=np.concatenate([[0.0], np.cumsum(typical)[:-1]]),
        seconds=typical,
        arrival=arrival,
        present=present,
        k=present.sum(axis=1),
        phases=phases,
        wait=np.where(present, waits - wire, np.nan),
        wire=wire,
        processor=None if np.isnan(columns["processor"]).all() else columns["processor"],
        parts={},
        run_seconds=0.0,
        notes=tuple(notes),
        by_design=by_design,
        missing=_missing(numbers, workers, present),
    )
    return _with_parts_of_ranks(timings, seconds, _warm_up_rows(timings, skip))


def _without_file(numbers: Iterable[int], workers: int) -> list[int]:
    return sorted(set(range(workers)) - set(numbers)) if workers < MOST_LOOKED_FOR else []


def _missing(numbers: tuple[int, ...], workers: int, present: Bools) -> tuple[int, ...]:
    """Return who has no file, or none of more than a few of the steps."""
    partly = [number for number, there in zip(numbers, present.mean(axis=0), strict=True) if there < 1 - A_FEW]
    return tuple(sorted([*_without_file(numbers, workers), *partly]))


def _notes_on_files(files: Mapping[int, WorkerTimes], workers: int) -> Iterable[str]:
    missing = _without_file(files, workers)
    if missing:
        named = ", ".join(map(str, missing[:6])) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
        yield (
            f"No times of {'ranks' if len(missing) > 1 else 'rank'} {named} are here (killed, or on another host): "
            "if it is late, that looks like time on the wire."
        )
    last = max(times.steps[-1].step for times in files.values())
    for number, times in files.items():
        end = times.steps[-1].step + times.steps[-1].steps - 1
        if end < last - max(2, times.steps[-1].steps):
            why = f": {times.ended.reason}" if times.ended else " (killed?)"
            yield f"Rank {number} ends with step {end:,}, others with step {last:,}{why}."
    yield from dict.fromkeys(note for times in files.values() for note in times.began.notes)
    if any(line.steps > 1 for times in files.values() for line in times.steps[-1:]):
        yield "Long runs record sums of several steps: a rank that is late in turns with others looks less late there."


def _same_steps(
    files: Mapping[int, WorkerTimes],
) -> tuple[dict[tuple[int, int], dict[int, StepTimes]], int]:
    """Return the lines of all ranks by (first step, number of steps), without those that only one of several has."""
    lines: dict[tuple[int, int], dict[int, StepTimes]] = {}
    for number, times in files.items():
        for line in times.steps:
            lines.setdefault((line.step, line.steps), {})[number] = line
    if len(files) == 1:
        return lines, 0
    shared = {key: found for key, found in lines.items() if len(found) > 1}
    return shared, sum(len(found) for key, found in lines.items() if key not in shared)


def _columns(
    keys: list[tuple[int, int]], lines: Mapping[tuple[int, int], Mapping[int, StepTimes]], numbers: tuple[int, ...]
) -> dict[str, Floats]:
    """Return seconds, phases, wait and processor time as arrays; a wait that nobody marked is that of the buckets."""
    names = ("seconds", *PHASES, "wait", "processor")
    arrays = np.full((len(names), len(keys), len(numbers)), np.nan)
    column = {number: index for index, number in enumerate(numbers)}
    for row, key in enumerate(keys):
        for number, line in lines[key].items():
            wait, backward = line.wait_seconds, line.backward_seconds
            if wait == 0 and line.buckets:
                ready, done = max(at for at, _ in line.buckets), max(at for _, at in line.buckets)
                wait = min(max(0.0, done - ready), backward)
                backward -= wait
            processor = np.nan if line.processor_seconds is None else line.processor_seconds
            values = (line.seconds, line.input_seconds, line.forward_seconds, backward, line.optimiser_seconds, wait)
            arrays[:, row, column[number]] = (*values, processor)
    return dict(zip(names, arrays, strict=True))


def _at_synchronisations(
    columns: dict[str, Floats], steps: Whole, first: Whole
) -> tuple[dict[str, Floats], Whole, Whole]:
    """Return windows instead of steps where ranks wait for each other only every so many steps."""
    waits = np.nan_to_num(_most(columns["wait"]))
    meets = waits > 1e-6
    if not meets.any() or meets.mean() > 0.6 or len(columns["wait"]) < 4:
        return columns, steps, first
    starts = np.concatenate([[0], np.flatnonzero(meets)[:-1] + 1])
    end = np.flatnonzero(meets)[-1] + 1  # what follows the last meeting is a window that never closed
    summed = {name: np.add.reduceat(values[:end], starts, axis=0) for name, values in columns.items()}
    return summed, np.add.reduceat(steps[:end], starts), first[starts]


def _with_parts_of_ranks(timings: Timings, seconds: Floats, warm_up: int) -> Timings:
    """Leave the warm-up out of the rows, and say where each rank's seconds went."""
    kept = _without_first(timings, warm_up)
    parts = {name: np.nansum(kept.phases[name], axis=0) for name in PHASES}
    parts["waiting"] = np.nansum(kept.wait, axis=0)
    parts["wire"] = np.nansum(kept.wire, axis=0)
    parts["warm-up"] = np.nansum(seconds[:warm_up], axis=0)
    parts["gone"] = (~timings.present * timings.seconds[:, None]).sum(axis=0)
    run_seconds = float((np.nansum(seconds, axis=0) + parts["gone"]).max())
    return _adding_up(kept, parts, run_seconds)


# -- rounds of a server or of ranks: the first K arrivals close a round ------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A gradient that arrived: when, and what it took; `more_seconds` is what blocks that it left out would have."""

    worker: int
    version: int
    at_seconds: float
    work_seconds: float
    transfer_seconds: float
    more_seconds: float = 0.0


def _of_rounds(run: RecordedRun, trace: Trace, skip: int | None) -> Timings:
    pieces, hosts = _pieces_of(run, trace)
    if not pieces or not trace.rounds:
        why = "the run has only just begun" if run.journal is not None else "it was simulated with --timing-only?"
        raise NoRunError(f"{run.folder} holds nobody's work in any round, so there is nothing to diagnose ({why})")
    is_async = trace.strategy.startswith("async")
    numbers = tuple(sorted({piece.worker for piece in pieces}))
    column = {number: index for index, number in enumerate(numbers)}
    rounds, notes = list(trace.rounds), list[str]()
    last = max(piece.version for piece in pieces)
    if not is_async and last < rounds[-1].version - 2:
        notes.append(
            f"The record has the work of the first {last + 1:,} of {len(rounds):,} rounds; the rest is left out."
        )
        rounds = [each for each in rounds if each.version <= last]
    if is_async:
        return _of_draws(run, trace, pieces, numbers, hosts, skip)
    _refuse_too_many(len(rounds), len(numbers))
    row_of = {each.version: row for row, each in enumerate(rounds)}
    shape = (len(rounds), len(numbers))
    at, work, transfer, full = (np.full(shape, np.nan) for _ in range(4))
    for piece in pieces:
        if (row := row_of.get(piece.version)) is None or not np.isnan(at[row, column[piece.worker]]):
            continue
        cell = row, column[piece.worker]
        at[cell], work[cell], transfer[cell] = piece.at_seconds, piece.work_seconds, piece.transfer_seconds
        full[cell] = piece.at_seconds + piece.more_seconds
    opened = np.array([each.opened_seconds for each in rounds])
    closed = np.array([each.closed_seconds for each in rounds])
    k = np.array([max(1, each.used) for each in rounds], dtype=np.int64)
    present = _present(at, opened, closed, trace.absences, column)
    arrival = np.maximum(0.0, full - opened[:, None])
    # Who is there and has brought nothing is at work on an earlier round: it would have come after the closing, and
    # after no less than it takes as a rule.
    usual = np.maximum(medians(arrival.T)[None, :], (closed - opened)[:, None])
    arrival = np.where(np.isnan(arrival) & present, usual, arrival)
    wait = np.where(np.isnan(at), 0.0, np.clip(closed[:, None] - at, 0.0, None))
    until = np.append(opened[1:], closed[-1])
    phases = _phases_of_workers(run, numbers, row_of, shape) or {"computing": work}
    processor = phases.pop("processor", None)
    own = np.nansum(np.stack(list(phases.values())), axis=0)
    phases = {**phases, "transfer": transfer}
    phases["other"] = np.where(
        np.isnan(at), np.nan, np.maximum(0.0, at - opened[:, None] - own - np.nan_to_num(transfer))
    )
    timings = Timings(
        noun="rank" if run.kind == "rounds" else "worker",
        numbers=numbers,
        hosts=tuple(hosts.get(number, "") for number in numbers),
        coupling="all" if (k >= present.sum(axis=1)).mean() > 0.5 else "first",
        step=np.array([each.version for each in rounds], dtype=np.int64),
        steps=np.ones(len(rounds), dtype=np.int64),
        start=opened,
        seconds=np.maximum(until - opened, closed - opened),
        arrival=np.where(present, arrival, np.nan),
        present=present,
        k=np.minimum(k, np.maximum(1, present.sum(axis=1))),
        phases=phases,
        wait=wait,
        wire=np.nan_to_num(transfer),
        processor=processor,
        parts={},
        run_seconds=trace.seconds,
        notes=tuple(notes),
    )
    warm_up = _warm_up_rows(timings, 0 if skip is None and run.kind == "simulated" else skip)
    kept = _without_first(timings, warm_up)
    parts = {name: np.nansum(kept.phases[name], axis=0) for name in phases if name not in ("transfer", "other")}
    gone = _gone_seconds(trace, column, after=float(opened[warm_up]) if warm_up else 0.0)
    parts |= {"gone": gone, "waiting": kept.wait.sum(axis=0), "wire": kept.wire.sum(axis=0)}
    between = np.maximum(until - closed, _server_seconds(run, row_of, len(rounds)))
    parts["server"] = (between[warm_up:, None] * kept.present).sum(axis=0)
    parts["warm-up"] = np.full(len(numbers), float(opened[warm_up]) if warm_up else 0.0)
    return _adding_up(kept, parts, max(trace.seconds, float(closed[-1])))


def _pieces_of(run: RecordedRun, trace: Trace) -> tuple[list[_Piece], dict[int, str]]:
    """Return the gradients of a run, and its workers' hosts: from its journal, or from its trace where it has none."""
    hosts = {
        number: times.began.host for noun in ("rank", "worker") for number, times in run.times.get(noun, {}).items()
    }
    if run.journal is None:
        opened = {each.version: each.opened_seconds for each in trace.rounds}
        return [
            _Piece(
                worker=work.worker,
                version=work.version,
                at_seconds=work.arrived_seconds,
                work_seconds=work.compute_seconds,
                transfer_seconds=work.arrived_seconds
                - work.finished_seconds
                + max(0.0, work.started_seconds - opened.get(work.version, work.started_seconds)),
                more_seconds=work.compute_seconds * (work.blocks / max(1, work.blocks_done) - 1.0),
            )
            for work in trace.works
            if work.arrived_seconds is not None
        ], hosts
    pieces = []
    for record in effective(run.journal.records):
        if isinstance(record, WorkerJoined):
            hosts.setdefault(record.worker, PROCESS.sub("", record.host))  # a worker says which process it is, too
        if isinstance(record, StepRecord | Arrived):
            for arrival in record.arrivals:
                work_seconds = arrival.work_seconds or 0.0
                pieces.append(
                    _Piece(
                        worker=arrival.worker,
                        version=arrival.version,
                        at_seconds=arrival.at_seconds,
                        work_seconds=work_seconds,
                        transfer_seconds=arrival.transfer_seconds,
                        more_seconds=work_seconds * (arrival.blocks / arrival.blocks_done - 1.0),
                    )
                )
    return pieces, hosts


def _phases_of_workers(
    run: RecordedRun, numbers: tuple[int, ...], row_of: Mapping[int, int], shape: tuple[int, int]
) -> dict[str, Floats] | None:
    """Return the phases and the processor's time of each round from the workers' own step times.

    None where not every worker has them, or where long runs have mostly sums of steps.
    """
    files = run.times.get("worker") or run.times.get("rank") or {}
    if any(number not in files or not files[number].steps for number in numbers):
        return None
    phases = {name: np.full(shape, np.nan) for name in (*PHASES, "processor")}
    for index, number in enumerate(numbers):
        for line in files[number].steps:
            row = row_of.get(line.step if line.version is None else line.version)
            if row is not None and line.steps == 1:
                for name, values in phases.items():
                    seconds = getattr(line, f"{name}_seconds")
                    values[row, index] = np.nan if seconds is None else seconds
    if np.isnan(phases["processor"]).all():
        del phases["processor"]
    known = ~np.isnan(phases["forward"])
    return phases if known.mean() > 0.5 else None


def _server_seconds(run: RecordedRun, row_of: Mapping[int, int], rows: int) -> Floats:
    """Return what the server itself took for each round, where it has noted it: the step, and handing out the model."""
    seconds = np.zeros(rows)
    for times in run.times.get("server", {}).values():
        for each in times.server:
            if (row := row_of.get(each.version)) is not None:
                seconds[row] = each.step_seconds + each.send_seconds
    return seconds


def _present(
    at: Floats, opened: Floats, closed: Floats, absences: Iterable[Absence], column: Mapping[int, int]
) -> Bools:
    """Return who took part in which round: from its first gradient to the run's end, but for its absences."""
    brought = ~np.isnan(at)
    rows = np.arange(len(at))[:, None]
    present = np.asarray((rows >= np.argmax(brought, axis=0)) & brought.any(axis=0))
    for absence in absences:
        if absence.worker in column:
            end = np.inf if absence.to_seconds is None else absence.to_seconds
            away = (closed > absence.from_seconds) & (opened < end)
            present[away, column[absence.worker]] &= brought[away, column[absence.worker]]
    return present


def _gone_seconds(trace: Trace, column: Mapping[int, int], *, after: float) -> Floats:
    gone = np.zeros(len(column))
    for absence in trace.absences:
        if absence.worker in column:
            end = trace.seconds if absence.to_seconds is None else min(absence.to_seconds, trace.seconds)
            gone[column[absence.worker]] += max(0.0, end - max(after, absence.from_seconds))
    return gone


def _of_draws(
    run: RecordedRun,
    trace: Trace,
    pieces: list[_Piece],
    numbers: tuple[int, ...],
    hosts: dict[int, str],
    skip: int | None,
) -> Timings:
    """Return the times of an asynchronous run: a row is the n-th gradient of every worker, and nobody waits."""
    by_worker = [[piece for piece in pieces if piece.worker == number] for number in numbers]
    rows = max(map(len, by_worker))
    _refuse_too_many(rows, len(numbers))
    work, transfer, at = (np.full((rows, len(numbers)), np.nan) for _ in range(3))
    for index, its in enumerate(by_worker):
        work[: len(its), index] = [piece.work_seconds for piece in its]
        transfer[: len(its), index] = [piece.transfer_seconds for piece in its]
        at[: len(its), index] = [piece.at_seconds for piece in its]
    present = ~np.isnan(at)
    typical = medians(work + transfer)
    timings = Timings(
        noun="worker",
        numbers=numbers,
        hosts=tuple(hosts.get(number, "") for number in numbers),
        coupling="none",
        step=np.arange(rows, dtype=np.int64),
        steps=np.ones(rows, dtype=np.int64),
        start=np.concatenate([[0.0], np.cumsum(typical)[:-1]]),
        seconds=typical,
        arrival=work + transfer,
        present=present,
        k=np.maximum(1, present.sum(axis=1)),
        phases={"computing": work, "transfer": transfer},
        wait=np.zeros_like(work),
        wire=np.nan_to_num(transfer),
        parts={},
        run_seconds=trace.seconds,
        by_design="every gradient is a step of the model, so nobody waits for anybody",
    )
    kept = _without_first(timings, _warm_up_rows(timings, 0 if skip is None and run.kind == "simulated" else skip))
    column = {number: index for index, number in enumerate(numbers)}
    parts = {"computing": np.nansum(work, axis=0), "gone": _gone_seconds(trace, column, after=0.0)}
    parts["wire"] = np.nansum(transfer, axis=0)
    return _adding_up(kept, parts, max(trace.seconds, float(np.nanmax(at))))


# -- averages: windows of steps, then the mean of all ------------------------------------------------------------------


def _of_averages(run: RecordedRun, trace: Trace, skip: int | None) -> Timings:
    works = [work for work in trace.works if work.arrived_seconds is not None]
    if not works:
        raise NoRunError(f"{run.folder} holds no average with times to diagnose")
    numbers = tuple(sorted({work.worker for work in works}))
    column = {number: index for index, number in enumerate(numbers)}
    versions = sorted({work.version for work in works})
    row_of = {version: row for row, version in enumerate(versions)}
    _refuse_too_many(len(versions), len(numbers))
    shape = (len(versions), len(numbers))
    started, finished, sent, arrived = (np.full(shape, np.nan) for _ in range(4))
    for work in works:
        cell = row_of[work.version], column[work.worker]
        started[cell], finished[cell], arrived[cell] = work.started_seconds, work.finished_seconds, work.arrived_seconds
        sent[cell] = work.finished_seconds if work.sent_seconds is None else work.sent_seconds
    present = ~np.isnan(started)
    following = np.vstack([started[1:], np.full((1, len(numbers)), np.inf)])
    following = np.where(np.isnan(following), np.inf, following)
    resumed = np.fmax(finished, np.fmin(following, arrived))  # who trains on meanwhile waits for nothing
    waited = np.clip(np.fmin(sent, resumed) - finished, 0.0, None)
    wire = np.clip(resumed - np.fmax(sent, finished), 0.0, None)
    computing = finished - started
    blocked = np.nansum(waited) + np.nansum(wire)
    often = np.mean(np.nansum(waited + wire, axis=1) > 0) > 0.2  # at the end all wait for all, whatever they did before
    coupled = len(numbers) > 1 and often and blocked >= LEAST_WAIT_SHARE * np.nansum(computing)
    opened = _least(started)
    hosts = {number: times.began.host for number, times in run.times.get("rank", {}).items()}
    until = np.append(opened[1:], np.nanmax(arrived[-1]))
    timings = Timings(
        noun="rank",
        numbers=numbers,
        hosts=tuple(hosts.get(number, "") for number in numbers),
        coupling="all" if coupled else "none",
        step=np.array(versions, dtype=np.int64),
        steps=np.ones(len(versions), dtype=np.int64),
        start=opened,
        seconds=np.clip(until - opened, 0.0, None),
        arrival=finished - opened[:, None] if coupled else computing,
        present=present,
        k=present.sum(axis=1),
        phases={"computing": computing},
        wait=np.nan_to_num(waited),
        wire=np.nan_to_num(wire),
        parts={},
        run_seconds=trace.seconds,
        by_design="" if coupled else "the ranks train on while an average is on its way, so a slow one holds up nobody",
    )
    warm_up = _warm_up_rows(timings, 0 if skip is None and run.kind == "simulated" else skip)
    kept = _without_first(timings, warm_up)
    begin = float(opened[warm_up]) if warm_up else 0.0
    parts = {
        "computing": np.nansum(kept.phases["computing"], axis=0),
        "waiting": kept.wait.sum(axis=0),
        "wire": kept.wire.sum(axis=0),
        "warm-up": np.full(len(numbers), begin),
    }
    return _adding_up(kept, parts, max(trace.seconds, float(np.nanmax(arrived))))


# -- what all of them share --------------------------------------------------------------------------------------------


def _refuse_too_many(rows: int, workers: int) -> None:
    if rows * workers > MOST_CELLS:
        raise NoRunError(f"{rows:,} rounds of {workers:,} workers are too many to diagnose (at most {MOST_CELLS:,})")


def _warm_up_rows(timings: Timings, skip: int | None) -> int:
    """Return how many rows are warm-up: those of the first steps, but never more than leave one to look at."""
    rows = len(timings.step)
    first = timings.step[0] if rows else 0  # a run that goes on from a checkpoint begins late
    if skip is None:
        most = int(MOST_SKIPPED_SHARE * rows)
        return min(most, int(np.sum(timings.step + timings.steps <= first + SKIPPED_STEPS)))
    skipped = int(np.sum(timings.step < first + skip))
    if skipped >= rows:
        raise NoRunError(f"--skip {skip} leaves no step of {rows:,}: give fewer")
    return skipped


def _without_first(timings: Timings, rows: int) -> Timings:
    kept = {
        name: getattr(timings, name)[rows:]
        for name in ("step", "steps", "start", "seconds", "arrival", "present", "k", "wait", "wire")
    }
    return replace(
        timings,
        **kept,
        phases={name: values[rows:] for name, values in timings.phases.items()},
        processor=None if timings.processor is None else timings.processor[rows:],
        skipped_steps=int(timings.steps[:rows].sum()),
        skipped_seconds=float(timings.seconds[:rows].sum()),
    )


def _adding_up(timings: Timings, parts: Mapping[str, Floats], run_seconds: float) -> Timings:
    """Give the timings their parts. What is counted first is trusted more; what is left is unexplained."""
    left = np.full(len(timings.numbers), run_seconds)
    whole: dict[str, Floats] = {}
    for name, seconds in parts.items():
        whole[name] = np.minimum(np.maximum(seconds, 0.0), left)
        left = left - whole[name]
    return replace(timings, parts={**whole, "unexplained": left}, run_seconds=run_seconds)


def _least(values: Floats) -> Floats:
    return np.asarray(np.fmin.reduce(values, axis=1))


def _most(values: Floats) -> Floats:
    return np.asarray(np.fmax.reduce(values, axis=1))
