"""What a journal says of a run on a real recipe is enough to compute it again, to the last bit, with every codec."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings

from paceline.drivers.replayed import Replay
from paceline.drivers.served.coordinator import Coordinator, ReceivedGradient
from paceline.drivers.served.membership import Seats
from paceline.drivers.served.messages import Gradient
from paceline.optim import make_optimizer
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data, make_training
from paceline.traces.journal import Resumed
from paceline.training import Batches, TrainState, WorkerCodecs
from paceline.training.batches import BatchPlace
from paceline.workers.gradients import LoopGradients
from tests.drivers.served.table import MOST, SHARDS, Table, decisions, histories, on_disk, strategies

CODECS = ["identity", "qsgd", "one-bit", "power-sgd"]  # exact; random; with memories: of what was lost, of factors


class RealTable(Table):
    """Real gradients of a real recipe, so that the journal can be replayed."""

    def __init__(self, recipe, strategy, training, records):
        super().__init__(strategy, wait_for=recipe.cluster.workers)
        self.records, self._training = records, training
        self._batches, self._engine = (
            Batches(training),
            LoopGradients(copy.deepcopy(training.module), block_by_block=True),
        )
        module = copy.deepcopy(training.module)
        optimizer, schedule = make_optimizer(training.optimizer, module.parameters(), total_steps=training.total_steps)
        self.coordinator = Coordinator(
            strategy=strategy,
            train_state=TrainState(module, optimizer, schedule, codec=training.codec, seed=training.seed),
            codec=training.codec,
            seats=Seats(shards=recipe.cluster.workers, most=MOST),
            total_steps=training.total_steps,
            wait_for=recipe.cluster.workers,
            write=records.append,
        )
        self.models = {}
        self.senders = WorkerCodecs(training.codec, self.coordinator.train_state.model.shapes, seed=training.seed)
        self.started = 0.0

    @property
    def now(self):
        return self.clock if self.coordinator.begun else self.started

    def join(self, wish):
        before = dict(self.coordinator.members)
        super().join(wish)
        for worker, member in self.coordinator.members.items():
            if before.get(worker) is not member:
                self.senders.joined(worker)

    def send(self):
        train_state = self.coordinator.train_state
        self.models[train_state.version] = train_state.outgoing.held.clone(), train_state.model.buffers.clone()
        super().send()

    def deliver(self, worker, version, blocks_done=4, *, bad=False):
        draw, shard = self.draws[worker], self.coordinator.members[worker].seat.shard
        samples = self.asked(worker, version)
        place = BatchPlace(first=self.coordinator.seats.next_sample(worker), samples=samples) if samples else None
        batch = self._batches.assignment(
            worker=worker, shard=shard, draw=draw, blocks=4, blocks_done=blocks_done, place=place
        )
        found = self._engine.compute(*self.models[version], [batch])
        message = Gradient(
            version=version, draw=draw, blocks_done=blocks_done, blocks=4,
            work_seconds=0.01 * (1 + (worker + draw) % 3), held_seconds=0.02, samples=32, batch_samples=samples,
            loss_mean=float(found.losses[0]), loss_variance=float(found.loss_variances[0]), payload_bytes=1,
            buffer_bytes=0,
        )  # fmt: skip
        payload = self.senders.encode(found.gradients[0], worker=worker, draw=draw)
        received = ReceivedGradient(
            worker=worker, message=message, vector=self.senders.decode(payload),
            buffer_changes=found.buffers[0] - self.models[version][1], release=lambda: None,
        )  # fmt: skip
        self.coordinator.gradient(received, now=self.now)
        self.draws[worker] = draw + 1


@pytest.fixture(scope="module")
def digits():
    recipe = Recipe(rounds=200).with_settings(
        cluster={"workers": SHARDS}, strategy={"k": 2}, data={"classes_per_worker": 4}
    )
    return recipe, load_data(recipe)


def worked_on(table, moves):
    """Play, without what only a broken worker does."""
    list(table.play([move for move in moves if move[0] in ("join", "leave", "deliver", "older")]))
    table.coordinator.flush()


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=12)
@given(strategy=strategies, before=histories, after=histories)
def test_a_journal_replays_to_the_last_bit_across_a_resumption(digits, codec, strategy, before, after):
    recipe, dataset = digits
    recipe = recipe.with_settings(codec={"name": codec})
    training = make_training(recipe, dataset)
    everybody = [("join", worker) for worker in range(SHARDS)]
    records = []
    first = RealTable(recipe, strategy, training, records)
    worked_on(first, [*everybody, *before])
    state, tensors = on_disk(first.coordinator)
    second = RealTable(recipe, strategy, training, records)
    second.coordinator.train_state.load_state(state["trainee"], tensors)
    second.coordinator.load_boundary(state)
    second.clock = second.started = first.clock
    records.append(Resumed(at_seconds=first.clock, version=first.coordinator.train_state.version, reason="a test"))
    worked_on(second, [*everybody, *after])
    replay = Replay(records, training, strategy)
    taken = list(replay)
    assert replay.verdict.identical, replay.verdict.difference
    assert len(taken) == len(decisions(records))
    assert torch.equal(replay.train_state.model.parameters, second.coordinator.train_state.model.parameters)
