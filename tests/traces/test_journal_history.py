"""From a journal to a trace: every gradient has one fate, every number comes from a record, and it can be drawn."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drivers.simulated.cluster import Cluster, NoTraining, Setup
from paceline.drivers.simulated.delays import Recorded, ShiftedExponential, read_recorded
from paceline.drivers.simulated.network import Network
from paceline.reports import write_report
from paceline.strategies import LGC, Async, FastestK, Full
from paceline.strategies.shares import SharesBySpeed
from paceline.traces import Trace, history, summarise
from paceline.traces.history import recorded_delays, trace_of, write_recorded
from paceline.traces.journal import (
    Arrival,
    Arrived,
    Checkpointed,
    Dropped,
    Evaluated,
    JournalError,
    JournalRecord,
    Resumed,
    RunEnded,
    WorkerJoined,
    WorkerLeft,
)
from paceline.traces.journal_files import Journal, JournalWriter, read_journal
from paceline.traces.records import NOT_YET
from tests.traces.test_journal_records import arrival, arrivals, began, stepped

STRATEGIES: dict[str, Any] = {"full": Full(), "fastest-k": FastestK(k=2), "lgc": LGC(k=2), "async": Async()}


def journal_of(*records: JournalRecord, **changes: Any) -> Journal:
    return Journal(records=(began(**changes), *records), torn=False)


def drop(worker: int, version: int, reason: str) -> Dropped:
    return Dropped(worker=worker, version=version, reason=reason)


def evaluated(after: int, at_seconds: float, loss: float | None) -> Evaluated:
    return Evaluated(at_seconds=at_seconds, round=after, loss=loss, accuracy=None if loss is None else 0.5)


class Recording(Cluster):
    """A simulated cluster that keeps a journal as a server would: the simulator's own trace is what must come out."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, trainer=NoTraining(up=100, down=100))
        self.arrivals: list[Arrival] = []

    def _arrived(self, task: Any) -> None:
        self.arrivals.append(
            Arrival(
                worker=task.worker,
                version=task.version,
                draw=task.draw,
                blocks_done=task.blocks_done,
                blocks=task.blocks,
                at_seconds=self.now_seconds,
                work_seconds=task.finished_seconds - task.started_seconds,
                transfer_seconds=2 * (self.now_seconds - task.finished_seconds),
                loss_mean=None,
                loss_variance=None,
                samples=(task.samples or 8) * task.blocks_done // task.blocks,
                batch_samples=task.samples,
                first_sample=task.first,
            )
        )
        super()._arrived(task)


def simulated(name: str, steps: int = 30) -> tuple[Journal, Recording]:
    """A journal, and the cluster whose run it tells."""
    setup = Setup(
        name=name,
        strategy=STRATEGIES[name],
        workers=3,
        rounds=steps,
        blocks=4,
        delays=ShiftedExponential(seed=5),
        network=Network(latency_seconds=0.002),
    )
    cluster = Recording(setup)
    records: list[JournalRecord] = []
    seen, told = 0, 0
    for closed in cluster.run(steps):
        drops = [work for work in cluster.record.works if work.outcome == "dropped"]
        records.append(
            stepped(
                closed.step.version,
                closed.step.at_seconds,
                opened_seconds=closed.opened_seconds,
                fresh=tuple((share.worker, share.version) for share in closed.step.fresh),
                late=tuple((share.worker, share.version) for share in closed.step.late),
                dropped=tuple(drop(work.worker, work.version, work.reason) for work in drops[told:]),
                arrivals=tuple(cluster.arrivals[seen:]),
            )
        )
        seen, told = len(cluster.arrivals), len(drops)
    return journal_of(*records, strategy=name), cluster


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_journal_kept_of_a_simulation_gives_the_simulations_own_trace(name: str, tmp_path: Path) -> None:
    kept, cluster = simulated(name)
    with JournalWriter(tmp_path / "trace.jsonl") as writer:
        for record in kept.records:
            writer.write(record)
    trace = trace_of(read_journal(tmp_path / "trace.jsonl"))
    record = cluster.record
    assert (trace.used, trace.late) == (record.used, record.late)
    assert trace.rounds_done == (10 if name == "async" else 30)
    assert len(trace.rounds) == len(record.rounds)
    for ours, theirs in zip(trace.rounds, record.rounds, strict=True):
        assert (ours.version, ours.k, ours.used, ours.late) == (theirs.version, theirs.k, theirs.used, theirs.late)
        assert ours.opened_seconds == pytest.approx(theirs.opened_seconds, abs=2e-6)
        assert ours.closed_seconds == pytest.approx(theirs.closed_seconds, abs=2e-6)
    # What the run's end cut short never arrived, and so is in no journal.
    arrived = {(work.worker, work.version): work for work in record.works if work.arrived_seconds is not None}
    assert {(work.worker, work.version) for work in trace.works} == set(arrived)
    for work in trace.works:
        other = arrived[work.worker, work.version]
        assert (work.outcome, work.blocks_done) == (other.outcome, other.blocks_done)
        assert work.started_seconds == pytest.approx(other.started_seconds, abs=5e-6)
        assert work.finished_seconds == pytest.approx(other.finished_seconds, abs=5e-6)


