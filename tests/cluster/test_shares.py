"""`paceline train` and `serve` with shares by speed, in real processes: through deaths and resumptions, replayed."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from dataclasses import replace

import pytest

import paceline
from paceline.strategies.shares.sharing import PERIOD
from paceline.traces.journal import TRACE, Arrived, Checkpointed, Resumed, StepRecord, WorkerJoined
from paceline.traces.journal_files import effective, read_journal
from tests.cluster.harness import Cluster
from tests.cluster.peers import Peer, Visited
from tests.cluster.test_ranks import ENDS_WITHIN_SECONDS, ended, ranks_of, said, started, wait_for_checkpoints
from tests.waiting import until

BATCH, BLOCKS = 24, 2
RECIPE = """
rounds = {rounds}
evaluate_every = 20
[data]
split = "iid"
[worker]
batch_size = 24
blocks = 2
shares = "speed"
[cluster]
workers = 3
[delay]
name = "slow-worker"
slow_factor = {factor}
shift_seconds = {seconds}
mean_seconds = 0.0
inject = true
[strategy]
name = "{name}"
k = {k}
on = "{on}"
[server]
checkpoint_every = 10
silence_seconds = 4
"""
SETTINGS = [
    ("worker.batch-size", BATCH), ("worker.blocks", BLOCKS), ("worker.shares", "speed"), ("delay.name", "slow-worker"),
    ("delay.slow-factor", 3), ("delay.shift-seconds", 0.03), ("delay.mean-seconds", 0.0), ("delay.inject", "true"),
    ("server.checkpoint-every", 5),
]  # fmt: skip
SLOW = 0  # the first worker is


def batches_of(records):
    """The arrivals of each worker, in order."""
    found = defaultdict(list)
    for record in records:
        if isinstance(record, StepRecord | Arrived):
            for arrival in record.arrivals:
                found[arrival.worker].append(arrival)
    return found


def check_places(records):
    """Whoever has a number: its batches follow each other without a gap, but for what a resumption takes back."""
    ends = defaultdict(int)
    for record in effective(records):
        if isinstance(record, WorkerJoined):
            assert record.first_sample == ends[record.worker], record
        if isinstance(record, StepRecord | Arrived):
            for arrival in record.arrivals:
                assert arrival.first_sample == ends[arrival.worker], arrival
                ends[arrival.worker] += arrival.batch_samples
    assert all(ends[worker] for worker in range(2))


def check_slow_has_fewer(records):
    """The slow worker begins with as many samples as the others, and ends with fewer than each of them."""
    batches = batches_of(records)
    assert {each[0].batch_samples for each in batches.values()} == {BATCH}
    last = {worker: each[-1].batch_samples for worker, each in batches.items()}
    others = [size for worker, size in last.items() if worker != SLOW]
    assert last[SLOW] < min(BATCH, *others), last
    assert all(each.batch_samples % BLOCKS == 0 for worker in batches.values() for each in worker)


def trained(folder, name, on, *, rounds=40, k=2, factor=3.0, seconds=0.03):
    recipe = RECIPE.format(rounds=rounds, name=name, on=on, k=k, factor=factor, seconds=seconds)
    (folder / "shares.toml").write_text(recipe)
    return started("paceline", "train", "shares.toml", "--out", "run", tmp_path=folder)


@pytest.mark.parametrize(("name", "on"), [("full", "server"), ("lgc", "server"), ("full", "ranks"), ("lgc", "ranks")])
def test_a_slow_worker_gets_fewer_samples_and_the_run_replays_to_the_bit(tmp_path, name, on):
    run = trained(tmp_path, name, on)
    try:
        assert ended(run, tmp_path) == 0, said(tmp_path)
    finally:
        run.kill()
    records = read_journal(tmp_path / "run" / TRACE).records
    check_slow_has_fewer(records)
    check_places(records)
    assert paceline.replay(tmp_path / "run").identical


@pytest.mark.parametrize("on", ["server", "ranks"])
def test_a_run_whose_last_round_assigned_new_sizes_goes_on_with_them_when_it_is_extended(tmp_path, on):
    for command in (
        lambda: trained(tmp_path, "full", on, rounds=PERIOD, factor=5.0, seconds=0.1),  # plain after five rounds
        lambda: started("paceline", "train", "--resume", "run", "--rounds", 2 * PERIOD, tmp_path=tmp_path),
    ):
        run = command()
        try:
            assert ended(run, tmp_path) == 0, said(tmp_path)
        finally:
            run.kill()
    records = read_journal(tmp_path / "run" / TRACE).records
    resumed = next(place for place, record in enumerate(records) if isinstance(record, Resumed))
    assert {each.batch_samples for batches in batches_of(records[:resumed]).values() for each in batches} == {BATCH}
    assert batches_of(records[resumed:])[SLOW][0].batch_samples < BATCH
    check_places(records)
    assert paceline.replay(tmp_path / "run").identical


def test_ranks_that_are_killed_go_on_with_their_shares_and_places_and_replay_to_the_bit(tmp_path):
    folder = tmp_path / "run"
    run = trained(tmp_path, "lgc", "ranks", rounds=60)
    try:
        wait_for_checkpoints(run, folder, tmp_path, ranks=3)
        until(lambda: len(list((folder / "rank-0").glob("checkpoint-*[0-9]"))) > 1 or run.poll() is not None, "another")
        os.kill(ranks_of(run)[1], signal.SIGKILL)
        assert ended(run, tmp_path) == 1
    finally:
        run.kill()
    again = started("paceline", "train", "--resume", folder, tmp_path=tmp_path)
    try:
        assert ended(again, tmp_path, within=ENDS_WITHIN_SECONDS) == 0, said(tmp_path)
    finally:
        again.kill()
    records = read_journal(folder / TRACE).records
    (resumed,) = [record for record in records if isinstance(record, Resumed)]
    assert resumed.version > 0
    after = batches_of(records[records.index(resumed) :])
    assert after[SLOW][0].batch_samples < BATCH  # nothing is learned anew
    check_slow_has_fewer(records)
    check_places(records)
    assert paceline.replay(folder).identical


def test_a_server_and_its_workers_come_and_go_and_no_place_is_drawn_twice(tmp_path):
    """A worker is killed, and shares are dealt anew; it comes back; the server is killed, and resumed."""
    with Cluster(tmp_path, workers=3, strategy="full", settings=SETTINGS) as cluster:
        cluster.until_alive(range(3))

        def shares():
            return {worker: each[-1].batch_samples for worker, each in batches_of(cluster.records).items()}

        cluster.until(lambda: shares().get(SLOW, BATCH) < BATCH, "the slow one gets fewer")
        cluster.kill_worker(1)
        cluster.until_alive({0, 2})
        two = lambda: shares()[0] + shares()[2]  # noqa: E731
        cluster.until(lambda: two() == 2 * BATCH, "two have the batch of two")
        spare = cluster.prepare_workers([1])
        cluster.let_join(spare)
        cluster.until_alive(range(3))
        cluster.until(lambda: sum(shares().values()) == 3 * BATCH, "three have the batch of three")
        saved = len(cluster.events(Checkpointed))
        cluster.until(lambda: len(cluster.events(Checkpointed)) > saved, "a checkpoint with them")
        cluster.kill_server()
        cluster.start_server(resume=True)
        (resumed,) = cluster.until(lambda: cluster.events(Resumed), "it goes on")
        cluster.until_goes_on()
        after = batches_of(cluster.records[cluster.records.index(resumed) :])
        assert after[SLOW][0].batch_samples < BATCH
        cluster.stop()
        check_places(cluster.records)
        joins = [record for record in cluster.events(WorkerJoined) if record.worker == 1]
        assert len(joins) == 3
        assert joins[1].first_sample > 0
        assert cluster.replay()["identical"]


def test_a_worker_that_answers_with_another_size_is_refused_and_the_run_goes_on(tmp_path):
    with Visited(
        tmp_path, workers=2, strategy="full", settings=SETTINGS, serve=["--server.most-workers", "4"]
    ) as cluster:
        cluster.until_alive(range(2))
        for claimed in (0, BATCH - BLOCKS, 2**53):
            with Peer(cluster.address) as peer:
                model = peer.join()
                assert model.samples == BATCH
                peer.say(replace(peer.gradient(), batch_samples=claimed), peer.zeros)
                goodbye = peer.goodbye()
                assert goodbye.what == "refused"
                assert f"asked for a batch of {BATCH} samples (batch_samples={claimed})" in goodbye.reason
        cluster.until_alive(range(2))
        cluster.until_goes_on()
        assert not {arrival.worker for each in batches_of(cluster.records).values() for arrival in each} - {0, 1}
        cluster.stop()
        check_places(cluster.records)
        assert cluster.replay()["identical"]
