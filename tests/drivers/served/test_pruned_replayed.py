"""A journal is enough to know whom every worker left out: through departures, returns, refusals and a resumption."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.pruning import PruningSettings
from paceline.drivers.replayed import Replay
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data, make_training
from paceline.strategies import LGC, Async, FastestK, Full
from paceline.traces.journal import Refused, Resumed
from paceline.training import pruning_of
from tests.drivers.served.table import SHARDS, decisions, on_disk
from tests.drivers.served.test_coordinator_replayed import RealTable, worked_on

POLICIES = [
    PruningSettings(name="fine-pruning", window=50, starting_point=0, block=1, count=1),
    PruningSettings(name="fine-pruning", window=50, starting_point=0, block=1, count=1, protect="classes"),
    PruningSettings(name="info-batch", delta=1.0),
]
EVERYBODY = [("join", worker) for worker in range(SHARDS)]
moves = st.lists(
    st.sampled_from(
        [("deliver", worker, blocks) for worker in range(SHARDS) for blocks in (4, 4, 4, 4, 2)]
        + [(kind, worker) for worker in range(SHARDS + 1) for kind in ("join", "leave")]
    ),
    min_size=20,
    max_size=40,
)


class PruningTable(RealTable):
    """Workers that judge what they have sent, as those of a recipe do."""

    def join(self, wish):
        before = dict(self.coordinator.members)
        super().join(wish)
        for worker, member in self.coordinator.members.items():
            if before.get(worker) is not member:
                self._batches.joined(worker, draw=member.seat.first_draw)

    def deliver(self, worker, version, blocks_done=4, *, bad=False):
        draw, engine = self.draws[worker], self._engine
        self._engine = _Kept(engine)
        super().deliver(worker, version, blocks_done, bad=bad)
        (losses,) = self._engine.found.sample_losses
        self._engine = engine
        self._batches.judge(worker=worker, draw=draw, losses=losses)

    def refused(self, worker):
        """A worker draws a batch, and its gradient is not finite: the server counts the draw, the journal does not."""
        draw, shard = self.draws[worker], self.coordinator.members[worker].seat.shard
        self._batches.assignment(worker=worker, shard=shard, draw=draw)
        self.coordinator.seats.drawn(worker, draw)
        self.coordinator.refused("not finite", worker=worker, peer="", now=self.now)
        self.draws[worker] = draw + 1


class _Kept:
    """An engine, and what it computed last."""

    def __init__(self, engine):
        self._engine = engine

    def compute(self, *given):
        self.found = self._engine.compute(*given)
        return self.found


@pytest.fixture(scope="module")
def digits():
    recipe = Recipe(rounds=40).with_settings(
        cluster={"workers": SHARDS}, strategy={"k": 2}, data={"split": "iid"}, worker={"batch_size": 256}
    )
    return recipe, make_training(recipe, load_data(recipe))


def assert_replays(records, training, strategy, tables):
    replay = Replay(records, training, strategy)
    taken = list(replay)
    assert replay.verdict.identical, replay.verdict.difference
    assert len(taken) == len(decisions(records))
    assert torch.equal(replay.train_state.model.parameters, tables[-1].coordinator.train_state.model.parameters)
    theirs = sum(table._batches.pruned.sat_out for table in tables)
    assert replay.batches.pruned.sat_out == theirs == int(pruning_of(replay.batches, training).times_pruned.sum())
    return theirs


@pytest.mark.parametrize("pruning", POLICIES, ids=[policy.name for policy in POLICIES])
@settings(max_examples=4)
@given(strategy=st.sampled_from([Full(), Async(), FastestK(k=2), LGC(k=2)]), before=moves, after=moves)
def test_a_journal_replays_to_the_last_bit_across_a_resumption(digits, pruning, strategy, before, after):
    recipe, training = digits
    training = replace(training, pruning=pruning)
    records = []
    first, second = (PruningTable(recipe, strategy, training, records) for _ in range(2))
    worked_on(first, [*EVERYBODY, *before])
    state, tensors = on_disk(first.coordinator)
    second.coordinator.train_state.load_state(state["trainee"], tensors)
    second.coordinator.load_boundary(state)
    second.clock = second.started = first.clock
    records.append(Resumed(at_seconds=first.clock, version=first.coordinator.train_state.version, reason="a test"))
    worked_on(second, [*EVERYBODY, *after])
    assert_replays(records, training, strategy, [first, second])


@pytest.mark.parametrize("pruning", POLICIES, ids=[policy.name for policy in POLICIES])
def test_a_draw_that_was_refused_was_drawn_and_not_judged(digits, pruning):
    """Also the first of a worker that has just come back: where its pass begins follows from when it joined."""
    recipe, training = digits
    training, records = replace(training, pruning=pruning), []
    table = PruningTable(recipe, Full(), training, records)
    rounds = [("deliver", worker, 4) for worker in range(SHARDS)] * 6
    worked_on(table, [*EVERYBODY, *rounds])
    table.refused(1)
    worked_on(table, rounds)
    worked_on(table, [("leave", 2), ("join", 2)])
    table.refused(2)
    worked_on(table, rounds)
    assert sum(isinstance(record, Refused) for record in records) == 2
    assert assert_replays(records, training, Full(), [table]) > 0