def test_a_journal_of_a_simulation_replays_its_delays(tmp_path: Path) -> None:
    kept, _ = simulated("full")
    rows = recorded_delays(kept)
    write_recorded(tmp_path / "delays.csv", rows)
    read = read_recorded(tmp_path / "delays.csv")
    assert read.rows == rows
    again = Cluster(Setup(name="full", strategy=Full(), workers=3, rounds=30, delays=read, blocks=4))
    drawn = ShiftedExponential(seed=5)
    for draw, row in enumerate(rows):
        assert row == pytest.approx([drawn.seconds(w, draw).item() for w in range(3)], abs=1e-9)  # type: ignore[arg-type]
    assert len(list(again.run(30))) == 30


def test_batches_by_speed_replay_as_the_delays_of_equal_ones() -> None:
    """Of a batch of b samples that takes 0.3 + 0.1 b seconds, or three times that: what one of batch_size takes."""
    sizes = [(12, 12)] * 4 + [(18, 6)] * 4
    records = [
        stepped(
            draw,
            float(draw + 1),
            arrivals=tuple(
                arrival(
                    worker, draw, draw + 0.5, work_seconds=(1 + 2 * worker) * (0.3 + 0.1 * size), batch_samples=size
                )
                for worker, size in enumerate(of_workers)
            ),
        )
        for draw, of_workers in enumerate(sizes)
    ]
    rows = recorded_delays(journal_of(*records, recipe={"worker": {"batch_size": 12}}))
    assert [row[:2] for row in rows] == [pytest.approx((1.5, 4.5))] * len(sizes)


def test_every_fate_is_told_where_arrivals_wait_for_a_later_record() -> None:
    trace = trace_of(
        journal_of(
            Arrived(arrivals=(arrival(0, 0, 1.0), arrival(0, 0, 1.5)), dropped=(drop(0, 0, "it came twice"),)),
            WorkerLeft(at_seconds=1.6, worker=0, reason="gone"),
            stepped(0, 2.0, fresh=((0, 0), (1, 0)), arrivals=(arrival(1, 0, 2.0),)),
            stepped(1, 3.0, fresh=((1, 1),), late=((2, 0),), arrivals=(arrival(2, 0, 2.5), arrival(1, 1, 3.0))),
            Arrived(arrivals=(arrival(2, 1, 3.5),), dropped=()),
        )
    )
    fates = [(w.worker, w.version, w.arrived_seconds, w.outcome, w.reason) for w in trace.works]
    assert fates == [
        (0, 0, 1.5, "dropped", "it came twice"),
        (0, 0, 1.0, "used", ""),
        (1, 0, 2.0, "used", ""),
        (1, 1, 3.0, "used", ""),
        (2, 0, 2.5, "late", ""),
        (2, 1, 3.5, "dropped", "the run ended"),
    ]
    assert (trace.used, trace.late, trace.dropped) == (3, 1, {"it came twice": 1, "the run ended": 1})
    assert trace.seconds == 3.5


def test_an_incomplete_gradient_is_dropped_and_the_whole_one_after_it_used() -> None:
    early, whole = arrival(0, 0, 1.0, blocks_done=2), arrival(0, 0, 2.0)
    step = stepped(0, 2.0, fresh=((0, 0),), dropped=(drop(0, 0, "it is incomplete"),), arrivals=(early, whole))
    works = trace_of(journal_of(step)).works
    assert [(work.blocks_done, work.outcome) for work in works] == [(4, "used"), (2, "dropped")]


def test_what_a_lost_record_held_is_still_counted() -> None:
    trace = trace_of(journal_of(stepped(7, 2.0, fresh=((0, 7),), late=((1, 6),), dropped=(drop(2, 5, "old"),))))
    assert (trace.used, trace.late, trace.dropped, trace.works) == (1, 1, {"old": 1}, ())
    assert trace.rounds_done == 8


