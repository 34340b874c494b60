"""Shares by speed at a server: the laws of sizes and places, whatever workers do, and what is refused."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import paceline
from paceline.drivers.replayed import Replay
from paceline.drivers.served.connection import WorkerRefused
from paceline.drivers.served.membership import Member, Seat
from paceline.drivers.served.messages import ProtocolError
from paceline.events import Assign
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data, make_training
from paceline.strategies import Full
from paceline.strategies.shares import BatchSizes, SharesBySpeed
from paceline.traces.journal import Arrived, Refused, StepRecord, WorkerJoined
from paceline.traces.journal_files import read_journal
from tests.drivers.served.table import FOREVER, SHARDS, SHARES, Table, histories, strategies_by_speed
from tests.drivers.served.test_coordinator_replayed import RealTable, worked_on
from tests.drivers.served.test_worker import DEADLINE_SECONDS, network, serving

EVERYBODY = [("join", worker) for worker in range(SHARDS)]
ROUND = [("deliver", worker, 4) for worker in range(SHARDS)]


def arrivals_of(records):
    return [arrival for record in records if isinstance(record, Arrived | StepRecord) for arrival in record.arrivals]


@settings(max_examples=40)
@given(strategy=strategies_by_speed, moves=histories, steps=st.sampled_from([2, 3, 5, FOREVER]))
def test_batches_have_the_size_that_was_assigned_and_follow_each_other_in_each_numbers_order(strategy, moves, steps):
    """Whoever has a number: no sample is drawn twice and none left out, but for batches that were refused."""
    table = Table(strategy, total_steps=steps)
    ends, skipped = defaultdict(int), defaultdict(int)
    for _ in table.play(moves):
        state = table.coordinator.strategy.state_dict()["shares"]
        sizes = BatchSizes(SHARES)
        sizes.assign(Assign(samples=tuple(state["assigned"])))
        assert sizes.state_dict() == table.coordinator.sizes.state_dict()  # the strategy and its driver agree
        if table.coordinator.over:  # nobody is admitted any more
            break
    table.coordinator.flush()
    for record in table.records:
        match record:
            case WorkerJoined():
                assert record.first_sample >= ends[record.worker]
                assert record.first_sample == ends[record.worker] or skipped[record.worker]
            case Refused():
                skipped[record.worker] += 1
            case Arrived() | StepRecord():
                for arrival in record.arrivals:
                    assert SHARES.least <= arrival.batch_samples <= SHARES.batch_size * len(table.coordinator.members)
                    assert arrival.batch_samples % SHARES.multiple == 0
                    assert arrival.first_sample >= ends[arrival.worker]
                    assert arrival.first_sample == ends[arrival.worker] or skipped[arrival.worker]
                    ends[arrival.worker] = arrival.first_sample + arrival.batch_samples


def settled():
    """A table of three workers whose first is slow, until sizes were assigned."""
    table = Table(Full(shares=SHARES), wait_for=SHARDS)
    list(table.play(EVERYBODY))
    while not table.coordinator.sizes.state_dict():
        list(table.play(ROUND[::-1]))
    return table


def test_an_answer_of_another_size_is_refused_and_changes_nothing():
    table = settled()
    member, version = table.coordinator.members[0], table.coordinator.train_state.version
    before = table.coordinator.train_state.model.parameters.clone()
    asked, place = member.asked_samples[version], table.coordinator.seats.next_sample(0)
    for samples in (0, asked + 1, 2**53):
        table.asked = lambda worker, version, samples=samples: samples
        with pytest.raises(ProtocolError, match=f"a batch of {samples} samples cannot be.* asked for {asked} "):
            table.deliver(0, version)
    assert torch.equal(table.coordinator.train_state.model.parameters, before)
    assert table.coordinator.seats.next_sample(0) == place
    assert member.answered_version == version - 1


def test_without_shares_by_speed_no_worker_can_make_itself_heavier_than_the_others():
    said, silent = Table(Full(), wait_for=SHARDS), Table(Full(), wait_for=SHARDS)
    said.asked = lambda worker, version: 2**53 if worker == 1 else 1
    for table in (said, silent):
        list(table.play([*EVERYBODY, *ROUND, *ROUND]))
        assert {(arrival.batch_samples, arrival.first_sample) for arrival in arrivals_of(table.records)} == {(0, 0)}
    assert torch.equal(*(table.coordinator.train_state.model.parameters for table in (said, silent)))


def test_a_worker_that_was_sent_many_models_is_held_to_the_size_of_each_that_it_may_answer():
    member = Member(worker=0, seat=Seat(worker=0, shard=0, first_draw=0), host="here")
    for version in range(200):
        member.sent(version, float(version), 4 * version)
    assert member.asked_samples.keys() == member.sent_at.keys()
    assert all(samples == 4 * version for version, samples in member.asked_samples.items())


# -- replayed ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    """A run of three workers whose shares change, and all that is needed to replay it."""
    recipe = Recipe(rounds=200).with_settings(cluster={"workers": SHARDS}, worker={"batch_size": SHARES.batch_size})
    training, records = make_training(recipe, load_data(recipe)), []
    table = RealTable(recipe, Full(shares=SHARES), training, records)
    worked_on(table, [*EVERYBODY, *(8 * ROUND)])
    assert table.coordinator.sizes.state_dict()
    return training, records


def replayed(training, records):
    replay = Replay(records, training, Full(shares=SHARES))
    list(replay)
    return replay.verdict


def with_arrivals(records, change):
    """The same journal with `change` applied to the arrivals of its last step."""
    last = [record for record in records if isinstance(record, StepRecord)][-1]
    changed = replace(last, arrivals=tuple(map(change, last.arrivals)))
    return [changed if record is last else record for record in records]


def test_a_run_whose_shares_change_replays_and_one_with_other_sizes_or_places_differs(recorded):
    training, records = recorded
    assert replayed(training, records).identical
    smaller = with_arrivals(records, lambda each: replace(each, batch_samples=each.batch_samples - 4))
    assert "the strategy gives worker" in replayed(training, smaller).difference
    equal = with_arrivals(records, lambda each: replace(each, batch_samples=0, first_sample=0))
    assert "and the run had one of the recipe's size" in replayed(training, equal).difference
    for apart in (-1, 1):
        moved = with_arrivals(records, lambda each, apart=apart: replace(each, first_sample=each.first_sample + apart))
        assert "and the one before ends at" in replayed(training, moved).difference


def test_equal_shares_do_not_replay_as_shares_by_speed(recorded):
    training, records = recorded
    replay = Replay(records, training, Full())
    list(replay)
    assert "a batch of the recipe's size" in replay.verdict.difference


# -- in a user's own script --------------------------------------------------------------------------------------------

IN_SCRIPT = SharesBySpeed(batch_size=12, period=3)
SLOW, ROUNDS = 1, 18


def drawn(number, version, samples):
    """The batch of a worker at a version, which has `samples` of an endless order."""
    generator = torch.Generator().manual_seed(100 * version + number)
    inputs = torch.randn(samples, 4, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


def work_by_speed(address, wish, taken, most=None):
    """A worker of a script that draws as many samples as the server wishes, one of them four times slower."""
    model = network()
    with paceline.Worker(address, model, wish=wish) as worker:
        while worker.running():
            batch = drawn(worker.number, worker.version, min(worker.samples, most or worker.samples))
            taken[worker.version, worker.number] = batch
            for x, y in worker.blocks(*batch):
                time.sleep(0.004 * len(x) * (4 if worker.number == SLOW else 1))
                nn.functional.cross_entropy(model(x), y).backward()
            worker.send()


@pytest.mark.parametrize("most", [None, 7], ids=["as many as asked for", "seven at the most"])
def test_a_script_draws_as_many_samples_as_its_server_wishes_and_trains_as_one_process(tmp_path, most):
    served, plain, taken = network(), network(), {}
    settings = {"strategy": Full(shares=IN_SCRIPT), "workers": 2, "rounds": ROUNDS, "blocks": 1}
    with serving(served, tmp_path, **settings) as (address, ended), ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(work_by_speed, address, wish, taken, most) for wish in range(2)]:
            done.result(DEADLINE_SECONDS)
    assert ended[0].finished
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for version in range(ROUNDS):
        inputs, targets = (torch.cat(parts) for parts in zip(taken[version, 0], taken[version, 1], strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
    for found, expected in zip(served.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    arrivals = arrivals_of(read_journal(tmp_path / "run" / "trace.jsonl").records)
    assert {(each.version, each.worker): each.batch_samples for each in arrivals} == {
        place: len(batch[0]) for place, batch in taken.items()
    }
    if most is None:
        assert len(taken[ROUNDS - 1, SLOW][0]) < IN_SCRIPT.batch_size < len(taken[ROUNDS - 1, 1 - SLOW][0])


def test_a_script_that_does_not_draw_what_is_wished_is_told_how_to(tmp_path):
    with serving(network(), tmp_path, strategy=Full(shares=IN_SCRIPT), rounds=1) as (address, ended):
        with pytest.raises(WorkerRefused, match=r"a batch of 13 samples cannot be.* asked for 12 \(worker.samples\)"):
            deliver_one(address, 13)
        deliver_one(address, 12)
    assert ended[0].finished


def deliver_one(address, samples):
    model = network()
    with paceline.Worker(address, model) as worker:
        assert worker.running()
        for x, y in worker.blocks(*drawn(0, 0, samples)):
            nn.functional.cross_entropy(model(x), y).backward()
        worker.send()


def test_a_server_of_equal_shares_wishes_for_no_size(tmp_path):
    model = network()
    with serving(network(), tmp_path, rounds=1) as (address, _), paceline.Worker(address, model) as worker:
        assert worker.running()
        assert worker.samples == 0
        for x, y in worker.blocks(*drawn(0, 0, 5)):
            nn.functional.cross_entropy(model(x), y).backward()
        worker.send()
    (arrival,) = arrivals_of(read_journal(tmp_path / "run" / "trace.jsonl").records)
    assert arrival.batch_samples == 0
