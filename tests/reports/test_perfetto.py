"""The trace for Perfetto: the format's rules over every kind of run, and times that add up to those of the record."""

from __future__ import annotations

import copy
import gzip
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.cli.main import main
from paceline.reports import perfetto
from paceline.reports.perfetto import ExportError, perfetto_trace
from paceline.traces.alignment import aligned_starts
from paceline.traces.ideal import ideal_steps, ideal_trace
from paceline.traces.recorded_run import RecordedRun, read_run
from paceline.traces.records import Absence, Evaluation, Round, Trace, Work
from paceline.traces.step_times import FORMAT, ServerTimes, StepTimes, TimesBegan, TimesWriter, WorkerTimes, times_path
from tests.reports.race_traces import synchronous
from tests.reports.trace_event_format import FormatError, check

GOLDEN = Path(__file__).parents[1] / "golden"
KINDS = ("server", "rounds", "averaging", "simulated")
short = st.integers(0, 2_000_000).map(lambda micro: micro / 1e6)


@st.composite
def traces(draw):
    """Rounds one after the other, and any work at all: late, overlapping, never arrived, of no length."""
    rounds, at = [], 0.0
    for version in range(draw(st.integers(0, 5))):
        end = round(at + draw(short), 6)
        rounds.append(Round(version=version, opened_seconds=at, closed_seconds=end, k=1, used=1, late=0))
        at = end
    works = []
    for _ in range(draw(st.integers(0, 12))):
        started, computing = draw(short), draw(short)
        finished = round(started + computing, 6)
        sent = draw(st.none() | short)
        sent = None if sent is None else round(finished + sent, 6)
        arrived = draw(st.none() | short)
        works.append(
            Work(
                worker=draw(st.integers(0, 3)),
                version=draw(st.integers(0, max(len(rounds) - 1, 0))),
                started_seconds=started,
                finished_seconds=finished,
                arrived_seconds=None if arrived is None else round((sent or finished) + arrived, 6),
                sent_seconds=sent,
                blocks_done=draw(st.integers(1, 4)),
                blocks=4,
                outcome=draw(st.sampled_from(("used", "late", "dropped"))),
                reason=draw(st.text(max_size=5)),
            )
        )
    absent = draw(st.lists(st.tuples(st.integers(0, 3), short, st.none() | short), max_size=2))
    return Trace(
        strategy=draw(st.sampled_from(("full", "lgc", "async", "hpsgd"))),
        seed=0,
        workers=4,
        recipe={},
        rounds_done=len(rounds),
        seconds=max([at, *(work.arrived_seconds or work.finished_seconds for work in works)]),
        clock=draw(st.sampled_from(("virtual", "real"))),
        averaged=draw(st.booleans()),
        rounds=tuple(rounds),
        works=tuple(works),
        evaluations=tuple(
            Evaluation(round=0, seconds=draw(short), loss=loss, accuracy=None)
            for loss in draw(st.lists(st.floats(), max_size=2))
        ),
        absences=tuple(
            Absence(worker=worker, from_seconds=begin, to_seconds=None if more is None else begin + more, reason="lost")
            for worker, begin, more in absent
        ),
    )


@st.composite
def some_steps(draw, version=False):
    found, at = [], draw(short)
    for step in range(draw(st.integers(0, 6))):
        phases = {f"{name}_seconds": draw(short) for name in perfetto.PHASES}
        seconds = round(sum(phases.values()) + draw(short), 6)
        buckets = draw(st.lists(st.tuples(short, short), max_size=3))
        found.append(
            StepTimes(
                step=step,
                steps=draw(st.sampled_from((1, 1, 1, 2))),
                version=step if version else None,
                started_seconds=at,
                seconds=seconds,
                buckets=tuple((ready, round(ready + more, 6)) for ready, more in buckets),
                **phases,
            )
        )
        at = 0.0 if draw(st.integers(0, 9)) == 0 else round(at + seconds, 6)  # a launch that was restarted
    return tuple(found)


