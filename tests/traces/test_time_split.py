"""Where the time of a run went: laws over simulated races, and a plain reference."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import Recipe, simulate
from paceline.traces import Round, Trace, Work
from paceline.traces.history import trace_of
from paceline.traces.journal_files import read_journal
from paceline.traces.records import Absence
from paceline.traces.time_split import TimeSplit, time_split

GOLDEN = Path(__file__).parents[1] / "golden"
IN_ROUNDS = ("full", "fastest-k", "lgc", "async")
AVERAGING = ("ssgd", "local-sgd", "hpsgd", "diloco", "psgd")
ON_RANKS = ("full", "lgc")
KINDS = [*((name, "server") for name in (*IN_ROUNDS, *AVERAGING)), *((name, "ranks") for name in ON_RANKS)]


def raced(
    name: str,
    on: str,
    *,
    workers: int = 4,
    rounds: int = 6,
    seed: int = 0,
    latency: float = 0.0,
    late_work: str = "partial",
) -> Trace:
    """A run with one sample a batch, of which the times alone matter."""
    recipe = Recipe(rounds=rounds, seed=seed, evaluate_every=rounds, evaluation_samples=1)
    recipe = recipe.with_strategy(name).with_settings(
        data={"split": "iid"},
        worker={"batch_size": 1, "blocks": 1},
        cluster={"workers": workers, "late_work": late_work},
        network={"latency_seconds": latency},
        delay={"shift_seconds": 0.1, "mean_seconds": 0.1},
    )
    strategy = {"k": max(1, workers - 1)} if name in ("fastest-k", "lgc") else {}
    strategy |= {"on": on} if on == "ranks" else {}
    strategy |= {"period": 2} if name in ("local-sgd", "diloco") else {}
    return simulate(recipe.with_settings(strategy=strategy)).trace


def whole(trace: Trace) -> TimeSplit:
    found = time_split(trace)
    assert found is not None
    assert found.whole
    return found


def swept(trace: Trace) -> tuple[float, float, float]:
    """The split by a sweep over all moments at which anything happens, worker by worker: slow and plain."""
    closed = {each.version: each.closed_seconds for each in trace.rounds}
    totals = [0.0, 0.0, 0.0]
    for worker in range(trace.workers):
        works = [work for work in trace.works if work.worker == worker]
        computing = [(work.started_seconds, work.finished_seconds) for work in works]
        network = [
            (work.finished_seconds if work.sent_seconds is None else work.sent_seconds, work.arrived_seconds)
            for work in works
            if work.arrived_seconds is not None
        ]
        if not trace.averaged:
            network += [(closed.get(work.version - 1, 0.0), work.started_seconds) for work in works]
            if trace.strategy.endswith("@ranks"):
                network.append((max(closed.values()), trace.seconds))
        edges = {0.0, trace.seconds, *(moment for pair in (*computing, *network) for moment in pair)}
        moments = sorted(moment for moment in edges if 0 <= moment <= trace.seconds)
        for begin, end in itertools.pairwise(moments):
            middle = (begin + end) / 2
            kinds = [any(start < middle < stop for start, stop in each) for each in (computing, network)]
            totals[kinds.index(True) if True in kinds else 2] += end - begin
    return totals[0], totals[1], totals[2]


@pytest.mark.parametrize(("name", "on"), KINDS)
@settings(max_examples=6, deadline=None)
@given(
    workers=st.integers(2, 5),
    rounds=st.integers(1, 7),
    seed=st.integers(0, 9),
    latency=st.sampled_from([0.0, 0.003, 0.05, 0.4]),
    late_work=st.sampled_from(["partial", "complete"]),
)
def test_the_three_parts_add_up_to_the_time_of_all_workers(
    name: str, on: str, workers: int, rounds: int, seed: int, latency: float, late_work: str
) -> None:
    trace = raced(name, on, workers=workers, rounds=rounds, seed=seed, latency=latency, late_work=late_work)
    split = whole(trace)
    assert (split.workers, split.seconds) == (workers, trace.seconds)
    parts = (split.compute_seconds, split.network_seconds, split.waiting_seconds)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(workers * trace.seconds)
    assert sum(split.shares) == pytest.approx(1.0)
    assert parts == pytest.approx(swept(trace), abs=1e-9)


@pytest.mark.parametrize(("name", "on"), KINDS)
def test_without_a_latency_the_network_takes_nothing(name: str, on: str) -> None:
    assert whole(raced(name, on)).network_seconds == pytest.approx(0.0, abs=1e-9)


def test_who_waits_for_everybody_waits_and_who_does_not_computes() -> None:
    full, kept, free = (whole(raced(name, "server", rounds=12)) for name in ("full", "lgc", "async"))
    assert full.shares[2] > kept.shares[2] > free.shares[2] == pytest.approx(0.0, abs=1e-9)


def test_an_average_that_runs_beside_training_holds_nobody_up() -> None:
    beside, before = (whole(raced(name, "server", rounds=20, latency=0.05)) for name in ("hpsgd", "ssgd"))
    assert beside.shares[1] < before.shares[1] / 2


def test_both_ways_of_a_message_are_the_network() -> None:
    """One worker that waits for nobody but the wire: a latency there and one back for every round."""
    trace = raced("full", "server", workers=1, rounds=5, latency=0.25)
    split = whole(trace)
    assert split.network_seconds == pytest.approx(5 * 2 * 0.25)
    assert split.waiting_seconds == pytest.approx(0.0, abs=1e-9)


def test_a_model_is_not_on_its_way_to_a_worker_that_is_away() -> None:
    rounds = (Round(version=0, opened_seconds=0.0, closed_seconds=1.0, k=1, used=1, late=0),)
    works = (
        Work(worker=0, version=0, started_seconds=0.0, finished_seconds=1.0, arrived_seconds=1.0),
        Work(worker=0, version=1, started_seconds=5.0, finished_seconds=6.0, arrived_seconds=6.0),
    )
    about = {"strategy": "full", "seed": 0, "workers": 1, "recipe": {}, "rounds_done": 2, "used": 2}
    there = Trace(seconds=6.0, rounds=rounds, works=works, **about)
    assert whole(there).network_seconds == pytest.approx(4.0)
    away = replace(there, absences=(Absence(worker=0, from_seconds=1.5, to_seconds=4.5, reason="gone"),))
    assert whole(away).network_seconds == pytest.approx(0.5)
    assert whole(away).waiting_seconds == pytest.approx(3.5)


@pytest.mark.parametrize("name", ["full", "lgc", "ssgd", "hpsgd"])
def test_of_a_trace_that_is_cut_the_split_is_that_of_its_beginning(name: str) -> None:
    trace = raced(name, "server", rounds=30, latency=0.02)
    kept = len(trace.works) // 2
    split = time_split(replace(trace, works=trace.works[:kept]))
    assert split is not None
    assert not split.whole
    assert trace.seconds / 4 < split.seconds < trace.seconds
    # The same as of a run that was over then, of which all works are known.
    ended = whole(replace(trace, seconds=split.seconds))
    assert split.compute_seconds == pytest.approx(ended.compute_seconds)
    assert split.network_seconds == pytest.approx(ended.network_seconds)


def test_times_alone_say_nothing_of_workers() -> None:
    assert time_split(simulate(Recipe(rounds=3), timing_only=True).trace) is None
    assert time_split(Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=0, seconds=0.0)) is None


@pytest.mark.parametrize("name", ["served", "served-stopped"])
def test_real_runs_of_older_releases_are_split_and_have_no_test_loss(name: str) -> None:
    trace = trace_of(read_journal(GOLDEN / name / "trace.jsonl"))
    split = time_split(trace)
    assert split is not None
    assert split.compute_seconds > 0
    total = split.compute_seconds + split.network_seconds + split.waiting_seconds
    assert total == pytest.approx(split.workers * split.seconds)
    assert {point.test_loss for point in trace.evaluations} == {None}
