r"""A run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: JSON in Chrome's Trace Event Format.

    process 1  run                            process 2  ideal: nobody straggles        the same tracks
      rounds      |   round 0   |  round 1  |   from a round's opening to its closing
      steps                     |           |   step 0: the round has closed, the model is stepped
      worker 0    |computing#0|~wire~|..wait..|computing#1|        forward, backward, ... nested where they are known
      worker 1    |computing#0      |wire|....|computing#1|   \
      counters    K, loss                                      arrows: from a gradient to the step that used it

Of a watched script there are no rounds: a track for each rank has its steps with their phases, another one its buckets
on the wire, and `steps` the moments at which the mean gradient was there. `traces/ideal.py` says what the ideal is, and
`traces/alignment.py` how clocks of ranks come together.

The rules that the file keeps, as the format states them: times are microseconds; slices ("X") of one track nest or are
apart; an arrow has one start ("s") and one end ("f", bound to the slice around it, "bp": "e"), each inside a slice;
every process and track has its name ("M"). A worker whose late work runs beside newer work has a second track for it.

A large run is cut: at most MOST_WORKS pieces of work, of at most MOST_WORKERS workers. Notes say what is left out.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, TypeAlias

from paceline.errors import PacelineError
from paceline.quantities import counted
from paceline.reports.timeline import MOST_REASON, Segment, segments
from paceline.terminal import shortened
from paceline.traces.alignment import aligned_starts
from paceline.traces.ideal import ideal_steps, ideal_trace
from paceline.traces.recorded_run import RecordedRun
from paceline.traces.records import Absence, Round, Trace, Work
from paceline.traces.step_clock import PHASES
from paceline.traces.step_times import ServerTimes, StepTimes, WorkerTimes

Event: TypeAlias = dict[str, Any]
RUN, IDEAL = 1, 2  # process numbers
PROCESSES = {RUN: "run", IDEAL: "ideal: nobody straggles"}
ROUNDS_TRACK, STEPS_TRACK, FIRST_WORKER_TRACK = 1, 2, 10
MOST_WORKS = 20_000
MOST_WORKERS = 1_000
MARK_NANOSECONDS = 1_000  # the length of a step whose own time nobody has measured
ROUNDING_NANOSECONDS = 2_000  # a file's times are whole microseconds
NANO = 1e9
LATEST_SECONDS = 2**53 / NANO / 1000  # nanoseconds of every time are exact in a float then, with room for sums
NAMES = {"flight": "wire", "waiting": "wait", "gone": "gone"}


class ExportError(PacelineError, ValueError):
    """A run that cannot be exported as it was asked for.

    >>> raise ExportError("rounds 7:9 are not in this run (it has 0:5)")
    Traceback (most recent call last):
    paceline.reports.perfetto.ExportError: rounds 7:9 are not in this run (it has 0:5)
    """


@dataclass(frozen=True, kw_only=True)
class PerfettoTrace:
    """The events, and sentences on what is not among them."""

    events: tuple[Event, ...]
    notes: tuple[str, ...] = ()

    def document(self, *, title: str = "") -> dict[str, Any]:
        """Return the JSON object that a viewer opens."""
        return {
            "traceEvents": list(self.events),
            "displayTimeUnit": "ms",
            "otherData": {"title": title, "notes": list(self.notes)},
        }


def perfetto_trace(run: RecordedRun, *, rounds: tuple[int | None, int | None] = (None, None)) -> PerfettoTrace:
    """Return the events of a run and of its ideal; `rounds` are the first and the one behind the last, or all that fit.

    For a watched script rounds are its steps.

    >>> from pathlib import Path
    >>> work = Work(worker=0, version=0, started_seconds=0.0, finished_seconds=1.0, arrived_seconds=1.5)
    >>> trace = Trace(strategy="full", seed=0, workers=1, recipe={}, rounds_done=1, seconds=1.5, works=(work,),
    ...               rounds=(Round(version=0, opened_seconds=0.0, closed_seconds=1.5, k=1, used=1, late=0),))
    >>> found = perfetto_trace(RecordedRun(folder=Path("runs/mine"), kind="server", trace=trace))
    >>> [(each["name"], each["ts"], each["dur"]) for each in found.events if each["ph"] == "X" and each["pid"] == 1]
    [('round 0', 0.0, 1500000.0), ('computing 0', 0.0, 1000000.0), ('wire 0', 1000000.0, 500000.0), ...]
    """
    drawing = _Drawing()
    if run.kind == "watched" or run.trace is None:
        notes = _draw_watched(drawing, run.times.get("rank", {}), rounds)
    else:
        trace, notes = _selected(run.trace, rounds)
        noun = "rank" if run.kind in ("rounds", "averaging") else "worker"
        _draw_trace(drawing, RUN, trace, noun=noun, phases=_phases(run), server=_server_times(run))
        _draw_trace(drawing, IDEAL, ideal_trace(trace), noun=noun)
    return PerfettoTrace(events=tuple(drawing.finished()), notes=(*notes, *run.missing))


# -- what is drawn -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """A slice in nanoseconds, with the slices inside it."""

    name: str
    category: str
    begin: int
    end: int
    args: Mapping[str, Any] = field(default_factory=dict)
    inside: tuple[_Slice, ...] = ()


class _Drawing:
    """Events as they are made; every rule of the format that a single event can break is kept here."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._named: list[Event] = []
        self._arrows = 0
        self._processes: set[int] = set()

    def name_track(self, process: int, track: int, name: str) -> None:
        if process not in self._processes:
            self._processes.add(process)
            self._name(process, 0, "process_name", name=PROCESSES[process])
            self._name(process, 0, "process_sort_index", sort_index=process)
        self._name(process, track, "thread_name", name=name)
        self._name(process, track, "thread_sort_index", sort_index=track)

    def _name(self, process: int, track: int, kind: str, **args: Any) -> None:
        self._named.append({"ph": "M", "name": kind, "pid": process, "tid": track, "ts": 0, "args": args})

    def slices(self, process: int, track: int, slices: Sequence[_Slice]) -> None:
        for each in slices:
            self._events.append(
                {
                    "ph": "X",
                    "name": each.name,
                    "cat": each.category,
                    "ts": each.begin / 1000,
                    "dur": (each.end - each.begin) / 1000,
                    "pid": process,
                    "tid": track,
                    "args": dict(each.args),
                }
            )
            self.slices(process, track, each.inside)

    def arrow(self, process: int, name: str, begin: tuple[int, int], end: tuple[int, int]) -> None:
        """Draw an arrow between two (track, nanosecond), each inside a slice."""
        self._arrows += 1
        common = {"name": name, "cat": "gradient", "id": self._arrows, "pid": process}
        self._events.append({"ph": "s", **common, "tid": begin[0], "ts": begin[1] / 1000})
        self._events.append({"ph": "f", "bp": "e", **common, "tid": end[0], "ts": end[1] / 1000})

    def counter(self, process: int, name: str, at: int, value: float) -> None:
        if math.isfinite(value):
            event = {"ph": "C", "name": name, "pid": process, "tid": 0, "ts": at / 1000, "args": {name: value}}
            self._events.append(event)

    def finished(self) -> list[Event]:
        """Return the events in order of time, the outer of two slices first, and an arrow after its slice."""
        order = {"X": 0, "C": 1, "s": 2, "f": 3}
        ordered = sorted(self._events, key=lambda each: (each["ts"], order[each["ph"]], -each.get("dur", 0.0)))
        return [*self._named, *ordered]


