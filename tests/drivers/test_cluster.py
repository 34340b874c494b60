"""Simulated clusters: time, outcomes, and who does what when."""

from __future__ import annotations

import itertools
import sys
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.drivers.simulated.cluster import Cluster, MeasuredCosts, NoTraining, Setup
from paceline.drivers.simulated.delays import Pareto, Recorded, Sequences, ShiftedExponential, SlowWorkers
from paceline.drivers.simulated.network import Network, OneWayLink, WorkerLink
from paceline.drivers.simulated.timing import AsyncTimes, RoundTimes
from paceline.strategies import LGC, STRATEGIES, Async, FastestK, Full
from tests.oracles import strategies as reference

FIGURE_1 = ((1.0, 1.2, 2.0), (1.1, 1.5, 2.0), (1.0, 1.3, 2.5))
FREE, SLOW = Network(), Network(latency_seconds=0.01, worker_bits_per_second=1e6, server_bits_per_second=3e6)
quick = settings(deadline=None, max_examples=25, derandomize=True)


def run(strategy, steps, **cluster):
    """The steps taken, and the cluster afterwards."""
    made = make(strategy, **cluster)
    return list(made.run(steps)), made


def make(strategy, *, up_bytes=0, down_bytes=0, **setup):
    trainer = NoTraining(up=up_bytes, down=down_bytes)
    return Cluster(Setup(name="x", strategy=strategy, rounds=1, **setup), trainer=trainer)


@pytest.mark.parametrize(("strategy", "total"), [(Full(), 6.5), (FastestK(k=2), 4.0), (LGC(k=2), 4.0)], ids=str)
def test_the_papers_figure_1(strategy, total):
    steps, cluster = run(strategy, 3, workers=3, delays=Recorded(rows=FIGURE_1), late_work="complete")
    assert cluster.now_seconds == pytest.approx(total, rel=0, abs=1e-12)
    expected = reference.complete_rounds(FIGURE_1, k=3 if strategy == Full() else 2)
    assert [s.step.at_seconds - s.opened_seconds for s in steps] == pytest.approx(expected, rel=0, abs=1e-12)


@quick
@given(workers=st.integers(1, 7), k=st.integers(1, 7), seed=st.integers(0, 10**6))
def test_with_complete_late_work_a_round_takes_its_kth_time_and_has_all_the_others_late(workers, k, seed):
    k, rounds = min(k, workers), 12
    delays = ShiftedExponential(seed=seed)
    steps, cluster = run(LGC(k=k), rounds, workers=workers, delays=delays, late_work="complete")
    times = delays.seconds(np.arange(workers)[None, :], np.arange(rounds)[:, None]).tolist()
    expected = np.cumsum(reference.complete_rounds(times, k=k)).tolist()
    assert [s.step.at_seconds for s in steps] == pytest.approx(expected, abs=1e-9)
    assert [len(s.late) for s in steps] == [0] + [workers - k] * (rounds - 1)
    assert cluster.record.used == k * rounds


@quick
@given(
    workers=st.integers(1, 6),
    k=st.integers(1, 6),
    blocks=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    pareto=st.booleans(),
)
def test_with_partial_late_work_the_cluster_does_what_the_reference_says(workers, k, blocks, seed, pareto):
    k, rounds = min(k, workers), 15
    delays = Pareto(shape=1.2, seed=seed) if pareto else ShiftedExponential(seed=seed)
    steps, _ = run(LGC(k=k), rounds, workers=workers, delays=delays, blocks=blocks)
    times = delays.seconds(np.arange(workers)[None, :], np.arange(rounds + 1)[:, None]).tolist()
    expected = reference.partial_rounds(times, k=k, blocks=blocks, rounds=rounds)
    for found, plain in zip(steps, expected, strict=True):
        assert found.step.at_seconds == pytest.approx(plain.closed_seconds, abs=1e-9)
        assert {task.worker for task in found.fresh} == plain.fresh
        assert {task.worker: task.blocks_done for task in found.late} == plain.late_blocks_done