def worker_times(number, steps, noun="rank", sync="ddp", **more):
    began = TimesBegan(
        format=FORMAT, paceline="0.2.0", noun=noun, number=number, workers=4, host="node-7", launch="1a2b", sync=sync
    )
    return WorkerTimes(began=began, steps=tuple(steps), **more)


def events_of(found, process, kind="X", **fields):
    return [
        event
        for event in found.events
        if event["pid"] == process and event["ph"] == kind and all(event[key] == fields[key] for key in fields)
    ]


# -- the rules of the format -------------------------------------------------------------------------------------------


@given(traces(), st.sampled_from(KINDS), st.data())
def test_every_run_with_rounds_keeps_the_rules(trace, kind, data):
    noun = "worker" if kind == "server" else "rank"
    times = {noun: {number: worker_times(number, data.draw(some_steps(version=True)), noun) for number in range(2)}}
    server = [
        ServerTimes(version=each, closed_seconds=0.0, step_seconds=0.5, send_seconds=0.25, decode_seconds=0.0)
        for each in (0, 2)
    ]
    times["server"] = {0: worker_times(0, (), "server", "server", server=tuple(server))}
    found = perfetto_trace(RecordedRun(folder=Path("a"), kind=kind, trace=trace, times=times))
    check(found.document())


@given(st.lists(some_steps(), min_size=1, max_size=4), st.sampled_from(("ddp", "none")))
def test_every_watched_script_keeps_the_rules(ranks, sync):
    times = {number: worker_times(number, steps, sync=sync) for number, steps in enumerate(ranks)}
    found = perfetto_trace(RecordedRun(folder=Path("a"), kind="watched", times={"rank": times}))
    check(found.document())


@pytest.mark.parametrize("run", ["served", "served-stopped"])
def test_a_recorded_run_keeps_the_rules(run):
    found = perfetto_trace(read_run(GOLDEN / run))
    check(found.document(title=run))
    assert {event["ph"] for event in found.events} == {"X", "M", "C", "s", "f"}


SOUND = perfetto_trace(RecordedRun(folder=Path("a"), kind="server", trace=synchronous("lgc"))).document()
BREAKING = {
    "a slice without a duration": lambda events: slice_of(events).pop("dur"),
    "a time below zero": lambda events: slice_of(events).update(ts=-1.0),
    "a time that is text": lambda events: slice_of(events).update(ts="0"),
    "a track without a name": lambda events: slice_of(events).update(tid=77),
    "a process without a name": lambda events: slice_of(events).update(pid=77),
    "slices that overlap": lambda events: slice_of(events).update(dur=slice_of(events)["dur"] + 1),
    "an arrow without an end": lambda events: events.remove(next(each for each in events if each["ph"] == "f")),
    "an arrow with two starts": lambda events: events.append(
        dict(next(each for each in reversed(events) if each["ph"] == "s"), ts=events[-1]["ts"])
    ),
    "an arrow that ends nowhere": lambda events: next(each for each in events if each["ph"] == "f").update(tid=1, ts=0),
    "an unbound end": lambda events: next(each for each in events if each["ph"] == "f").pop("bp"),
    "a counter of text": lambda events: next(each for each in events if each["ph"] == "C").update(args={"K": "7"}),
    "an unknown kind": lambda events: slice_of(events).update(ph="Q"),
}


def slice_of(events):
    return next(each for each in events if each["ph"] == "X" and each["cat"] == "computing")


@pytest.mark.parametrize("broken", BREAKING)
def test_the_checker_notices(broken):
    check(SOUND)
    document = copy.deepcopy(SOUND)
    BREAKING[broken](document["traceEvents"])
    with pytest.raises(FormatError):
        check(document)


# -- times that add up -------------------------------------------------------------------------------------------------