def _nanoseconds(seconds: float) -> int:
    return round(min(max(seconds, 0.0), LATEST_SECONDS) * NANO)


def _in_lanes(slices: Sequence[_Slice]) -> list[list[_Slice]]:
    """Return the slices on as few tracks as they need not to overlap."""
    lanes: list[list[_Slice]] = []
    for each in sorted(slices, key=lambda each: (each.begin, each.end)):
        free = next((lane for lane in lanes if lane[-1].end <= each.begin), None)
        if free is None:
            lanes.append([each])
        else:
            free.append(each)
    return lanes


def _in_a_row(names: Sequence[tuple[str, float]], begin: int, end: int) -> tuple[_Slice, ...]:
    """Return phases one after the other from `begin` on, none beyond `end`."""
    found = []
    for name, seconds in names:
        behind = min(begin + _nanoseconds(seconds), end)
        if behind > begin:
            found.append(_Slice(name=name, category="phase", begin=begin, end=behind))
        begin = behind
    return tuple(found)


# -- runs with rounds --------------------------------------------------------------------------------------------------


def _selected(trace: Trace, rounds: tuple[int | None, int | None]) -> tuple[Trace, list[str]]:
    """Return the part of a trace that is drawn, and what is left out of it."""
    versions = sorted({step.version for step in trace.rounds} | {work.version for work in trace.works})
    first, behind = _range(rounds, (versions[0], versions[-1] + 1) if versions else (0, 0))
    workers = sorted({work.worker for work in trace.works if first <= work.version < behind})
    notes = []
    if len(workers) > MOST_WORKERS:
        notes.append(f"workers from {workers[MOST_WORKERS]} on are left out: {MOST_WORKERS:,} have a track")
        workers = workers[:MOST_WORKERS]
    kept = set(workers)
    works = [work for work in trace.works if first <= work.version < behind and work.worker in kept]
    of_version: defaultdict[int, int] = defaultdict(int)
    for work in works:
        of_version[work.version] += 1
    number = 0
    for version in sorted(of_version):
        number += of_version[version]
        if number > MOST_WORKS and version > first:
            notes.append(_left_out("round", version, behind, first))
            behind = version
            break
    recorded = max(of_version, default=behind - 1) + 1
    if not works:
        notes.append("no work of a worker is recorded in this run (a simulation of times alone keeps none of it)")
    elif recorded < behind:
        notes.append(f"no work is recorded of the rounds from {recorded} on: they are drawn without workers")
    works = [work for work in works if work.version < behind]
    steps = [step for step in trace.rounds if first <= step.version < behind][:MOST_WORKS]
    ends = [step.closed_seconds for step in steps]
    ends += [max(work.finished_seconds, work.arrived_seconds or 0.0) for work in works]
    whole = (first, behind) == (versions[0], versions[-1] + 1) if versions else True
    end = trace.seconds if whole else max(ends, default=0.0)
    begin = min([step.opened_seconds for step in steps] + [work.started_seconds for work in works], default=0.0)
    absences = [
        replace(each, from_seconds=max(each.from_seconds, begin))
        for each in trace.absences
        if each.from_seconds < end and (each.to_seconds is None or each.to_seconds > begin)
    ]
    shown = replace(
        trace,
        rounds=tuple(steps),
        works=tuple(works),
        seconds=max(end, *ends, 0.0) if ends else end,
        absences=tuple(each for each in absences if each.worker in kept),
        evaluations=tuple(each for each in trace.evaluations if whole or begin <= each.seconds <= end),
    )
    return shown, notes