STRATEGIES_TO_DRIVE = [Full(), FastestK(k=1), FastestK(k=3), LGC(k=1), LGC(k=3), LGC(k=3, warmup_rounds=2), Async()]
CLUSTERS = [
    {"delays": ShiftedExponential(seed=1), "network": FREE, "blocks": 4},
    {"delays": SlowWorkers(base=Pareto(seed=2), slow=2), "network": FREE, "blocks": 1},
    {"delays": ShiftedExponential(seed=3), "network": SLOW, "blocks": 4, "up_bytes": 2000, "down_bytes": 2000},
    {"delays": ShiftedExponential(seed=4), "network": SLOW, "blocks": 4, "up_bytes": 90_000, "down_bytes": 90_000},
    {"delays": Recorded(rows=((0.1, 0.1, 0.3, 0.3, 0.7),)), "network": FREE, "blocks": 7},
    # Downloads slower than rounds: the model moves on while an older one is on the wire.
    {"delays": ShiftedExponential(seed=5), "network": SLOW, "blocks": 4, "up_bytes": 500, "down_bytes": 90_000},
]


def test_every_listed_strategy_is_driven():
    assert {type(strategy) for strategy in STRATEGIES_TO_DRIVE} == set(STRATEGIES.values())


@pytest.fixture(
    params=[
        (strategy, cluster, late_work)
        for strategy in STRATEGIES_TO_DRIVE
        for cluster in CLUSTERS
        for late_work in ("partial", "complete")
    ],
    ids=lambda case: f"{case[0]}-{CLUSTERS.index(case[1])}-{case[2]}",
    scope="module",
)
def finished(request):
    """A run of 40 steps of five workers on one of the clusters: its steps and its cluster."""
    strategy, cluster, late_work = request.param
    steps, made = run(strategy, 40, workers=5, late_work=late_work, **cluster)
    return steps, made, cluster, late_work


def test_it_takes_all_the_steps_it_was_asked_for(finished):
    steps, *_ = finished  # with downloads slower than rounds too: nothing waits for ever
    assert [closed.step.version for closed in steps] == list(range(40))


def test_every_task_begun_has_exactly_one_outcome(finished):
    _, cluster, _, _ = finished
    record = cluster.record
    begun = sum(state.draws for state in cluster._workers)
    assert record.used + record.late + sum(record.dropped_reasons.values()) == begun == len(record.works)
    assert Counter(work.outcome for work in record.works) == Counter(
        used=record.used, late=record.late, dropped=sum(record.dropped_reasons.values())
    )
    assert all(work.reason for work in record.works if work.outcome == "dropped")
    assert len({(work.worker, work.version) for work in record.works}) == begun


def test_time_never_goes_back_and_a_round_opens_when_the_last_one_closed(finished):
    steps, cluster, _, _ = finished
    closed = [step.step.at_seconds for step in steps]
    assert closed == sorted(closed)
    assert [step.opened_seconds for step in steps] == [0.0, *closed[:-1]]
    assert cluster.now_seconds == closed[-1]


def test_no_worker_does_two_things_at_once(finished):
    _, cluster, _, _ = finished
    by_worker = defaultdict(list)
    for work in cluster.record.works:
        assert work.started_seconds <= work.finished_seconds
        by_worker[work.worker].append((work.started_seconds, work.finished_seconds))
    for intervals in by_worker.values():
        intervals.sort()
        for (_, end), (start, _) in itertools.pairwise(intervals):
            assert end <= start


def test_late_work_is_exactly_one_version_old_and_fresh_work_is_of_the_round(finished):
    steps, _, _, _ = finished
    for closed in steps:
        assert all(task.version == closed.step.version - 1 for task in closed.late)
        if len(closed.fresh) > 1:
            assert all(task.version == closed.step.version for task in closed.fresh)
        for shares, tasks in ((closed.step.fresh, closed.fresh), (closed.step.late, closed.late)):
            assert [(s.worker, s.version) for s in shares] == [(t.worker, t.version) for t in tasks]


def test_nothing_arrives_before_it_is_finished_or_counts_before_it_arrives(finished):
    steps, _, _, _ = finished
    for closed in steps:
        for task in (*closed.fresh, *closed.late):
            assert task.finished_seconds <= task.arrived_seconds <= closed.step.at_seconds
        assert all(task.blocks_done == task.blocks for task in closed.fresh)


def test_the_blocks_done_fit_the_time_worked(finished):
    _, cluster, _, late_work = finished
    for work in cluster.record.works:
        if late_work == "complete" or work.arrived_seconds is None:
            continue
        delays = finished[2]["delays"]
        own = [w for w in cluster.record.works if w.worker == work.worker and w.started_seconds < work.started_seconds]
        seconds = delays.seconds(np.asarray(work.worker), np.asarray(len(own))).item()
        assert work.compute_seconds == pytest.approx(seconds * work.blocks_done / work.blocks, abs=1e-9)


