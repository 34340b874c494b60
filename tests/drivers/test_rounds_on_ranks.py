"""Rounds that ranks add up themselves: the decisions are a server's, the times are those of one ring a round."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drivers.simulated.averaging_cluster import AveragingSetup
from paceline.drivers.simulated.averaging_simulation import AveragedSimulation
from paceline.drivers.simulated.cluster import Cluster, NoTraining, Setup
from paceline.drivers.simulated.delays import Pareto, Recorded, ShiftedExponential
from paceline.drivers.simulated.network import Network, ring_seconds
from paceline.drivers.simulated.timing import RoundTimes
from paceline.strategies import LGC, Async, FastestK, Full
from paceline.strategies.averaging import make_averaging
from paceline.traffic import all_reduce_traffic

ROUNDS = 15
VECTOR_BYTES = 3000
LATE_WORK = st.sampled_from(["partial", "complete"])
NETWORK = Network(latency_seconds=0.004, worker_bits_per_second=1e6, server_bits_per_second=10.0)
quick = settings(deadline=None, max_examples=25, derandomize=True)


def setup_of(strategy=None, *, on="ranks", **more):
    common = {"workers": 5, "rounds": ROUNDS, "delays": ShiftedExponential(seed=3), "blocks": 4}
    return Setup(name="x", strategy=strategy or LGC(k=3), on=on, **{**common, **more})


def run(setup):
    ring = all_reduce_traffic(VECTOR_BYTES, setup.workers)
    cluster = Cluster(setup, trainer=NoTraining(up=VECTOR_BYTES, down=VECTOR_BYTES, round_traffic=ring))
    return list(cluster.run(setup.rounds)), cluster


def decisions(steps):
    """Who was fresh and who late in every step, with how many blocks."""
    return [[[(task.worker, task.blocks_done) for task in part] for part in (step.fresh, step.late)] for step in steps]


def closings(steps):
    return [taken.step.at_seconds for taken in steps]


@quick
@given(
    strategy=st.sampled_from([Full(), FastestK(k=2), LGC(k=1), LGC(k=3, warmup_rounds=2), LGC(k="auto")]),
    delays=st.builds(Pareto, seed=st.integers(0, 1000)) | st.builds(ShiftedExponential, seed=st.integers(0, 1000)),
    late_work=LATE_WORK,
)
def test_where_messages_cost_nothing_ranks_do_what_a_server_does(strategy, delays, late_work):
    ranks = setup_of(strategy, delays=delays, late_work=late_work)
    (found, on_ranks), (expected, served) = run(ranks), run(replace(ranks, on="server"))
    assert closings(found) == closings(expected)
    assert decisions(found) == decisions(expected)
    assert on_ranks.record.dropped_reasons == served.record.dropped_reasons


@quick
@given(seed=st.integers(0, 1000), late_work=LATE_WORK, workers=st.integers(1, 6))
def test_with_k_of_all_ranks_lgc_is_full(seed, late_work, workers):
    more = {"workers": workers, "delays": Pareto(seed=seed), "network": NETWORK, "late_work": late_work}
    (found, _), (expected, _) = run(setup_of(LGC(k=workers), **more)), run(setup_of(Full(), **more))
    assert closings(found) == closings(expected)
    assert decisions(found) == decisions(expected)


@pytest.mark.parametrize("strategy", [Full(), FastestK(k=2), LGC(k=3)], ids=str)
def test_every_round_after_the_first_costs_a_ring_and_two_latencies_more(strategy):
    free = setup_of(strategy, late_work="complete")
    (without, _), (found, cluster) = run(free), run(replace(free, network=NETWORK))
    latency = NETWORK.latency_seconds
    ring = ring_seconds(NETWORK, workers=5, message_bytes=VECTOR_BYTES)
    assert ring > 8 * latency  # bandwidth counts
    expected = [at + latency + number * (2 * latency + ring) for number, at in enumerate(closings(without))]
    assert closings(found) == pytest.approx(expected)
    assert decisions(found) == decisions(without)
    assert cluster.updated_seconds == pytest.approx(expected[-1] + latency + ring)


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_full_on_ranks_is_ddp_and_two_latencies_a_round(workers):
    full = setup_of(Full(), workers=workers, network=NETWORK)
    times = RoundTimes(full, round_traffic=all_reduce_traffic(VECTOR_BYTES, workers))
    common = {"workers": workers, "rounds": ROUNDS, "delays": full.delays, "network": NETWORK}
    ddp = AveragedSimulation(AveragingSetup(member=make_averaging("ssgd"), **common), message_bytes=VECTOR_BYTES)
    for each in (times, ddp):
        for _ in each:
            pass
    updated = ddp.trace.rounds[-1].closed_seconds  # after it ssgd has one more ring, in which all agree to end
    assert times.trace.seconds == pytest.approx(updated + ROUNDS * 2 * NETWORK.latency_seconds)


def test_a_late_rank_works_on_until_the_update_is_there_and_nobody_waits_for_it():
    # Round 0 closes at 1 + 0.5; word of it takes 0.5, the ring 2 x (0.5 + 1): the update is there at 5.
    network = Network(latency_seconds=0.5, worker_bits_per_second=8.0)
    delays = Recorded(rows=((1.0, 22.0),))
    setup = setup_of(LGC(k=1), workers=2, rounds=3, delays=delays, network=network, blocks=8)
    cluster = Cluster(setup, trainer=NoTraining(round_traffic=all_reduce_traffic(2, workers=2)))
    steps = list(cluster.run(3))
    assert closings(steps) == [1.5, 6.5, 11.5]
    # The other rank has blocks of 2.75 seconds: it stops at 5.5, says so at 6, and begins on version 1.
    late = [(task.worker, task.version, task.blocks_done) for task in steps[1].late]
    assert late == [(1, 0, 2)]
    started = {work.version: work.started_seconds for work in cluster.record.works if work.worker == 1}
    assert [started[0], started[1]] == [0.0, 5.5]
    assert cluster.updated_seconds == 15.0


@pytest.mark.parametrize("late_work", ["partial", "complete"])
def test_bytes_are_those_of_all_ranks_in_the_ring_whoever_is_late(late_work):
    _, cluster = run(setup_of(network=NETWORK, late_work=late_work))
    assert cluster.record.sent_bytes == ROUNDS * 2 * 4 * VECTOR_BYTES  # 5 ranks, 2 x 4/5 of the vector each
    assert cluster.record.received_bytes == 0


def test_a_hundred_thousand_ranks_with_a_real_network_are_a_matter_of_seconds():
    """No time is asserted: event by event this would take hours, and the test would not end."""
    network = Network(latency_seconds=1e-5, worker_bits_per_second=1e10)
    setup = setup_of(LGC(k=70_000), workers=100_000, rounds=20, network=network)
    times = RoundTimes(setup, round_traffic=all_reduce_traffic(44_000_000, 100_000))
    assert len(list(times)) == 20
    ring = ring_seconds(network, workers=100_000, message_bytes=44_000_000)
    assert times.trace.seconds > 20 * (ring + 0.05)


def test_a_strategy_without_rounds_is_refused():
    with pytest.raises(ValueError, match=r"'x' has no rounds that ranks could add up \(on='ranks'\)"):
        setup_of(Async())