def _range(rounds: tuple[int | None, int | None], there: tuple[int, int]) -> tuple[int, int]:
    """Return the rounds that are asked for and are there.

    >>> _range((None, 9), (0, 5)), _range((2, None), (0, 5))
    ((0, 5), (2, 5))
    >>> _range((7, 9), (0, 5))
    Traceback (most recent call last):
    paceline.reports.perfetto.ExportError: rounds 7:9 are not in this run (it has 0:5)
    """
    first = there[0] if rounds[0] is None else max(rounds[0], there[0])
    behind = there[1] if rounds[1] is None else min(rounds[1], there[1])
    if first >= behind and there[1] > there[0]:
        asked = ":".join("" if each is None else str(each) for each in rounds)
        raise ExportError(f"rounds {asked} are not in this run (it has {there[0]}:{there[1]})")
    return first, behind


def _left_out(noun: str, first: int, behind: int, shown_from: int) -> str:
    return (
        f"{counted(behind - first, noun)} from {first} on are left out, for a viewer's sake; --rounds {first}:{behind} "
        f"shows them (this file has {shown_from}:{first})"
    )


def _phases(run: RecordedRun) -> dict[tuple[int, int], list[StepTimes]]:
    """Return the step times of workers or ranks by number and version of the model, where they say it."""
    found: defaultdict[tuple[int, int], list[StepTimes]] = defaultdict(list)
    for noun in ("worker", "rank"):
        for number, times in run.times.get(noun, {}).items():
            for each in times.steps:
                if each.version is not None and each.steps == 1:
                    found[number, each.version].append(each)
    return found