def test_a_worker_is_never_kept_from_a_round_by_the_block_before(finished):
    """Who stopped early begins again the moment it stops."""
    _, cluster, _, late_work = finished
    if late_work == "complete":
        return
    started = {(work.worker, work.started_seconds) for work in cluster.record.works}
    for work in cluster.record.works:
        if work.blocks_done < work.blocks and work.finished_seconds < cluster.now_seconds:
            assert (work.worker, work.finished_seconds) in started


def test_bytes_are_counted_for_every_message(finished):
    _, cluster, settings, _ = finished
    up_bytes, down_bytes = settings.get("up_bytes", 0), settings.get("down_bytes", 0)
    arrived = sum(work.arrived_seconds is not None for work in cluster.record.works)
    begun = sum(state.draws for state in cluster._workers)
    assert cluster.record.received_bytes in [count * up_bytes for count in range(arrived, begun + 1)]
    assert cluster.record.sent_bytes in [count * down_bytes for count in range(begun, begun + 5 * 41)]


@pytest.mark.parametrize("strategy", [FastestK(k=1), LGC(k=1), LGC(k=3)], ids=str)
def test_a_worker_that_begins_with_an_old_model_has_the_newest_on_its_way(strategy):
    cluster = make(strategy, workers=5, **CLUSTERS[-1])
    begin, behind = cluster._begin, []

    def watched(worker):
        state = cluster._workers[worker]
        if state.held_version < state.sent_version:
            behind.append(worker)
            assert state.version_on_the_wire is not None
        begin(worker)

    cluster._begin = watched
    for _ in cluster.run(40):
        pass
    assert behind, "the cluster of this test must be slow enough for it to happen"


@pytest.mark.parametrize("late_work", ["partial", "complete"])
@pytest.mark.parametrize("strategy", STRATEGIES_TO_DRIVE, ids=str)
def test_the_oldest_version_is_that_of_all_tasks_and_of_what_workers_hold_or_are_about_to(strategy, late_work):
    cluster, told = make(strategy, workers=5, late_work=late_work, **CLUSTERS[-1]), []

    def take(taken, oldest_version):
        found = {version for _, version in cluster._tasks}
        for state in cluster._workers:
            found.update({state.held_version, state.version_on_the_wire} - {-1, None})
        told.append(oldest_version)
        assert oldest_version == min(found)

    cluster._trainer = SimpleNamespace(
        take=take, up_bytes=lambda task: 8, down_bytes=lambda *versions: 8, round_traffic=cluster._trainer.round_traffic
    )
    assert len(list(cluster.run(60))) == len(told) == 60
    assert max(told) > 0


def test_a_step_of_async_does_as_much_with_many_workers_as_with_few():
    """In lines of Python that are carried out: nothing in it goes through all workers, or all tasks."""
    assert lines_of_steps(workers=160) < 1.1 * lines_of_steps(workers=10)


def lines_of_steps(workers):
    lines, running = 0, make(Async(), workers=workers, delays=ShiftedExponential()).run(1000)

    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return trace

    for _ in range(800):
        next(running)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(100):
            next(running)
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("late_work", ["partial", "complete"])
@pytest.mark.parametrize("strategy", [Full(), FastestK(k=1), LGC(k=1), Async()], ids=str)
def test_one_worker_alone_works_without_a_pause(strategy, late_work):
    steps, _ = run(strategy, 5, workers=1, delays=Recorded(rows=((0.5,),)), late_work=late_work, blocks=2)
    assert [closed.step.at_seconds for closed in steps] == [0.5, 1.0, 1.5, 2.0, 2.5]
    assert all(len(closed.fresh) == 1 and not closed.late for closed in steps)


def test_k_of_everybody_takes_as_long_as_full_and_k_of_one_as_the_fastest():
    delays = ShiftedExponential(seed=8)
    times = {
        str(strategy): [s.step.at_seconds for s in run(strategy, 10, workers=4, delays=delays, blocks=4)[0]]
        for strategy in (Full(), LGC(k=4), FastestK(k=4), LGC(k=1), FastestK(k=1))
    }
    full, lgc_4, fastest_4, lgc_1, fastest_1 = times.values()
    assert full == lgc_4 == fastest_4
    assert lgc_1 == fastest_1
    assert lgc_1[0] == delays.seconds(np.arange(4), np.asarray(0)).min()


