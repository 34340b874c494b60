"""The state that the page shows: the same however a file grows, the counts of the whole journal, and bounded."""

from __future__ import annotations

import json
import math
import os
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.live import folder as live_folder
from paceline.live import state as live_state
from paceline.live.folder import FollowedRun
from paceline.live.metrics import metrics_text
from paceline.live.state import MOST_POINTS, MOST_ROWS, Curve, JournalState, RankSteps, pace_curve
from paceline.live.tail import FileTail
from paceline.processes import seen_from
from paceline.traces.history import ENDED, trace_of
from paceline.traces.journal import Arrived, Checkpointed, JournalError, Resumed, RunEnded, WorkerLeft
from paceline.traces.journal_files import Journal, JournalWriter, read_journal
from paceline.traces.recorded_run import read_run
from paceline.traces.records import Trace, summarise
from paceline.traces.step_times import (
    FORMAT,
    BucketsMade,
    StepTimes,
    TimesBegan,
    TimesEnded,
    TimesWriter,
    times_path,
)
from paceline.traces.trace_files import write_traces
from tests.live.journals import append, began, joined, journals, lines, step


def followed(folder):
    run = FollowedRun(Path(folder), clock=lambda: 1e10)
    caught_up(run)
    return run


def caught_up(run):
    """Look until there is nothing more to read; in bounded parts, each of which gets further."""
    for _ in range(2_000):
        run.look()
        if not run.behind:
            return
    raise AssertionError("the record is never read to its end")


@given(records=journals(), cuts=st.lists(st.floats(0, 1), max_size=6))
def test_a_file_that_grows_in_any_pieces_comes_to_the_state_of_the_whole(records, cuts):
    data = lines(records)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        run = followed(folder)
        before = 0
        for end in sorted([*(round(cut * len(data)) for cut in cuts), len(data)]):
            with path.open("ab") as file:
                file.write(data[before:end])
            before = end
            run.look()
            assert not run.problems
        assert run.document() == followed(folder).document()


def numbers_of(trace):
    """What a report says of a run, by the names of the live page."""
    summary = summarise(trace)
    return {
        "seconds": round(trace.seconds, 3),
        "used": trace.used,
        "late": trace.late,
        "dropped": summary.dropped,
        "sent_bytes": trace.sent_bytes,
        "received_bytes": trace.received_bytes,
        "loss": None if summary.loss is None or math.isnan(summary.loss) else summary.loss,
        "accuracy": None if summary.accuracy is None or math.isnan(summary.accuracy) else summary.accuracy,
        "rows": {each.worker: (each.used, each.late, each.dropped) for each in trace.by_worker if each.gradients},
    }


def numbers_shown(figures, rows):
    """What the live page says of it, by the same names."""
    counts = {row["number"]: (row["used"], row["late"], row["dropped"]) for row in rows}
    counts = {number: each for number, each in counts.items() if any(each)}
    return {"rows": counts} | {name: figures[name] for name in numbers_of(NOTHING) if name != "rows"}


NOTHING = Trace(strategy="full", seed=0, workers=1, recipe={}, rounds_done=0, seconds=0.0)


@given(records=journals())
def test_a_run_that_is_over_has_the_numbers_of_its_report_also_after_restarts(records):
    trace, state = trace_of(Journal(records=tuple(records), torn=False)), JournalState()
    for record in records:
        state.take(record)
    last = [record.version for record in records[-1:] if hasattr(record, "version")]
    assert state.round == max([trace.rounds_done, *last])
    told = numbers_of(trace)
    assert numbers_shown(state.figures(over=True), state.rows(over=True)) == told
    if isinstance(records[-1], RunEnded):
        assert numbers_shown(state.figures(), state.rows()) == told  # a run that has an end is over
    elif trace.dropped.get(ENDED):
        assert state.figures()["dropped"] == told["dropped"] - trace.dropped[ENDED]  # it may still be used


