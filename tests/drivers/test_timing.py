"""Timing without training is a fast path: it must come to what the event queue comes to."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drivers.simulated.cluster import Setup
from paceline.drivers.simulated.delays import Pareto, Recorded, ShiftedExponential, SlowWorkers
from paceline.drivers.simulated.network import Network
from paceline.drivers.simulated.simulation import Simulation
from paceline.drivers.simulated.timing import AsyncTimes, RoundTimes
from paceline.strategies import LGC, Async, FastestK, Full
from paceline.traces import Trace
from paceline.traffic import all_reduce_traffic

STRATEGY = st.sampled_from(
    [Full(), FastestK(k=3), FastestK(k="auto"), LGC(k=1), LGC(k=3, warmup_rounds=2), LGC(k="auto"), LGC(k=3)]
)
LATENCY = st.sampled_from([0.0, 0.004, 0.05])
LATE_WORK = st.sampled_from(["partial", "complete"])


@st.composite
def delays(draw):
    seed, persistence = draw(st.integers(0, 1000)), draw(st.sampled_from([1, 4, 50]))
    base = ShiftedExponential(seed=seed, persistence=persistence)
    return draw(st.sampled_from([base, Pareto(seed=seed, persistence=persistence), SlowWorkers(base=base)]))


def ran(run) -> Trace:
    for _ in run:
        pass
    return run.trace


def setup_of(strategy, latency=0.0, bandwidth=math.inf, **common) -> Setup:
    network = Network(latency_seconds=latency, worker_bits_per_second=bandwidth)
    return Setup(name="x", strategy=strategy, network=network, **common)


def check_same_rounds(found: Trace, expected: Trace) -> None:
    assert [entry.k for entry in found.rounds] == [entry.k for entry in expected.rounds]
    closings = [entry.closed_seconds for entry in expected.rounds]
    assert [entry.closed_seconds for entry in found.rounds] == pytest.approx(closings, abs=1e-9)
    assert found.seconds == pytest.approx(expected.seconds, abs=1e-9)
    assert (found.used, found.late, found.sent_bytes) == (expected.used, expected.late, expected.sent_bytes)
    assert found.dropped == expected.dropped


@settings(max_examples=60)
@given(strategy=STRATEGY, delay=delays(), latency=LATENCY, late_work=LATE_WORK, workers=st.integers(3, 8))
def test_rounds_of_arrays_are_the_rounds_of_events(strategy, delay, latency, late_work, workers) -> None:
    common = {"workers": workers, "rounds": 30, "delays": delay, "late_work": late_work, "blocks": 4}
    setup = setup_of(strategy, latency, **common)
    check_same_rounds(ran(RoundTimes(setup)), ran(Simulation(setup)))


@settings(max_examples=60)
@given(
    strategy=STRATEGY,
    delay=delays(),
    latency=LATENCY,
    bandwidth=st.sampled_from([math.inf, 1e6, 1e5]),
    late_work=LATE_WORK,
    workers=st.integers(3, 8),
)
def test_rounds_of_arrays_on_ranks_are_those_of_events(strategy, delay, latency, bandwidth, late_work, workers) -> None:
    common = {"workers": workers, "rounds": 30, "delays": delay, "late_work": late_work, "blocks": 4}
    setup = setup_of(strategy, latency, bandwidth, on="ranks", **common)
    ring = all_reduce_traffic(1000, workers)
    check_same_rounds(ran(RoundTimes(setup, round_traffic=ring)), ran(Simulation(setup, round_traffic=ring)))


@settings(max_examples=30)
@given(delay=delays(), latency=LATENCY, workers=st.integers(1, 8))
def test_asynchronous_times_are_those_of_events(delay, latency, workers) -> None:
    setup = setup_of(Async(), latency, workers=workers, rounds=20, delays=delay)
    expected, found = ran(Simulation(setup)), ran(AsyncTimes(setup))
    assert found.seconds == pytest.approx(expected.seconds, abs=1e-9)
    assert (found.used, found.dropped) == (expected.used, expected.dropped)


@pytest.mark.parametrize(("strategy", "seconds"), [(Full(), 6.5), (FastestK(k=2), 4.0), (LGC(k=2), 4.0)])
def test_the_paper_s_first_figure(strategy, seconds) -> None:
    rows = ((1.0, 1.2, 2.0), (1.1, 1.5, 2.0), (1.0, 1.3, 2.5))
    setup = setup_of(strategy, workers=3, rounds=3, delays=Recorded(rows=rows), late_work="complete")
    trace = ran(RoundTimes(setup))
    assert trace.seconds == pytest.approx(seconds, abs=1e-12)


def test_a_hundred_thousand_workers_are_a_matter_of_seconds() -> None:
    """No time is asserted: event by event this would take hours, and the test would not end."""
    setup = setup_of(LGC(k=70_000), workers=100_000, rounds=20, delays=ShiftedExponential(), blocks=4)
    trace = ran(RoundTimes(setup))
    assert trace.rounds_done == 20
    assert trace.used == 20 * 70_000


def test_a_strategy_without_rounds_is_sent_elsewhere() -> None:
    with pytest.raises(ValueError, match="AsyncTimes"):
        RoundTimes(setup_of(Async(), workers=2, rounds=2, delays=ShiftedExponential()))


@settings(max_examples=60)
@given(
    # auto asks who of those was in the round before too, and of two that also began together the arrays take another
    strategy=STRATEGY.filter(lambda each: getattr(each, "k", 0) != "auto"),
    rows=st.lists(st.lists(st.integers(1, 3), min_size=5, max_size=5), min_size=1, max_size=4),
    late_work=LATE_WORK,
    on=st.sampled_from(["server", "ranks"]),
)
def test_workers_that_arrive_in_the_same_moment_are_counted_as_by_events(strategy, rows, late_work, on) -> None:
    recorded = Recorded(rows=tuple(tuple(map(float, row)) for row in rows))
    setup = setup_of(strategy, workers=5, rounds=12, delays=recorded, late_work=late_work, blocks=1, on=on)
    expected, found = ran(Simulation(setup)), ran(RoundTimes(setup))
    assert found.seconds == pytest.approx(expected.seconds)
    assert (found.used, found.late) == (expected.used, expected.late)