def test_the_same_cluster_runs_the_same_way_twice():
    made = [run(LGC(k=3), 30, workers=5, delays=Pareto(seed=1), network=SLOW, blocks=4, up_bytes=500) for _ in "ab"]
    assert [s.step for s in made[0][0]] == [s.step for s in made[1][0]]
    assert made[0][1].record.works == made[1][1].record.works


@quick
@given(
    times=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    blocks=st.integers(2, 10),
    k=st.integers(1, 3),
)
@example(times=[24, 20, 33], blocks=6, k=1)
def test_time_does_not_go_back_by_rounding_when_block_boundaries_and_rounds_coincide(times, blocks, k):
    row = tuple(time / 10 for time in times)  # tenths are not exact in binary, so boundaries just miss each other
    cluster = make(LGC(k=k), workers=len(row), delays=Recorded(rows=(row,)), blocks=blocks)
    before, happened = 0.0, []
    schedule = cluster._schedule

    def watched(seconds, happen):
        happened.append(seconds - cluster.now_seconds)
        schedule(seconds, happen)

    cluster._schedule = watched
    for closed in cluster.run(60):
        assert closed.step.at_seconds >= before
        before = closed.step.at_seconds
    assert min(happened) >= 0.0


def test_a_run_needs_steps():
    with pytest.raises(ValueError, match="steps=0"):
        list(make(Full(), workers=1, delays=ShiftedExponential()).run(0))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"workers": 0}, "workers=0"),
        ({"workers": 2, "blocks": 0}, "blocks=0"),
        ({"workers": 3, "delays": Recorded(rows=((1.0, 2.0),))}, "3"),
    ],
    ids=str,
)
def test_a_cluster_that_cannot_run_is_refused_at_construction(bad, message):
    with pytest.raises(ValueError, match=message):
        make(Full(), **({"delays": ShiftedExponential()} | bad))


# -- measured costs ----------------------------------------------------------------------------------------------------


def costed(costs, strategy=None, rounds=3, delays=((1.0,), (2.0,)), **more):
    setup = Setup(
        name="x", strategy=strategy or Full(), workers=len(delays), rounds=rounds, delays=Sequences(columns=delays),
        costs=costs, **more,
    )  # fmt: skip
    cluster = Cluster(setup)
    return [taken.step.at_seconds for taken in cluster.run(rounds * setup.strategy.updates_per_round(len(delays)))]


def test_a_busy_server_sends_the_next_model_later_and_lets_gradients_wait() -> None:
    assert costed(MeasuredCosts(server_seconds=(0.5, 0.25))) == [2.0, 4.5, 6.75]  # not after the last step
    found = costed(MeasuredCosts(server_seconds=(0.5,)), Async(), rounds=2, delays=((1.0,), (1.25,)))
    assert found == [1.0, 1.5, 2.5, 3.25]  # the gradient of 1.25 waits until 1.5


def test_what_a_worker_does_besides_computing_and_its_own_link_are_added_to_its_batches_alone() -> None:
    links = (WorkerLink(), WorkerLink(down=OneWayLink(latency_seconds=0.5), up=OneWayLink(latency_seconds=0.25)))
    beside = Sequences(columns=((4.0,), (0.125,)))
    first, second = 1.0 + 4.0, 2.0 + 0.125 + 0.75
    assert costed(MeasuredCosts(worker_seconds=beside, links=links)) == [max(first, second) * n for n in (1, 2, 3)]
    assert costed(MeasuredCosts(links=links)) == [2.75, 5.5, 8.25]
    assert costed(MeasuredCosts(server_seconds=(0.5,), worker_seconds=beside), on="ranks") == [5.0, 10.5, 16.0]


def test_measured_costs_are_played_by_events_alone_and_need_a_link_for_each_worker() -> None:
    common = {"name": "x", "workers": 2, "rounds": 2, "delays": Sequences(columns=((1.0,), (2.0,)))}
    costs = MeasuredCosts(server_seconds=(0.5,))
    for times, strategy in ((RoundTimes, Full()), (AsyncTimes, Async())):
        with pytest.raises(ValueError, match="event by event"):
            times(Setup(strategy=strategy, costs=costs, **common))
    with pytest.raises(ValueError, match=r"every worker needs a link \(workers=2, links=1\)"):
        Setup(strategy=Full(), costs=MeasuredCosts(links=(WorkerLink(),)), **common)