@given(records=journals(), kept=st.integers(40, 60))
def test_a_restart_far_back_finds_the_gradients_and_bytes_that_were_counted_by_then(records, kept):
    """Further than the last records go, which are few here, but more than a note comes late for."""
    records = [record for record in records if not isinstance(record, Arrived)]  # void or not by its place alone
    trace = trace_of(Journal(records=tuple(records), torn=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_state, "_KEPT_GRADIENTS", kept)
        state = JournalState()
        for record in records:
            state.take(record)
    shown, told = numbers_shown(state.figures(over=True), state.rows(over=True)), numbers_of(trace)
    names = ("used", "late", "dropped", "rows", "sent_bytes", "received_bytes")
    assert {name: shown[name] for name in names} == {name: told[name] for name in names}


@given(records=journals())
def test_the_page_prometheus_and_the_report_say_the_same(records):
    """Of a run with an end, as a folder holds it."""
    if not isinstance(records[-1], RunEnded):
        at = max(getattr(record, "at_seconds", 0.0) for record in records)
        records = [*records, RunEnded(at_seconds=at, reason="stopped", rounds_done=0, diverged=False)]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "trace.jsonl").write_bytes(lines(records))
        document = followed(folder).document()
        told = numbers_of(read_run(Path(folder)).trace)
    assert numbers_shown(document["figures"], document["rows"]) == told
    metrics = dict(line.rsplit(" ", 1) for line in metrics_text(document).splitlines() if not line.startswith("#"))
    assert float(metrics["paceline_seconds"]) == told["seconds"]
    assert float(metrics["paceline_sent_bytes_total"]) == told["sent_bytes"]
    for worker, counts in told["rows"].items():
        for outcome, count in zip(("used", "late", "dropped"), counts, strict=True):
            labels = f'{document["noun"]}="{worker}",outcome="{outcome}"'
            assert float(metrics[f"paceline_worker_gradients_total{{{labels}}}"]) == count


@given(number=st.integers(0, 3000), most=st.integers(3, 50))
def test_a_curve_keeps_few_points_in_order_and_the_first_and_last(number, most):
    curve = Curve(most=most)
    for place in range(number):
        curve.add((place, place))
    points = curve.points
    assert len(points) <= most
    assert points == sorted(points)
    assert set(points[:1] + points[-1:]) == ({(0, 0), (number - 1, number - 1)} if number else set())


def test_ten_times_the_rounds_take_no_more_room_and_many_workers_are_counted():
    sizes = []
    for rounds in (1_500, 15_000):
        state = JournalState()
        state.take(began(rounds=rounds))
        for version in range(rounds):
            state.take(step(version, version / 10, fresh=(0, 1), late=(2,)))
        sizes.append(len(json.dumps([state.curves(), state.figures(), state.rows()])))
        assert all(len(curve) <= MOST_POINTS for curve in state.curves().values())
    assert sizes[1] < 1.3 * sizes[0]


def test_of_many_workers_those_that_are_gone_are_named(tmp_path):
    many = 3 * MOST_ROWS
    records = [began(workers=many), *map(joined, range(many)), step(0, 1.0, fresh=range(many - 5))]
    records.append(WorkerLeft(at_seconds=2.0, worker=many - 1, reason="it was killed"))
    (tmp_path / "trace.jsonl").write_bytes(lines(records))
    document = followed(tmp_path).document()
    assert len(document["rows"]) == MOST_ROWS
    assert document["rows_left_out"] == many - MOST_ROWS
    assert document["rows"][-1] == {
        "number": many - 1, "state": "gone", "remark": "it was killed", "host": "node-7", "used": 0, "late": 0,
        "dropped": 0, "refused": 0,
    }  # fmt: skip


def test_a_damaged_line_is_named_and_all_before_it_is_shown(tmp_path):
    data = lines([began(), joined(0), step(0, 1.0, fresh=(0,)), step(1, 2.0, fresh=(0,))])
    (tmp_path / "trace.jsonl").write_bytes(data.replace(b'"version":1,"opened', b'"version":7,"opened'))
    document = followed(tmp_path).document()
    assert document["figures"]["round"] == 1
    assert document["problems"][0].startswith("trace.jsonl:4: the line is not as it was written")


def test_a_file_that_is_replaced_cut_or_rewritten_is_read_anew(tmp_path):
    path, run = tmp_path / "trace.jsonl", followed(tmp_path)
    first = [began(), *(step(version, 1.0 + version, fresh=(0,)) for version in range(5))]
    second = [began(workers=4), *(step(version, 1.0 + version, fresh=(1,)) for version in range(5))]
    path.write_bytes(lines(first))
    for records in (first, second[:3], first, second):  # shorter, then in place with as many bytes
        if records is not first:
            path.write_bytes(lines(records))
        else:
            path.unlink()
            run.look()  # gone for a while
            path.write_bytes(lines(records))
        run.look()
        assert run.document() == followed(tmp_path).document()
        assert run.document()["figures"]["round"] == len(records) - 1