def test_a_run_that_was_resumed_counts_what_stands_and_all_of_the_time() -> None:
    def step(version: int, at_seconds: float) -> JournalRecord:
        return stepped(
            version,
            at_seconds,
            fresh=((0, version),),
            arrivals=(arrival(0, version, at_seconds),),
            sent_bytes=10,
            received_bytes=1,
        )

    trace = trace_of(
        journal_of(
            step(0, 1.0),
            Checkpointed(at_seconds=1.1, version=1),
            step(1, 2.0),
            evaluated(2, 2.1, 0.9),
            RunEnded(at_seconds=2.5, reason="interrupted", rounds_done=2, diverged=True),
            Resumed(at_seconds=10.0, version=1, reason="restarted"),
            WorkerJoined(at_seconds=10.1, worker=0, shard=0, first_draw=1, threads=1, host="a"),
            step(1, 11.0),
            evaluated(2, 11.5, 0.8),
        )
    )
    assert [(r.version, r.closed_seconds) for r in trace.rounds] == [(0, 1.0), (1, 11.0)]
    assert (trace.used, trace.sent_bytes, trace.received_bytes, trace.rounds_done) == (2, 20, 2, 2)
    assert [point.loss for point in trace.evaluations] == [0.8]
    assert trace.seconds == 11.5
    assert not trace.diverged


def test_gradients_that_wait_when_a_server_restarts_are_dropped() -> None:
    """Its workers are gone and compute them again: the new ones must not be taken for the old."""
    trace = trace_of(
        journal_of(
            Arrived(arrivals=(arrival(0, 0, 1.0),), dropped=()),
            Checkpointed(at_seconds=1.1, version=0),
            Resumed(at_seconds=5.0, version=0, reason="restarted"),
            stepped(0, 6.0, fresh=((0, 0),), arrivals=(arrival(0, 0, 6.0),)),
        )
    )
    assert [(w.arrived_seconds, w.outcome) for w in trace.works] == [(1.0, "dropped"), (6.0, "used")]
    assert trace.dropped == {"the server was restarted": 1}


# -- who was there --------------------------------------------------------------------------------------------------


def joined(worker: int, at_seconds: float) -> WorkerJoined:
    return WorkerJoined(at_seconds=at_seconds, worker=worker, shard=0, first_draw=0, threads=1, host="a")


def left(worker: int, at_seconds: float, reason: str = "gone") -> WorkerLeft:
    return WorkerLeft(at_seconds=at_seconds, worker=worker, reason=reason)


def absences(*records: JournalRecord) -> list[tuple[int, float, float | None, str]]:
    found = trace_of(journal_of(*records)).absences
    return [(a.worker, a.from_seconds, a.to_seconds, a.reason) for a in found]


def test_who_leaves_is_away_until_it_joins_again() -> None:
    assert absences(
        *(joined(worker, 0.0) for worker in range(3)), left(1, 2.0), left(2, 3.0, "silent"), joined(1, 5.0)
    ) == [(1, 2.0, 5.0, "gone"), (2, 3.0, None, "silent")]


def test_who_joins_late_or_never_was_away_from_the_beginning() -> None:
    assert absences(joined(0, 0.0), joined(1, 4.0), joined(7, 5.0)) == [
        (1, 0.0, 4.0, NOT_YET),
        (2, 0.0, None, NOT_YET),
        (7, 0.0, 5.0, NOT_YET),
    ]


def test_a_journal_that_tells_of_nobody_joining_says_nothing_of_absences() -> None:
    assert absences(stepped(0, 1.0, fresh=((0, 0),), arrivals=(arrival(0, 0, 1.0),))) == []


def test_everybody_is_away_from_the_checkpoint_until_the_server_is_back() -> None:
    """What was done after the checkpoint is void, leaving and joining included."""
    assert absences(
        *(joined(worker, 0.0) for worker in range(3)),
        left(2, 0.5, "silent"),
        Checkpointed(at_seconds=1.0, version=0),
        left(0, 2.0, "void"),
        joined(2, 2.0),
        Resumed(at_seconds=6.0, version=0, reason="restarted"),
        joined(0, 7.0),
        joined(2, 8.0),
    ) == [(2, 0.5, 8.0, "silent"), (0, 1.0, 7.0, "restarted"), (1, 1.0, None, "restarted")]


def test_who_delivers_is_there_although_the_record_of_its_coming_is_lost() -> None:
    work = Arrived(arrivals=(arrival(1, 3, 6.0, work_seconds=1.0), arrival(2, 3, 6.0)), dropped=())
    assert absences(joined(0, 0.0), joined(1, 0.0), left(1, 2.0), work) == [(1, 2.0, 5.0, "gone")]