@given(traces())
def test_slices_add_up_to_the_trace(trace):
    """Computing and wire of every worker, and all rounds; late work beside newer work counts as well."""
    found = perfetto_trace(RecordedRun(folder=Path("a"), kind="simulated", trace=trace))
    drawn = defaultdict(float)
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in found.events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    for event in events_of(found, perfetto.RUN):
        words = tracks[event["pid"], event["tid"]].split()
        drawn[event["cat"], int(words[1]) if words[0] == "worker" else -1] += event["dur"] / 1e6
    for worker in range(4):
        works = [work for work in trace.works if work.worker == worker]
        assert drawn["computing", worker] == pytest.approx(sum(work.compute_seconds for work in works), abs=1e-6)
        wire = [
            work.arrived_seconds - (work.finished_seconds if work.sent_seconds is None else work.sent_seconds)
            for work in works
            if work.arrived_seconds is not None
        ]
        assert drawn["wire", worker] == pytest.approx(sum(wire), abs=1e-6)
    assert drawn["round", -1] == pytest.approx(sum(each.seconds for each in trace.rounds), abs=1e-6)


@given(st.lists(some_steps(), min_size=1, max_size=3))
def test_phases_of_a_watched_script_add_up(ranks):
    times = {number: worker_times(number, steps) for number, steps in enumerate(ranks)}
    found = perfetto_trace(RecordedRun(folder=Path("a"), kind="watched", times={"rank": times}))
    for name in perfetto.PHASES:
        drawn = sum(event["dur"] for event in events_of(found, perfetto.RUN, cat="phase", name=name)) / 1e6
        assert drawn == pytest.approx(sum(getattr(e, f"{name}_seconds") for steps in ranks for e in steps), abs=1e-5)


def test_an_arrow_leads_to_the_step_that_used_the_gradient():
    """Round 0 closes at 1.0 without worker 1, whose gradient comes at 1.5 and is in step 1."""
    works = (
        Work(worker=0, version=0, started_seconds=0.0, finished_seconds=0.8, arrived_seconds=1.0),
        Work(worker=1, version=0, started_seconds=0.0, finished_seconds=1.4, arrived_seconds=1.5, outcome="late"),
        Work(worker=0, version=1, started_seconds=1.0, finished_seconds=1.9, arrived_seconds=2.0),
        Work(worker=1, version=1, started_seconds=1.4, finished_seconds=2.4, arrived_seconds=2.5, outcome="dropped"),
    )
    rounds = tuple(
        Round(version=each, opened_seconds=float(each), closed_seconds=each + 1.0, k=1, used=1, late=each)
        for each in range(2)
    )
    trace = Trace(strategy="lgc", seed=0, workers=2, recipe={}, rounds_done=2, seconds=2.5, works=works, rounds=rounds)
    found = perfetto_trace(RecordedRun(folder=Path("a"), kind="server", trace=trace))
    ends = {event["id"]: event["ts"] / 1e6 for event in events_of(found, perfetto.RUN, "f")}
    arrows = {
        (event["name"], round(event["ts"] / 1e6, 3)): ends[event["id"]] for event in events_of(found, perfetto.RUN, "s")
    }
    assert arrows == {("used", 0.8): 1.0, ("late", 1.4): 2.0, ("used", 1.9): 2.0}


def test_phases_and_the_servers_own_time_are_inside_their_slices():
    work = Work(worker=0, version=0, started_seconds=1.0, finished_seconds=2.0, arrived_seconds=2.5)
    trace = Trace(
        strategy="full", seed=0, workers=1, recipe={}, rounds_done=1, seconds=3.0, works=(work,),
        rounds=(Round(version=0, opened_seconds=0.0, closed_seconds=2.5, k=1, used=1, late=0),),
    )  # fmt: skip
    step = StepTimes(
        step=0, version=0, started_seconds=7.0, seconds=2.0, input_seconds=0.125, forward_seconds=0.25,
        backward_seconds=0.5, wait_seconds=1.0,
    )  # fmt: skip
    own = ServerTimes(version=0, closed_seconds=2.5, step_seconds=0.25, send_seconds=0.125, decode_seconds=0.0)
    times = {
        "worker": {0: worker_times(0, [step], "worker", "server")},
        "server": {0: worker_times(0, (), "server", "server", server=(own,))},
    }
    found = perfetto_trace(RecordedRun(folder=Path("a"), kind="server", trace=trace, times=times))
    phases = [(event["name"], event["ts"] / 1e6, event["dur"] / 1e6) for event in events_of(found, 1, cat="phase")]
    assert phases == [
        ("input", 1.0, 0.125),
        ("forward", 1.125, 0.25),
        ("backward", 1.375, 0.5),
        ("update", 2.5, 0.25),
        ("send", 2.75, 0.125),
    ]