def _server_times(run: RecordedRun) -> dict[int, ServerTimes]:
    return {each.version: each for times in run.times.get("server", {}).values() for each in times.server}


def _draw_trace(
    drawing: _Drawing,
    process: int,
    trace: Trace,
    *,
    noun: str,
    phases: Mapping[tuple[int, int], Sequence[StepTimes]] | None = None,
    server: Mapping[int, ServerTimes] | None = None,
) -> None:
    drawing.name_track(process, ROUNDS_TRACK, "averages" if trace.averaged else "rounds")
    drawing.name_track(process, STEPS_TRACK, "steps")
    rounds = sorted(trace.rounds, key=lambda step: (step.closed_seconds, step.version))
    round_lanes = _in_lanes([one for one in map(_round_slice, rounds) if one is not None])
    drawing.slices(process, ROUNDS_TRACK, round_lanes[0] if round_lanes else ())  # rounds follow each other
    marks = _step_marks(rounds, server or {})
    drawing.slices(process, STEPS_TRACK, marks)
    for step in rounds:
        drawing.counter(process, "K", _nanoseconds(step.opened_seconds), step.k)
    for evaluation in trace.evaluations:
        drawing.counter(process, "loss", _nanoseconds(evaluation.seconds), evaluation.loss)
    steps = _UsingSteps(rounds, marks)
    of_worker: defaultdict[int, list[Work]] = defaultdict(list)
    for work in trace.works:
        of_worker[work.worker].append(work)
    tracks = itertools.count(FIRST_WORKER_TRACK)
    for worker in sorted({*of_worker, *(absence.worker for absence in trace.absences)}):
        alone = replace(trace, works=tuple(of_worker[worker]))
        drawn = [_bar_slice(bar, phases or {}) for bar in segments(alone, worker)]
        for place, lane in enumerate(_worker_lanes([pair for pair in drawn if pair is not None])):
            track = next(tracks)
            beside = "" if place == 0 else " beside" if place == 1 else f" beside {place}"
            drawing.name_track(process, track, f"{noun} {worker}{beside}")
            drawing.slices(process, track, [one for one, _ in lane])
            for one, bar in lane:
                if isinstance(bar.cause, Work) and bar.activity in ("used", "late"):
                    _draw_arrow(drawing, process, track, one, bar.cause, steps)


def _round_slice(step: Round) -> _Slice | None:
    begin, end = _nanoseconds(step.opened_seconds), _nanoseconds(step.closed_seconds)
    args = {"k": step.k, "used": step.used, "late": step.late}
    return (
        _Slice(name=f"round {step.version}", category="round", begin=begin, end=end, args=args) if end > begin else None
    )


def _step_marks(rounds: Sequence[Round], server: Mapping[int, ServerTimes]) -> list[_Slice]:
    """Return a slice for every moment at which the model was stepped; steps of one moment share one."""
    marks: list[_Slice] = []
    at_once = [(at, list(steps)) for at, steps in itertools.groupby(rounds, lambda s: _nanoseconds(s.closed_seconds))]
    for place, (at, steps) in enumerate(at_once):
        most = at_once[place + 1][0] - at if place + 1 < len(at_once) else math.inf
        timed = [server[step.version] for step in steps if step.version in server]
        measured = sum(_nanoseconds(each.step_seconds) + _nanoseconds(each.send_seconds) for each in timed)
        end = at + int(min(max(measured, 1) if timed else MARK_NANOSECONDS, most))
        phases = [
            ("update", sum(each.step_seconds for each in timed)),
            ("send", sum(each.send_seconds for each in timed)),
        ]
        first, last = steps[0].version, steps[-1].version
        name = f"step {first}" if first == last else f"steps {first} to {last}"
        args = {"used": sum(step.used for step in steps), "late": sum(step.late for step in steps)}
        inside = _in_a_row(phases, at, end)
        marks.append(_Slice(name=name, category="step", begin=at, end=end, args=args, inside=inside))
    return marks