EVENTS = st.tuples(st.sampled_from(["join", "leave", "resume"]), st.integers(0, 4), st.floats(0, 9))


@settings(deadline=None, max_examples=100, derandomize=True)
@given(events=st.lists(EVENTS, max_size=20))
def test_absences_of_a_worker_never_overlap_where_time_goes_on(events: list[tuple[str, int, float]]) -> None:
    times = sorted(at for _, _, at in events)
    records: list[JournalRecord] = []
    for (what, worker, _), at in zip(events, times, strict=True):
        records.append(
            joined(worker, at)
            if what == "join"
            else left(worker, at)
            if what == "leave"
            else Resumed(at_seconds=at, version=0, reason="restarted")
        )
    trace = trace_of(journal_of(*records))
    for worker in range(5):
        own = [absence for absence in trace.absences if absence.worker == worker]
        assert all(absence.to_seconds is None or absence.from_seconds <= absence.to_seconds for absence in own)
        for before, after in pairwise(own):
            assert before.to_seconds is not None
            assert before.to_seconds <= after.from_seconds


def test_a_cluster_too_large_to_count_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT_ABSENCES", 5)
    assert len(trace_of(journal_of(joined(0, 0.0), workers=2**40)).absences) == 5


def test_goodbyes_and_the_last_checkpoint_are_no_part_of_the_time() -> None:
    ending = (
        left(0, 2.5, "all rounds are done"),
        Checkpointed(at_seconds=3.0, version=1),
        RunEnded(at_seconds=2.1, reason="all rounds are done", rounds_done=1, diverged=False),
    )
    trace = trace_of(journal_of(joined(0, 0.0), stepped(0, 2.0), *ending))
    assert trace.seconds == 2.1
    assert trace.ended == "all rounds are done"
    assert trace_of(journal_of(joined(0, 0.0), stepped(0, 2.0), *ending[:2])).ended == ""


@settings(deadline=None, max_examples=60, derandomize=True)
@given(came=st.lists(arrivals(), max_size=8), opened=st.floats(0, 100), closed=st.floats(0, 100))
def test_no_time_is_negative_or_reversed_and_no_gradient_is_lost(
    came: list[Arrival], opened: float, closed: float
) -> None:
    trace = trace_of(journal_of(stepped(0, closed, opened_seconds=opened, arrivals=tuple(came))))
    assert trace.rounds[0].seconds >= 0
    assert len(trace.works) == len(came) == summarise(trace).dropped
    for work in trace.works:
        assert work.arrived_seconds is not None
        assert 0 <= work.started_seconds <= work.finished_seconds <= work.arrived_seconds <= trace.seconds


def test_works_are_cut_but_counts_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT_WORKS", 5)
    kept, cluster = simulated("full")
    trace = trace_of(kept)
    assert len(trace.works) == 5
    assert trace.used == cluster.record.used == 90


def test_a_loss_that_is_not_finite_is_divergence() -> None:
    trace = trace_of(journal_of(evaluated(0, 0.0, 2.3), evaluated(1, 1.0, None)))
    assert trace.diverged
    assert math.isnan(trace.evaluations[1].loss)
    assert summarise(trace).loss is None
    ended = trace_of(journal_of(RunEnded(at_seconds=1.0, reason="", rounds_done=0, diverged=True)))
    assert ended.diverged


# -- reports ------------------------------------------------------------------------------------------------------


def with_evaluations(kept: Journal) -> Journal:
    """A loss that falls under the recipe's target of 0.5."""
    closed = [record.at_seconds for record in kept.records[1:]]  # type: ignore[union-attr]
    points = [evaluated(number, closed[number], 2.0 * 0.9**number) for number in range(0, len(closed), 5)]
    return replace(kept, records=(*kept.records, *points))