# -- the ideal ---------------------------------------------------------------------------------------------------------


def test_the_ideal_of_a_run_that_waits_for_all_is_never_longer():
    for seed in range(20):
        trace = synchronous("full", seed=seed)
        ideal = ideal_trace(trace)
        assert ideal.seconds <= trace.seconds + 1e-9
        assert {(work.worker, work.version) for work in ideal.works} == {
            (work.worker, work.version) for work in trace.works
        }
        assert ideal_trace(ideal).seconds == pytest.approx(ideal.seconds)  # nobody straggles there


@given(traces())
def test_the_ideal_has_the_same_work_and_no_waiting(trace):
    ideal = ideal_trace(trace)
    if trace.strategy == "async":
        assert len(ideal.works) == len(trace.works)
    else:
        assert {(work.worker, work.version) for work in ideal.works} == {(w.worker, w.version) for w in trace.works}
    assert ideal.used == len(ideal.works)
    for work in ideal.works:
        assert (work.outcome, work.sent_seconds) == ("used", None)
        assert work.arrived_seconds >= work.finished_seconds >= work.started_seconds
    for step in ideal.rounds:
        ends = {work.arrived_seconds for work in ideal.works if work.version == step.version}
        assert len(ends) == 1
        assert max(ends) <= step.closed_seconds


@given(st.integers(1, 5), st.integers(1, 5), short, short)
def test_where_nobody_straggles_the_ideal_is_the_run(workers, rounds, computing, wire):
    length = computing + wire
    trace = Trace(
        strategy="full",
        seed=0,
        workers=workers,
        recipe={},
        rounds_done=rounds,
        seconds=rounds * length,
        rounds=tuple(
            Round(version=v, opened_seconds=v * length, closed_seconds=(v + 1) * length, k=1, used=1, late=0)
            for v in range(rounds)
        ),
        works=tuple(
            Work(
                worker=worker,
                version=v,
                started_seconds=v * length,
                finished_seconds=v * length + computing,
                arrived_seconds=(v + 1) * length,
            )
            for v in range(rounds)
            for worker in range(workers)
        ),
    )
    assert ideal_trace(trace).seconds == pytest.approx(trace.seconds, abs=1e-6)


@given(st.lists(st.lists(st.tuples(short, short), min_size=3, max_size=3), min_size=1, max_size=5), short)
def test_the_ideal_of_a_script_is_never_longer(steps, wire):
    """Ranks that wait for the slowest in every step; the wait of the slowest is the wire."""
    ranks = {}
    for rank in range(3):
        taken, at = [], 0.0
        for number, phases in enumerate(steps):
            slowest = max(sum(each) for each in phases)
            own = phases[rank]
            taken.append(
                StepTimes(
                    step=number,
                    started_seconds=at,
                    seconds=slowest + wire,
                    forward_seconds=own[0],
                    backward_seconds=own[1],
                    wait_seconds=slowest - sum(own) + wire,
                )
            )
            at += slowest + wire
        ranks[rank] = worker_times(rank, taken)
    ideal = ideal_steps(ranks)
    for number in range(len(steps)):
        taken = ranks[0].steps[number].seconds
        assert {round(ideal[rank][number].seconds, 9) for rank in ranks} == {round(ideal[0][number].seconds, 9)}
        assert ideal[0][number].seconds <= taken + 1e-9