def test_what_is_no_plain_file_is_named_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "trace.jsonl")
    (tmp_path / "times").mkdir()
    (tmp_path / "times" / "rank-0.jsonl").symlink_to("/dev/zero")
    (tmp_path / "times" / "rank-0.jsonl.bak").write_text("not ours")
    assert followed(tmp_path).problems == [
        "cannot read trace.jsonl: it is a pipe, not a plain file",
        "times/rank-0.jsonl:0: it is a device, not a plain file",
    ]


def test_the_state_says_whether_the_writer_lives(tmp_path):
    now, run = [0.0], FollowedRun(tmp_path, clock=lambda: now[0])

    def state():
        run.look()
        return run.document()["state"]

    assert state() == "waiting"
    writer = JournalWriter(tmp_path / "trace.jsonl")
    writer.write(began())
    now[0] = (tmp_path / "trace.jsonl").stat().st_mtime
    assert state() == "waiting"
    writer.write(step(0, 1.0, fresh=(0,)))
    assert state() == "running"
    now[0] += 3600.0  # a long round: the writer holds the journal
    assert state() == "running"
    with pytest.raises(JournalError, match="another process writes it"):  # the lock is still the writer's
        JournalWriter(tmp_path / "trace.jsonl", append=True)
    writer.close()
    assert state() == "killed"
    assert [row["state"] for row in run.document()["rows"]] == ["gone"]
    assert run.document()["figures"]["here"] == 0
    assert FollowedRun(tmp_path, clock=lambda: now[0]).look()
    fresh = FollowedRun(tmp_path, clock=lambda: now[0])
    fresh.look()
    assert fresh.document()["state"] == "quiet"  # whoever comes later cannot tell a killed run from one elsewhere
    with JournalWriter(tmp_path / "trace.jsonl", append=True) as again:
        again.write(RunEnded(at_seconds=2.0, reason="all rounds are done", rounds_done=1, diverged=False))
    assert state() == "ended"
    assert run.document()["text"] == "ended after round 1 of 50: all rounds are done"


@pytest.mark.parametrize("on", ["server", "ranks"])
def test_a_page_that_comes_after_a_kill_knows_it_where_the_writer_was_on_this_machine(on, tmp_path, monkeypatch):
    noun = "server" if on == "server" else "rank"

    def state(seen):
        times_path(tmp_path, noun, 0).unlink(missing_ok=True)
        writer = TimesWriter(times_path(tmp_path, noun, 0))
        writer.write(replace(times_began(0), noun=noun, seen_from=seen, sync="server" if on == "server" else "rounds"))
        writer.close()
        return followed(tmp_path).document()["state"]

    writer = JournalWriter(tmp_path / "trace.jsonl")
    for record in (began(on=on), joined(0), step(0, 1.0, fresh=(0,))):
        writer.write(record)
    assert state(seen_from()) == "running"  # it holds the journal
    writer.close()
    assert state(seen_from()) == "killed"
    assert state("another boot, or another container") == "quiet"
    for name in ("LOCKS", "MOUNTS"):  # where the locks of this machine cannot be known
        with monkeypatch.context() as patch:
            patch.setattr(live_folder, name, tmp_path / "nothing")
            assert state(seen_from()) == "quiet"
    end = RunEnded(at_seconds=2.0, reason="all rounds are done", rounds_done=1, diverged=False)
    append(tmp_path / "trace.jsonl", end)
    assert state(seen_from()) == "ended"


