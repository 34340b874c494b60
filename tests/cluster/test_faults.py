"""Workers that are killed or frozen: training goes on, nothing that was accepted is lost, and the run replays."""

from __future__ import annotations

import signal
import time
from collections import Counter

from paceline.runs.replaying import replay
from paceline.traces.journal import Arrived, StepRecord, WorkerJoined, WorkerLeft
from tests.cluster.harness import Cluster
from tests.waiting import until

STOPPED_BY_SIGTERM = 130
PACED = (("inject-delays", "true"), ("delay.shift-seconds", 0.04), ("delay.mean-seconds", 0.02))


def assert_every_gradient_ended(cluster):
    """On time, late, or dropped for a reason; but for those of the last round, which was still open."""
    arrived, ended = Counter(), Counter()
    for record in cluster.events(StepRecord | Arrived):
        arrived.update((arrival.worker, arrival.version) for arrival in record.arrivals)
        ended.update((dropped.worker, dropped.version) for dropped in record.dropped)
        assert all(dropped.reason for dropped in record.dropped)
    for record in cluster.events(StepRecord):
        ended.update((*record.fresh, *record.late))
    assert not ended - arrived
    assert {version for _, version in arrived - ended} <= {cluster.round - 1, cluster.round}


def assert_stops_and_replays(cluster):
    steps = cluster.round
    assert cluster.stop() == STOPPED_BY_SIGTERM, cluster.log
    assert "Traceback" not in cluster.log
    verdict = replay(cluster.run)  # as `paceline replay`, which loads torch once more
    assert verdict.identical, verdict.difference
    assert verdict.steps >= steps


def lines(cluster, text):
    return [line for line in cluster.log.splitlines() if text in line]


def test_workers_are_killed_one_after_the_other_until_none_is_left_and_new_ones_come(tmp_path):
    with Cluster(tmp_path, workers=5, k=3, settings=PACED) as cluster:
        cluster.until_alive(range(5))
        cluster.until_goes_on()
        first, spare = cluster.pids, cluster.prepare_workers(range(5))

        for killed, left in (([4], {0, 1, 2, 3}), ([3], {0, 1, 2}), ([1, 2], {0})):
            for number in killed:
                cluster.kill_worker(number)
            cluster.until_alive(left)
            cluster.until_goes_on()
            cluster.until_delivers(0)

        cluster.kill_worker(0)
        cluster.until_log("no worker is left")
        cluster.until_alive(())
        stands = cluster.round

        cluster.let_join(spare)
        cluster.until_alive(range(5))
        cluster.until_goes_on()
        assert cluster.round > stands
        assert not set(first.values()) & set(cluster.pids.values())
        for number in range(5):
            (left,) = lines(cluster, f"worker {number} left: ")
            assert left.partition(": ")[2].partition(" (")[0] == "its connection was lost"
            assert len(lines(cluster, f"worker {number} joined from")) == 2
        assert len(lines(cluster, "no worker is left: waiting for one to come")) == 1
        # Whoever takes a number goes on with its batches where the one before stopped.
        draws = [record.first_draw for record in cluster.events(WorkerJoined) if record.worker == 0]
        assert draws[1] == cluster.delivered(0) - cluster.delivered(0, since=stands)
        assert_stops_and_replays(cluster)
        assert_every_gradient_ended(cluster)
        assert len(lines(cluster, "no worker is left")) == 1, "a server that stops waits for nobody"


def test_a_full_round_does_not_wait_for_workers_that_are_dead_or_frozen(tmp_path):
    with Cluster(tmp_path, workers=4, strategy="full", settings=PACED) as cluster:
        cluster.until_alive(range(4))
        cluster.until_goes_on()
        cluster.kill_worker(3)
        cluster.until_alive(range(3))
        cluster.until_goes_on()

        # Frozen for less than silence_seconds (3 s): the round waits for it, and nobody is sent away.
        cluster.signal_worker(1, signal.SIGSTOP)
        frozen = time.monotonic()
        until(lambda: time.monotonic() - frozen > 1.0, "a second")
        cluster.signal_worker(1, signal.SIGCONT)
        cluster.until_delivers(1)
        assert [record.worker for record in cluster.events(WorkerLeft)] == [3]

        # Frozen for ten seconds: it is named, the others go on, and it comes back by itself.
        pid = cluster.pids[1]
        cluster.signal_worker(1, signal.SIGSTOP)
        frozen = time.monotonic()
        cluster.until_log(r"^worker 1 left: silent for 3 s$")
        cluster.until_alive({0, 2})
        cluster.until(lambda: cluster.until_goes_on() or time.monotonic() - frozen > 10, "ten seconds")
        assert cluster.alive == {0, 2}
        cluster.signal_worker(1, signal.SIGCONT)
        cluster.until_alive({0, 1, 2})
        cluster.until_delivers(1)
        assert cluster.pids[1] == pid
        cluster.until_goes_on()
        assert {fresh[0] for fresh in cluster.events(StepRecord)[-1].fresh} == {0, 1, 2}

        assert_stops_and_replays(cluster)
        assert_every_gradient_ended(cluster)