# -- clocks ------------------------------------------------------------------------------------------------------------


@given(st.lists(short, min_size=2, max_size=4), st.integers(1, 6), st.data())
def test_clocks_that_began_at_other_moments_are_brought_together(begins, count, data):
    """The same steps on clocks with other beginnings; a third of the ends is noticed late on one rank."""
    lengths = [data.draw(short) + 0.1 for _ in range(count)]
    ranks = {}
    for rank, begin in enumerate(begins):
        at, steps = begin, []
        for number, length in enumerate(lengths):
            late = 0.02 if rank and number % 3 == 2 else 0.0
            steps.append(
                StepTimes(step=number, started_seconds=at, seconds=length, buckets=((0.0, length / 2 + late),))
            )
            at += length
        ranks[rank] = worker_times(rank, steps)
    starts = aligned_starts(ranks)
    for rank in ranks:
        for number in range(count):
            assert starts[rank][number] == pytest.approx(starts[0][number], abs=1e-6)


@given(st.lists(st.floats(0.001, 0.1), min_size=2, max_size=20), short)
def test_a_rank_has_one_track_although_times_are_rounded(lengths, begin):
    """Steps follow each other without a gap; as whole microseconds they may overlap by one."""
    steps, at = [], begin
    for number, length in enumerate(lengths):
        half = round(length / 2, 6)
        steps.append(
            StepTimes(
                step=number,
                started_seconds=round(at, 6),
                seconds=round(length, 6),
                forward_seconds=half,
                backward_seconds=half,
            )
        )
        at += length
    run = RecordedRun(folder=Path("a"), kind="watched", times={"rank": {0: worker_times(0, steps)}})
    found = perfetto_trace(run)
    check(found.document())
    tracks = [event["args"]["name"] for event in found.events if event["name"] == "thread_name" and event["pid"] == 1]
    assert tracks == ["steps", "rank 0 on node-7"]
    assert len(events_of(found, perfetto.RUN, cat="phase")) == 2 * len(steps)


def test_a_restarted_launch_follows_the_first():
    def rank(number, begins):
        steps = [
            StepTimes(step=2 * launch + each, started_seconds=begin + each, seconds=1.0, buckets=((0.5, 0.75),))
            for launch, begin in enumerate(begins)
            for each in range(2)
        ]
        return worker_times(number, steps)

    starts = aligned_starts({0: rank(0, (5.0, 0.5)), 1: rank(1, (9.0, 0.25))})
    assert starts[0] == {0: 5.0, 1: 6.0, 2: 7.0, 3: 8.0}
    assert starts[1] == starts[0]


# -- large runs, and the command ---------------------------------------------------------------------------------------


def test_a_large_run_is_cut_and_says_so(monkeypatch):
    monkeypatch.setattr(perfetto, "MOST_WORKS", 40)
    trace = synchronous("full")
    run = RecordedRun(folder=Path("a"), kind="server", trace=trace)
    found = perfetto_trace(run)
    assert any("--rounds" in note for note in found.notes)
    computing = events_of(found, perfetto.RUN, cat="computing")
    assert 0 < len(computing) <= 40
    first = int(found.notes[0].split("--rounds ")[1].split(":")[0])
    more = perfetto_trace(run, rounds=(first, None))
    check(more.document())
    assert min(event["args"]["version"] for event in events_of(more, perfetto.RUN, cat="computing")) == first
    with pytest.raises(ExportError, match="rounds 9999: are not in this run"):
        perfetto_trace(run, rounds=(9999, None))