def test_a_real_run_is_summarised_and_drawn_like_any_other(tmp_path: Path) -> None:
    traces = [trace_of(with_evaluations(simulated(name)[0])) for name in STRATEGIES]
    for trace in traces:
        row = summarise(trace)
        assert row.seconds_to_target is not None
        assert row.used == trace.used
    page = write_report(traces, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<li>wall-clock seconds since the first round began</li>" in page
    assert "<li>late work" not in page
    for chart in ("loss-time", "loss-rounds", "accuracy-time", "time-split", "timeline", "arrivals"):
        assert f'id="chart-{chart}"' in page


ODD: dict[str, Trace] = {
    "nothing happened": trace_of(journal_of()),
    "diverged": trace_of(journal_of(stepped(0, 1.0), evaluated(0, 0.0, 2.0), evaluated(1, 1.0, None))),
    "nothing was measured": trace_of(
        journal_of(stepped(0, 1.0, fresh=((0, 0),), arrivals=(arrival(work_seconds=None, transfer_seconds=0.0),)))
    ),
    "a worker beyond the count": trace_of(journal_of(stepped(0, 1.0, fresh=((9, 0),), arrivals=(arrival(9),)))),
}


@pytest.mark.parametrize("trace", ODD.values(), ids=ODD.keys())
def test_odd_runs_have_a_page_too(trace: Trace, tmp_path: Path) -> None:
    summarise(trace)
    assert write_report([trace], tmp_path / "report.html").stat().st_size > 1000


# -- delays -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    came=st.lists(
        st.builds(
            arrival,
            st.integers(0, 4),
            st.integers(0, 12),
            st.just(1.0),
            work_seconds=st.none() | st.floats(0, 50),
            blocks_done=st.integers(1, 4),
        ),
        max_size=20,
    )
)
def test_delays_are_what_was_measured_and_medians_elsewhere(came: list[Arrival]) -> None:
    measured = {
        (a.worker, a.draw): max(a.work_seconds * 4 / a.blocks_done, 1e-6) for a in came if a.work_seconds is not None
    }
    kept = journal_of(Arrived(arrivals=tuple(came), dropped=()))
    if not measured:
        with pytest.raises(JournalError, match="no measured work"):
            recorded_delays(kept)
        return
    rows = Recorded(rows=recorded_delays(kept)).rows
    assert len(rows) == 1 + max(draw for _, draw in measured)
    assert len(rows[0]) == max(3, 1 + max(worker for worker, _ in measured))
    for draw, row in enumerate(rows):
        for worker, seconds in enumerate(row):
            own = [value for (who, _), value in measured.items() if who == worker]
            assert seconds == measured.get((worker, draw), median(own or measured.values()))


def test_delays_too_many_to_hold_are_refused() -> None:
    """One damaged number must not ask for all of the memory."""
    with pytest.raises(JournalError, match="too many to replay"):
        recorded_delays(journal_of(Arrived(arrivals=(arrival(0, 10**15),), dropped=())))


def test_rounds_of_a_simulation_follow_each_other() -> None:
    trace = trace_of(simulated("lgc")[0])
    assert all(before.closed_seconds <= after.closed_seconds for before, after in pairwise(trace.rounds))
    assert Counter(work.outcome for work in trace.works)["late"] > 0


@pytest.mark.parametrize(("on", "label"), [("server", "lgc+speed"), ("ranks", "lgc+speed@ranks")])
def test_a_journal_of_shares_by_speed_tells_what_they_came_to_as_the_simulator_does(on: Any, label: str) -> None:
    shares = SharesBySpeed(batch_size=8, least=4, multiple=4)
    setup = Setup(
        name=label,
        strategy=LGC(k=2, shares=shares),
        workers=3,
        rounds=40,
        blocks=4,
        delays=Recorded(rows=((1.0, 1.1, 3.0),)),
        on=on,
    )
    cluster, records, seen = Recording(setup), [], 0
    for closed in cluster.run(40):
        records.append(
            stepped(
                closed.step.version,
                closed.step.at_seconds,
                opened_seconds=closed.opened_seconds,
                fresh=tuple((share.worker, share.version) for share in closed.step.fresh),
                late=tuple((share.worker, share.version) for share in closed.step.late),
                arrivals=tuple(cluster.arrivals[seen:]),
            )
        )
        seen = len(cluster.arrivals)
    recipe = {"worker": {"shares": "speed", "batch_size": 8}}
    trace = trace_of(journal_of(*records, strategy="lgc@ranks" if on == "ranks" else "lgc", recipe=recipe))
    assert trace.strategy == label
    ours, theirs = trace.shares, cluster.record.shares.summary()  # type: ignore[union-attr]
    assert ours is not None
    assert [(each.worker, each.samples) for each in ours.workers] == [
        (each.worker, each.samples) for each in theirs.workers
    ]
    assert (ours.changes, ours.since) == (theirs.changes, theirs.since)
    assert ours.round_seconds == pytest.approx(theirs.round_seconds, rel=1e-6)
    assert ours.equal_seconds == pytest.approx(theirs.equal_seconds, rel=1e-6)
    assert trace_of(journal_of(*records)).shares is None, "a journal of before says nothing of shares"