def test_a_long_record_is_read_in_bounded_parts_and_comes_to_the_same_state(tmp_path, monkeypatch):
    rounds = [step(version, 1.0 + version, fresh=(0, 1)) for version in range(60)]
    end = RunEnded(at_seconds=99.0, reason="all rounds are done", rounds_done=60, diverged=False)
    (tmp_path / "trace.jsonl").write_bytes(lines([began(on="ranks"), joined(0), *rounds, end]))
    for rank in range(5):
        timed(tmp_path, rank, steps=50, ended="the script ended")
    whole = followed(tmp_path).document()
    assert whole["text"] == "ended after round 60 of 50: all rounds are done"
    monkeypatch.setattr(live_folder, "LOOK_BYTES", 4_000)
    monkeypatch.setattr(live_folder, "LEAST_BYTES", 500)
    taken, plain = [], FileTail.look

    def counting(tail, most_bytes):
        found = plain(tail, most_bytes)
        taken.append(sum(map(len, found.lines)))
        return found

    monkeypatch.setattr(FileTail, "look", counting)
    run, shares = FollowedRun(tmp_path, clock=lambda: 1e10), []
    while run.look() or run.behind:
        assert sum(taken) <= 4_000 + 500
        taken.clear()
        shares.append(run.document()["read"])
        if run.behind:  # it is neither quiet nor killed: what is left may say that it ended well
            assert run.document()["state"] in ("waiting", "running") or not run._journal.more
    assert len(shares) > 5
    assert shares == sorted(shares)
    assert run.document() == whole


def test_step_times_that_are_not_read_to_their_end_are_not_taken_for_quiet(tmp_path, monkeypatch):
    for rank in range(3):
        timed(tmp_path, rank, steps=50, ended="the script ended")
    monkeypatch.setattr(live_folder, "LOOK_BYTES", 2_000)
    monkeypatch.setattr(live_folder, "LEAST_BYTES", 500)
    run = FollowedRun(tmp_path, clock=lambda: 1e10)
    run.look()
    assert run.behind
    assert run.document()["state"] == "running"
    assert run.document()["text"].startswith("reading the record, so far step ")
    caught_up(run)
    assert run.document()["text"] == "ended after step 50: the script ended"


def test_a_torn_line_is_nothing_to_wait_for(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines([began(), step(0, 1.0, fresh=(0,)), step(1, 2.0, fresh=(0,))])[:-9])
    run = FollowedRun(tmp_path)
    run.look()
    assert not run.behind
    assert run.document()["read"] == 1.0


def test_a_run_that_ends_between_two_glances_is_not_taken_for_killed(tmp_path, monkeypatch):
    path, run = tmp_path / "trace.jsonl", FollowedRun(tmp_path)
    path.write_bytes(lines([began(), step(0, 1.0, fresh=(0,))]))
    monkeypatch.setattr(live_folder, "_is_locked", lambda path: True)
    run.look()
    assert run.document()["state"] == "running"

    def ends_now(path):
        """The writer ends after the journal was read, and before anybody looks for its lock."""
        end = RunEnded(at_seconds=2.0, reason="all rounds are done", rounds_done=1, diverged=False)
        append(path, end)
        return False

    monkeypatch.setattr(live_folder, "_is_locked", ends_now)
    run.look()
    assert run.document()["text"] == "ended after round 1 of 50: all rounds are done"


def test_a_rank_takes_little_memory_and_the_first_alone_has_a_curve(tmp_path, monkeypatch):
    records = [StepTimes(step=each, started_seconds=each / 7, seconds=1 / 7) for each in range(1_000)]

    def taken(with_curve):
        tracemalloc.start()
        ranks = [RankSteps(with_curve=with_curve) for _ in range(10)]
        for times in ranks:
            times.take(times_began(0))
            for record in records:
                times.take(record)
        found = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return found / len(ranks)

    assert taken(False) < 8_000 < taken(True)
    # Whichever is the first is drawn from its beginning, also when its file comes late.
    for rank in (3, 1):
        timed(tmp_path, rank, steps=20)
    run = FollowedRun(tmp_path)
    caught_up(run)
    for rank in (0, 2):
        timed(tmp_path, rank, steps=20)
    caught_up(run)
    assert run.document()["curves"] == followed(tmp_path).document()["curves"]
    assert len(run.document()["curves"]["step_seconds"]) == 20
    assert [bool(file.times.curves()) for _, file in sorted(run._times.items())] == [True, False, False, False]
    monkeypatch.setattr(live_folder, "MOST_TIMES_FILES", 3)
    few = followed(tmp_path).document()
    assert [row["number"] for row in few["rows"]] == [0, 1, 2]
    assert few["problems"] == ["times holds 4 files: 3 of them are shown"]