def test_a_long_script_is_cut_and_says_so(monkeypatch):
    monkeypatch.setattr(perfetto, "MOST_WORKS", 40)
    steps = [StepTimes(step=each, started_seconds=each / 4, seconds=0.25, backward_seconds=0.125) for each in range(50)]
    ranks = {rank: worker_times(rank, steps) for rank in range(2)}
    run = RecordedRun(folder=Path("a"), kind="watched", times={"rank": ranks})
    found = perfetto_trace(run)
    assert found.notes == (
        "30 steps from 20 on are left out, for a viewer's sake; --rounds 20:50 shows them (this file has 0:20)",
    )
    check(perfetto_trace(run, rounds=(20, 40)).document())


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    gaps=st.sets(st.integers(0, 7)),
    asked=st.tuples(st.integers(0, 30), st.integers(1, 30)),
)
@example(lengths=[10] * 10, gaps=set(), asked=(51, 9))
@example(lengths=[10] * 10, gaps=set(), asked=(99, 1))
@example(lengths=[5, 5, 5], gaps={1}, asked=(6, 2))
def test_every_line_with_a_step_that_is_asked_for_is_drawn_also_sums(lengths, gaps, asked):
    first, behind = asked[0], sum(asked)
    lines, step = [], 0
    for place, length in enumerate(lengths):
        if place not in gaps:
            seconds = {"seconds": length / 4, "backward_seconds": length / 8}
            lines.append(StepTimes(step=step, steps=length, started_seconds=step / 4, **seconds))
        step += length
    wanted = {each.step for each in lines if set(range(first, behind)) & set(range(each.step, each.step + each.steps))}
    run = RecordedRun(folder=Path("a"), kind="watched", times={"rank": {0: worker_times(0, lines)}})
    if not lines:
        return
    if not wanted:
        with pytest.raises(ExportError):
            perfetto_trace(run, rounds=(first, behind))
        return
    found = perfetto_trace(run, rounds=(first, behind))
    check(found.document())
    assert {event["args"]["step"] for event in events_of(found, perfetto.RUN) if "step" in event["args"]} == wanted


def test_the_command_writes_a_file(tmp_path, capsys):
    served = str(GOLDEN / "served")
    assert main(["export", served, "--out", str(tmp_path / "a.json"), "--json"]) == 0
    told = capsys.readouterr()
    said = json.loads(told.out)
    document = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    check(document)
    assert said["events"] == len(document["traceEvents"])
    assert "ui.perfetto.dev" in told.err
    assert main(["export", served, "--out", str(tmp_path / "new" / "a.json.gz"), "--rounds", "3:5"]) == 0
    some = json.loads(gzip.decompress((tmp_path / "new" / "a.json.gz").read_bytes()))
    check(some)
    assert {event["args"]["version"] for event in some["traceEvents"] if event.get("cat") == "computing"} == {3, 4}


@settings(max_examples=20)
@given(st.lists(some_steps(), min_size=1, max_size=3))
def test_a_folder_of_a_watched_script_is_exported(tmp_path_factory, ranks):
    folder = tmp_path_factory.mktemp("watched")
    for number, steps in enumerate(ranks):
        writer = TimesWriter(times_path(folder, "rank", number))
        writer.write(replace(worker_times(number, ()).began, workers=len(ranks)))
        for each in steps:
            writer.write(each)
        writer.close()
    assert main(["export", str(folder)]) == 0
    check(json.loads((folder / "perfetto.json").read_text(encoding="utf-8")))


REFUSED = {
    ("--rounds", "5:3"): "--rounds must be A:B with whole numbers from 0 on, A below B",
    ("--rounds", "all"): "(rounds='all')",
    ("--rounds", "1000:"): "rounds 1000: are not in this run (it has 0:",
    ("--out", "."): ". is a folder; give --out a file",
    ("--out", "/dev/null/a.json"): "cannot write /dev/null/a.json: Not a directory; give another --out",
    ("--out", "/dev/full/a.json"): "give another --out",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_exported_is_refused_in_one_line(arguments, capsys):
    assert main(["export", str(GOLDEN / "served"), *arguments]) == 2
    told = capsys.readouterr().err
    assert REFUSED[arguments] in told
    assert len(told.splitlines()) == 1