class _UsingSteps:
    """Which step used a gradient: the first that was taken when or after it arrived."""

    def __init__(self, rounds: Sequence[Round], marks: Sequence[_Slice]) -> None:
        self._closed = [step.closed_seconds for step in rounds]
        self._rounds = rounds
        self._begins = {each.begin for each in marks}

    def of(self, work: Work) -> int | None:
        """Return the nanosecond of the step that used a gradient; None where that step is not drawn."""
        if work.arrived_seconds is None:
            return None
        place = bisect_left(self._closed, work.arrived_seconds - 1 / NANO)
        while place < len(self._rounds) and self._rounds[place].version < work.version:
            place += 1
        if place == len(self._rounds):
            return None
        at = _nanoseconds(self._closed[place])
        return at if at in self._begins else None


_Bar: TypeAlias = tuple[_Slice, Segment]


def _bar_slice(bar: Segment, phases: Mapping[tuple[int, int], Sequence[StepTimes]]) -> _Bar | None:
    begin, end = _nanoseconds(bar.start_seconds), _nanoseconds(bar.end_seconds)
    if end <= begin:
        return None
    if isinstance(bar.cause, Absence):
        args: dict[str, Any] = {"reason": shortened(bar.cause.reason, MOST_REASON)}
        return _Slice(name="gone", category="gone", begin=begin, end=end, args=args), bar
    work, kind = bar.cause, NAMES.get(bar.activity, "computing")
    args = {"version": work.version}
    inside: tuple[_Slice, ...] = ()
    if kind == "computing":
        args |= {"outcome": work.outcome, "blocks": f"{work.blocks_done} of {work.blocks}"}
        args |= {"reason": shortened(work.reason, MOST_REASON)} if work.reason else {}
        if bar.start_seconds == work.started_seconds:
            inside = _work_phases(phases.get((work.worker, work.version), ()), begin, end)
    name = kind if kind == "wait" else f"{kind} {work.version}"
    return _Slice(name=name, category=kind, begin=begin, end=end, args=args, inside=inside), bar


def _work_phases(steps: Sequence[StepTimes], begin: int, end: int) -> tuple[_Slice, ...]:
    """Return what a worker did in its computing time; what it loaded before that time began is not part of it."""
    names = ("input", "forward", "backward")  # the optimiser's step comes after the wait, and not in this time
    sums = [(name, sum(getattr(each, f"{name}_seconds") for each in steps)) for name in names]
    if sum(_nanoseconds(seconds) for _, seconds in sums) > 1.01 * (end - begin):
        sums = sums[1:]
    return _in_a_row(sums, begin, end)


def _worker_lanes(bars: Sequence[_Bar]) -> list[list[_Bar]]:
    """Return a worker's lane, and the lanes of what runs beside it."""
    main = [each for each in bars if not each[1].beside]
    beside = [each for each in bars if each[1].beside]
    by_slice = {id(one): (one, bar) for one, bar in bars}
    lanes = _in_lanes([one for one, _ in main]) + _in_lanes([one for one, _ in beside])
    return [[by_slice[id(one)] for one in lane] for lane in lanes]


def _draw_arrow(drawing: _Drawing, process: int, track: int, computing: _Slice, work: Work, steps: _UsingSteps) -> None:
    at = steps.of(work)
    if at is None or computing.end != _nanoseconds(work.finished_seconds) or at < computing.end:
        return
    drawing.arrow(process, "late" if work.outcome == "late" else "used", (track, computing.end - 1), (STEPS_TRACK, at))


# -- watched scripts ---------------------------------------------------------------------------------------------------