@given(rounds=st.integers(3, 1_500), hurry=st.integers(1, 30))
def test_the_curve_of_the_pace_does_not_end_with_a_spike(rounds, hurry):
    """A few rounds in a hurry at the end weigh no more than they would anywhere else."""
    curve, at = Curve(), 0.0
    for version in range(rounds):
        at += 0.1 if version < rounds - hurry else 0.001
        curve.add((version, at))
    found, points = pace_curve(curve.points), curve.points
    if found and rounds > 900:
        last = (points[-1][0] - points[-3][0]) / (points[-1][1] - points[-3][1])
        assert found[-1][1] <= max(10.01, last) * (1 + 1e-9)  # sums of tenths round
    assert all(pace > 0 for _, pace in found)


def times_began(rank):
    return TimesBegan(
        format=FORMAT, paceline="0.2.0", noun="rank", number=rank, workers=2, host=f"node-{rank}", launch="1a2b",
        sync="ddp",
    )  # fmt: skip


def timed(folder, rank, *, steps, ended=""):
    writer = TimesWriter(times_path(folder, "rank", rank))
    writer.write(times_began(rank))
    writer.write(BucketsMade(step=0, bytes=(8, 16)))
    for number in range(steps):
        wait = 0.05 if rank == 0 else 0.0
        writer.write(
            StepTimes(step=number, started_seconds=number / 4, seconds=0.25, forward_seconds=0.1, wait_seconds=wait)
        )
    if ended:
        writer.write(TimesEnded(at_seconds=steps / 4, reason=ended))
    writer.close()


def test_a_watched_script_shows_steps_a_second_and_the_waits_of_each_rank(tmp_path):
    for rank in range(2):
        timed(tmp_path, rank, steps=20)
    run = FollowedRun(tmp_path)
    run.look()
    document = run.document()
    assert (document["kind"], document["state"], document["noun"]) == ("watched", "running", "rank")
    assert document["figures"]["steps_per_second"] == 4.0
    assert [row["times"]["wait"] for row in document["rows"]] == [0.05, 0.0]
    assert document["rows"][1]["host"] == "node-1"
    # Who comes last waits for nobody, and the others wait for it.
    assert document["warnings"] == ["The others wait for rank 1: of their last steps they wait 20 %, and it waits 0 %."]
    assert document["curves"]["wait_seconds"][-1] == [5.0, 0.05]
    for rank in range(2):
        timed(tmp_path, rank, steps=0, ended="the script ended")
    run.look()
    assert run.document()["state"] == "ended"


def test_a_trace_of_ranks_that_averaged_is_shown_as_a_run_that_is_over(tmp_path):
    trace = Trace(
        strategy="hpsgd", seed=0, workers=2, recipe={"rounds": 5}, rounds_done=5, seconds=2.0, clock="real",
        averaged=True, sent_bytes=7,
    )  # fmt: skip
    write_traces(tmp_path, [trace])
    document = followed(tmp_path).document()
    assert (document["kind"], document["strategy"], document["state"]) == ("averaging", "hpsgd", "ended")
    assert document["figures"]["rounds_per_second"] == 2.5
    assert document["figures"]["received_bytes"] is None  # nobody counts it, and 0 would be a lie
    write_traces(tmp_path, [trace, trace])
    assert followed(tmp_path).problems == ["traces.json.gz holds 2 runs: see report.html for them"]


def test_following_a_journal_leaves_its_file_as_it_is(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines([began(), step(0, 1.0, fresh=(0,))]))
    before = (path.read_bytes(), sorted(tmp_path.rglob("*")))
    followed(tmp_path).document()
    assert (path.read_bytes(), sorted(tmp_path.rglob("*"))) == before
    assert read_journal(path).began.workers == 3


def test_two_restarts_from_one_checkpoint_find_the_same_counts(monkeypatch):
    """The counts that are kept of a checkpoint are gone on with from a copy."""
    monkeypatch.setattr(live_state, "_KEPT_GRADIENTS", 4)
    records = [*(step(number, number + 1.0, fresh=[0]) for number in range(5)), Checkpointed(at_seconds=5.5, version=5)]
    for again in (100.0, 200.0):
        records += [step(number, again + number, fresh=[0]) for number in range(5, 30)]
        records.append(Resumed(at_seconds=again + 50, version=5, reason="killed"))
    state = JournalState()
    for record in [began(), *records, step(5, 300.0, fresh=[0])]:
        state.take(record)
    assert state.figures()["used"] == 6