def _draw_watched(
    drawing: _Drawing, ranks: Mapping[int, WorkerTimes], rounds: tuple[int | None, int | None]
) -> list[str]:
    ranks, notes = _selected_steps(ranks, rounds)
    starts = aligned_starts(ranks)
    earliest = min((start for each in starts.values() for start in each.values()), default=0.0)
    run = {rank: [(starts[rank][each.step] - earliest, each) for each in times.steps] for rank, times in ranks.items()}
    _draw_ranks(drawing, RUN, run, ranks)
    ideal = {rank: [(each.started_seconds, each) for each in steps] for rank, steps in ideal_steps(ranks).items()}
    _draw_ranks(drawing, IDEAL, ideal, ranks)
    return notes


def _selected_steps(
    ranks: Mapping[int, WorkerTimes], rounds: tuple[int | None, int | None]
) -> tuple[dict[int, WorkerTimes], list[str]]:
    notes = []
    numbers = sorted(ranks)
    if len(numbers) > MOST_WORKERS:
        notes.append(f"ranks from {numbers[MOST_WORKERS]} on are left out: {MOST_WORKERS:,} have a track")
        numbers = numbers[:MOST_WORKERS]
    steps = sorted({each.step for number in numbers for each in ranks[number].steps})
    last = max((_end_of(each) for number in numbers for each in ranks[number].steps), default=0)
    first, behind = _range(rounds, (steps[0], last) if steps else (0, 0))
    chosen = {number: [each for each in ranks[number].steps if _overlap(each, first, behind)] for number in numbers}
    steps = sorted({each.step for lines in chosen.values() for each in lines})
    if last and not steps:
        raise ExportError(f"of the steps {first}:{behind} there is no record (this run has some of 0:{last})")
    most = max(1, MOST_WORKS // max(len(numbers), 1))
    if len(steps) > most:
        cut = max(steps[most], first + 1)  # a sum of several steps may begin before the first that is asked for
        notes.append(_left_out("step", cut, behind, first))
        behind = cut
    kept = {
        number: replace(ranks[number], steps=tuple(each for each in chosen[number] if each.step < behind))
        for number in numbers
    }
    drawn = [each for times in kept.values() for each in times.steps]
    begins, ends = min((each.step for each in drawn), default=0), max((_end_of(each) for each in drawn), default=0)
    if drawn and (begins < first or ends > behind):
        notes.append(f"sums of several steps are drawn whole, so this file has {begins}:{ends}")
    return kept, notes


def _overlap(times: StepTimes, first: int, behind: int) -> bool:
    """Return whether a line of the record, which may sum up several steps, has one from `first` to before `behind`."""
    return times.step < behind and _end_of(times) > first


def _end_of(times: StepTimes) -> int:
    return times.step + times.steps


def _draw_ranks(
    drawing: _Drawing,
    process: int,
    steps: Mapping[int, Sequence[tuple[float, StepTimes]]],
    ranks: Mapping[int, WorkerTimes],
) -> None:
    wires = _wire_seconds(steps)
    drawing.name_track(process, STEPS_TRACK, "steps")
    ends: defaultdict[int, list[int]] = defaultdict(list)  # of all-reduces, by step
    begun: list[tuple[int, int, int]] = []  # step, track, nanosecond inside the backward pass
    tracks = itertools.count(FIRST_WORKER_TRACK)
    for rank, taken in steps.items():
        slices = []
        for start, each in taken:
            step = _step_slice(start, each)
            if step is None:
                continue
            slices.append(step)
            backward = next((phase for phase in step.inside if phase.name == "backward"), None)
            waited = next((phase for phase in reversed(step.inside) if phase.name in ("wait", "backward")), None)
            if backward is not None and waited is not None and each.steps == 1:
                ends[each.step].append(waited.end)
        for place, lane in enumerate(_in_lanes(_without_rounding(slices))):
            track, host = next(tracks), ranks[rank].began.host
            beside = f" beside {place}" if place else ""
            drawing.name_track(process, track, f"rank {rank}{f' on {shortened(host, 60)}' if host else ''}{beside}")
            drawing.slices(process, track, lane)
            for one in lane:
                begun += [(one.args["step"], track, each.end - 1) for each in one.inside if each.name == "backward"]
        buckets = _bucket_slices(taken, wires)
        if buckets:
            track = next(tracks)
            drawing.name_track(process, track, f"rank {rank} wire")
            drawing.slices(process, track, buckets)
    _draw_means(drawing, process, ends, begun)


def _without_rounding(slices: Sequence[_Slice]) -> list[_Slice]:
    """Return slices that end where the next begins, where whole microseconds make them overlap by one or two."""
    found = sorted(slices, key=lambda each: (each.begin, each.end))
    for place, (each, following) in enumerate(itertools.pairwise(found)):
        if each.begin < following.begin < each.end <= following.begin + ROUNDING_NANOSECONDS:
            found[place] = _ending(each, following.begin)
    return found


def _ending(one: _Slice, end: int) -> _Slice:
    """Return a slice, and those inside it, cut off at `end`."""
    inside = tuple(_ending(each, end) for each in one.inside if each.begin < end)
    return replace(one, end=min(one.end, end), inside=inside)


def _step_slice(start: float, times: StepTimes) -> _Slice | None:
    begin = _nanoseconds(start)
    end = begin + _nanoseconds(times.seconds)
    if end <= begin:
        return None
    phases = [(name, getattr(times, f"{name}_seconds")) for name in PHASES]
    name = f"step {times.step}" if times.steps == 1 else f"steps {times.step} to {times.step + times.steps - 1}"
    args: dict[str, Any] = {"step": times.step, "unexplained_seconds": times.other_seconds}
    if times.processor_seconds is not None:
        args["processor_seconds"] = times.processor_seconds
    return _Slice(name=name, category="step", begin=begin, end=end, args=args, inside=_in_a_row(phases, begin, end))


def _wire_seconds(steps: Mapping[int, Sequence[tuple[float, StepTimes]]]) -> dict[tuple[int, int], float]:
    """Return what each bucket of each step took on the wire: the least of all ranks, for the last waits for nobody."""
    wires: dict[tuple[int, int], float] = {}
    for taken in steps.values():
        for _, each in taken:
            for place, (ready, done) in enumerate(each.buckets if each.steps == 1 else ()):
                wires[each.step, place] = max(0.0, min(wires.get((each.step, place), math.inf), done - ready))
    return wires


def _bucket_slices(taken: Sequence[tuple[float, StepTimes]], wires: Mapping[tuple[int, int], float]) -> list[_Slice]:
    """Return a rank's buckets, one after the other: each from when it is ready and the one before is done."""
    found: list[_Slice] = []
    free = 0
    for start, each in sorted(taken, key=lambda pair: pair[0]):
        for place, (ready, done) in enumerate(each.buckets if each.steps == 1 else ()):
            begin, end = max(_nanoseconds(start + ready), free), _nanoseconds(start + done)
            if end > begin:
                wire = wires[each.step, place]
                args = {
                    "step": each.step,
                    "wire_seconds": wire,
                    "wait_seconds": max(0.0, round(done - ready - wire, 6)),
                }
                found.append(_Slice(name=f"bucket {place}", category="wire", begin=begin, end=end, args=args))
                free = end
    return found


def _draw_means(
    drawing: _Drawing,
    process: int,
    ends: Mapping[int, Sequence[int]],
    begun: Sequence[tuple[int, int, int]],
) -> None:
    """Draw the moments at which the mean gradient of a step was there, and the arrows to them."""
    at = {step: round(median(moments)) for step, moments in ends.items()}
    latest: dict[int, int] = {}  # no arrow goes back in time
    for step, _, moment in begun:
        latest[step] = max(latest.get(step, 0), moment)
    marks: dict[int, _Slice] = {}
    free = 0
    for step in sorted(at, key=lambda step: at[step]):
        begin = max(at[step], latest.get(step, 0) + 1, free)
        free = begin + MARK_NANOSECONDS
        marks[step] = _Slice(
            name=f"step {step}", category="step", begin=begin, end=free, args={"gradients": len(ends[step])}
        )
    drawing.slices(process, STEPS_TRACK, list(marks.values()))
    for step, track, moment in begun:
        if step in marks:
            drawing.arrow(process, "used", (track, moment), (STEPS_TRACK, marks[step].begin))
