"""The laws of the conductor, whatever workers do: nothing is lost, nothing is held for ever, all can be replayed."""

from __future__ import annotations

import copy
import json
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codecs import make_codec
from paceline.drivers.replayed import Replay
from paceline.drivers.served.conductor import Conductor
from paceline.drivers.served.members import Received
from paceline.drivers.served.messages import Gradient, ProtocolError
from paceline.drivers.served.roster import NoRoom, Roster
from paceline.events import Joined, Left, Step
from paceline.optim import make_optimizer
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data, make_training
from paceline.strategies import LGC, Async, FastestK, Full
from paceline.traces.journal import Arrived, Refused, Resumed, Stepped, WorkerJoined, WorkerLeft
from paceline.traces.told import events_of
from paceline.training import Batches, Trainee
from paceline.workers.loop import LoopGradients

SHARDS, MOST = 3, 5
FOREVER = 10**6

quick = settings(max_examples=60)
strategies = st.sampled_from(
    [Full(), Async(), Async(staleness_scaling=False)]
    + [kind(k=k) for kind in (FastestK, LGC) for k in (1, 2, 3, 9, "auto")]
    + [LGC(k=2, warmup_rounds=2), LGC(k=2, scale_partial=False)]
)

_workers = range(MOST)
_move = st.sampled_from(
    6 * [("deliver", worker, 4) for worker in _workers]
    + [("deliver", worker, blocks) for worker in _workers for blocks in (1, 3)]
    + [("join", worker) for worker in _workers]
    + [("leave", worker) for worker in _workers]
    + [(kind, worker) for worker in _workers for kind in ("bad", "older", "never sent", "twice")]
)
histories = st.builds(
    lambda first, moves: [("join", worker) for worker in range(first)] + moves,
    st.integers(0, MOST),
    st.lists(_move, max_size=10) | st.lists(_move, min_size=20, max_size=40),
)


class Table:
    """A conductor of a tiny model, and all around it: the server's part, the workers' and a clock."""

    def __init__(self, strategy, *, total_steps=FOREVER, wait_for=1, seed=0):
        torch.manual_seed(seed)
        module = torch.nn.Linear(2, 1)
        trainee = Trainee(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
        self.records, self.released, self.held = [], Counter(), Counter()
        self.conductor = Conductor(
            strategy=strategy,
            trainee=trainee,
            codec=make_codec("identity"),
            roster=Roster(shards=SHARDS, most=MOST),
            total_steps=total_steps,
            wait_for=wait_for,
            write=self.records.append,
        )
        self.clock, self.received, self.draws, self.sent = 0.0, 0, {}, {}

    @property
    def now(self):
        return self.clock if self.conductor.begun else 0.0

    def play(self, moves):
        for kind, worker, *more in moves:
            self.clock = round(self.clock + 0.25, 6)
            if kind == "join":
                self.join(worker)
            elif kind == "leave":
                self.conductor.left(worker, "it left", self.now)
            elif worker in self.conductor.alive:
                self.say(kind, worker, *more)
            self.send()
            yield

    def join(self, wish):
        try:
            seat = self.conductor.roster.seat(wish)
        except NoRoom:
            return
        self.draws[seat.worker], self.sent[seat.worker] = seat.first_draw, []
        self.conductor.joined(seat, threads=1, host="here", now=self.now)

    def say(self, kind, worker, blocks_done=4):
        """A gradient, as a worker would send it if it can, or as none can."""
        member, version = self.conductor.members[worker], None
        if kind == "never sent":
            for impossible in (member.sent_version + 1, member.answered_version):
                with pytest.raises(ProtocolError):
                    self.deliver(worker, impossible)
            return
        unanswered = [sent for sent in self.sent[worker] if sent > member.answered_version]
        if unanswered:
            version = unanswered[0] if kind == "older" else unanswered[-1]
            blocks_done = 4 if version == self.conductor.trainee.version else blocks_done
            self.deliver(worker, version, blocks_done, bad=kind == "bad")
            if kind == "twice" and worker in self.conductor.alive:
                with pytest.raises(ProtocolError):
                    self.deliver(worker, version)

    def deliver(self, worker, version, blocks_done=4, *, bad=False):
        number, draw = self.received, self.draws[worker]
        vector = torch.tensor([float("nan") if bad else 0.1 * (worker + 1), -0.2 * blocks_done, 1e30 * (worker == 4)])
        message = Gradient(
            version=max(version, 0), draw=draw, blocks_done=blocks_done, blocks=4, work_seconds=0.01 * (worker + 1),
            held_seconds=0.02, samples=8, loss_mean=1.0 + worker + draw, loss_variance=0.5, payload_bytes=12,
            buffer_bytes=0,
        )  # fmt: skip

        def release():
            self.released[number] += 1
            self.held[worker, version] -= 1

        received = Received(
            worker=worker, message=message, vector=vector, buffer_changes=torch.zeros(0), release=release
        )
        self.conductor.gradient(received, now=self.now) if version >= 0 else refuse()
        self.received, self.draws[worker] = number + 1, draw + 1
        self.held[worker, version] += 1

    def send(self):
        """What the server does with what the conductor asks."""
        workers, self.conductor.to_send = self.conductor.to_send, []
        for worker in workers:
            member, version = self.conductor.members[worker], self.conductor.trainee.version
            if member.alive and not self.conductor.done:
                member.sent(version, self.now)
                self.sent[worker].append(version)

    @property
    def waiting(self):
        return +self.held


def refuse():
    raise ProtocolError("a version below 0 is refused when it is decoded")


def decided_again(records, strategy):
    """The steps that a strategy asks for which hears what the journal says."""
    running, waiting, steps = strategy.start(), set(), []

    def tell(*events):
        for worker in sorted(waiting):
            steps.extend(running.handle(Joined(worker=worker, at_seconds=0.0)))
        waiting.clear()
        for event in events:
            steps.extend(running.handle(event))

    for record in records:
        match record:
            case WorkerJoined(at_seconds=0.0):
                waiting.add(record.worker)
            case WorkerJoined():
                tell(Joined(worker=record.worker, at_seconds=record.at_seconds))
            case WorkerLeft() if record.worker in waiting and record.at_seconds == 0:
                waiting.discard(record.worker)
            case WorkerLeft():
                tell(Left(worker=record.worker, at_seconds=record.at_seconds))
            case Arrived() | Stepped():
                for arrival in record.arrivals:
                    tell(*events_of(arrival))
    return [step for step in steps if isinstance(step, Step)]


@quick
@given(strategy=strategies, moves=histories, wait_for=st.integers(1, SHARDS), steps=st.sampled_from([2, 5, FOREVER]))
def test_every_gradient_is_given_back_once_and_no_more_than_two_of_a_worker_wait(strategy, moves, wait_for, steps):
    table = Table(strategy, wait_for=wait_for, total_steps=steps)
    for _ in table.play(moves):
        version = table.conductor.trainee.version
        assert set(table.released.values()) <= {1}
        assert table.received == len(table.released) + table.waiting.total()
        assert set(table.waiting.values()) <= {1}
        assert {held for _, held in table.waiting} <= {version - 1, version}
        assert bool(torch.isfinite(table.conductor.trainee.model.parameters).all())
        assert version <= steps


@quick
@given(strategy=strategies, moves=histories, wait_for=st.integers(1, SHARDS))
def test_what_the_journal_says_is_enough_to_decide_every_step_again(strategy, moves, wait_for):
    table = Table(strategy, wait_for=wait_for)
    for _ in table.play(moves):
        pass
    table.conductor.flush()
    written = [(record.fresh, record.late) for record in table.records if isinstance(record, Stepped)]
    decided = [
        tuple(tuple((share.worker, share.version) for share in shares) for shares in (step.fresh, step.late))
        for step in decided_again(table.records, strategy)
    ]
    assert decided[: len(written)] == written
    assert len(decided) == len(written) or table.conductor.done


@quick
@given(strategy=strategies, moves=histories)
def test_every_gradient_in_the_journal_ends_once_and_none_that_was_refused_is_in_it(strategy, moves):
    table = Table(strategy)
    for _ in table.play(moves):
        pass
    table.conductor.flush()
    arrived, ended, refused = Counter(), Counter(), 0
    for record in table.records:
        if isinstance(record, Arrived | Stepped):
            arrived.update((arrival.worker, arrival.version) for arrival in record.arrivals)
            ended.update((dropped.worker, dropped.version) for dropped in record.dropped)
            assert all(dropped.reason for dropped in record.dropped)
        if isinstance(record, Stepped):
            ended.update((*record.fresh, *record.late))
        refused += isinstance(record, Refused)
    after_the_end = table.received - arrived.total() - refused
    assert after_the_end == 0 or table.conductor.done
    if not table.conductor.diverged:
        assert arrived - ended == table.waiting
    assert not ended - arrived


@quick
@given(strategy=strategies, moves=histories)
def test_workers_that_are_alive_and_have_answered_all_are_waiting_for_others(strategy, moves):
    """Nobody is forgotten: who owes nothing is in the open round, or was late in it, and somebody else owes."""
    table = Table(strategy)
    for _ in table.play(moves):
        conductor = table.conductor
        if conductor.begun and not conductor.done and conductor.alive:
            assert any(conductor.members[worker].owes for worker in conductor.alive)


def test_numbers_that_are_not_finite_never_reach_the_model_and_all_workers_sending_them_ends_the_run():
    table = Table(Full(), wait_for=2)
    list(table.play([("join", 0), ("join", 1), ("bad", 0), ("bad", 0)]))
    assert not table.conductor.done
    assert table.conductor.members[0].refused == 2
    list(table.play([("deliver", 0, 4), ("deliver", 1, 4)]))
    assert table.conductor.trainee.version == 1
    list(table.play([("bad", 1), ("bad", 0)]))
    assert table.conductor.diverged
    assert table.conductor.refused_reasons == {"not finite": 4}
    assert table.received == len(table.released)


# -- going on later ------------------------------------------------------------------------------------------------


def on_disk(conductor):
    plain, tensors = conductor.trainee.state()
    return json.loads(json.dumps({"trainee": plain, **conductor.boundary})), copy.deepcopy(tensors)


def gone_on_with(strategy, saved):
    state, tensors = copy.deepcopy(saved)
    table = Table(strategy, seed=1)
    table.conductor.trainee.load_state(state["trainee"], tensors)
    table.conductor.load_boundary(state)
    return table


def decisions(records):
    return [(record.fresh, record.late, record.fingerprint) for record in records if isinstance(record, Stepped)]


@quick
@given(
    strategy=strategies.filter(lambda strategy: not isinstance(strategy, Async)),
    orders=st.lists(st.permutations(range(SHARDS)), min_size=4, max_size=8),
    stopped_after=st.integers(0, 9),
)
def test_a_run_gone_on_with_from_a_boundary_decides_as_one_that_was_never_stopped(strategy, orders, stopped_after):
    everybody = [("join", worker) for worker in range(SHARDS)]
    moves = iter([("deliver", worker, 4) for order in orders for worker in order])
    table = Table(strategy, wait_for=SHARDS)
    list(table.play(everybody))
    stepped = False
    while stopped_after > 0 or not stepped:  # on to a boundary, where nothing of the open round is in
        version = table.conductor.trainee.version
        list(table.play([next(moves)]))
        stepped = table.conductor.trainee.version > version
        stopped_after -= 1
    clock, first = table.clock, len(table.records)
    again = gone_on_with(strategy, on_disk(table.conductor))
    again.conductor.wait_for, again.clock = SHARDS, clock - 0.25 * SHARDS  # so that all get the model now
    list(again.play(everybody))
    left = list(moves)
    for one in (table, again):
        list(one.play(left))
    assert decisions(again.records) == decisions(table.records[first:])
    known, known_later = (json.loads(json.dumps(one.conductor.boundary)) for one in (table, again))
    assert known_later["roster"] == known["roster"]
    assert known_later["strategy"]["chooser"] == known["strategy"]["chooser"]


@given(strategy=strategies, moves=histories)
@settings(max_examples=40)
def test_a_boundary_holds_nobody_and_nothing_of_the_open_round(strategy, moves):
    table = Table(strategy)
    for _ in table.play(moves):
        pass
    again = gone_on_with(strategy, on_disk(table.conductor))
    assert again.conductor.alive == []
    assert not again.conductor.begun
    assert again.conductor.trainee.version == table.conductor.trainee.version
    assert all(again.conductor.roster.next_draw(w) <= table.conductor.roster.next_draw(w) for w in range(MOST))


def test_a_boundary_holds_what_the_gradient_told_that_closed_the_round():
    table = Table(LGC(k="auto"), wait_for=3)
    list(table.play([("join", 0), ("join", 1), ("join", 2), ("deliver", 0, 4), ("deliver", 2, 4)]))
    assert table.conductor.trainee.version == 1
    assert table.conductor.boundary["strategy"] == table.conductor.strategy.state_dict()


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
        self.conductor = Conductor(
            strategy=strategy,
            trainee=Trainee(module, optimizer, schedule),
            codec=training.codec,
            roster=Roster(shards=recipe.cluster.workers, most=MOST),
            total_steps=training.total_steps,
            wait_for=recipe.cluster.workers,
            write=records.append,
        )
        self.models = {}
        self.started = 0.0

    @property
    def now(self):
        return self.clock if self.conductor.begun else self.started

    def send(self):
        model = self.conductor.trainee.model
        self.models[self.conductor.trainee.version] = model.parameters.clone(), model.buffers.clone()
        super().send()

    def deliver(self, worker, version, blocks_done=4, *, bad=False):
        draw, shard = self.draws[worker], self.conductor.members[worker].seat.shard
        batch = self._batches.assignment(worker=worker, shard=shard, draw=draw, blocks=4, blocks_done=blocks_done)
        found = self._engine.compute(*self.models[version], [batch])
        message = Gradient(
            version=version, draw=draw, blocks_done=blocks_done, blocks=4,
            work_seconds=0.01 * (1 + (worker + draw) % 3), held_seconds=0.02, samples=32,
            loss_mean=float(found.losses[0]), loss_variance=float(found.loss_variances[0]), payload_bytes=1,
            buffer_bytes=0,
        )  # fmt: skip
        received = Received(
            worker=worker, message=message, vector=found.gradients[0],
            buffer_changes=found.buffers[0] - self.models[version][1], release=lambda: None,
        )  # fmt: skip
        self.conductor.gradient(received, now=self.now)
        self.draws[worker] = draw + 1


@pytest.fixture(scope="module")
def digits():
    recipe = Recipe(rounds=200).with_settings(
        cluster={"workers": SHARDS}, strategy={"k": 2}, data={"classes_per_worker": 4}
    )
    return recipe, make_training(recipe, load_data(recipe))


def worked_on(table, moves):
    """Play, without what only a broken worker does."""
    list(table.play([move for move in moves if move[0] in ("join", "leave", "deliver", "older")]))
    table.conductor.flush()


@settings(max_examples=25)
@given(strategy=strategies, before=histories, after=histories)
def test_a_journal_replays_to_the_last_bit_across_a_resumption(digits, strategy, before, after):
    recipe, training = digits
    everybody = [("join", worker) for worker in range(SHARDS)]
    records = []
    first = RealTable(recipe, strategy, training, records)
    worked_on(first, [*everybody, *before])
    state, tensors = on_disk(first.conductor)
    second = RealTable(recipe, strategy, training, records)
    second.conductor.trainee.load_state(state["trainee"], tensors)
    second.conductor.load_boundary(state)
    second.clock = second.started = first.clock
    records.append(Resumed(at_seconds=first.clock, version=first.conductor.trainee.version, reason="a test"))
    worked_on(second, [*everybody, *after])
    replay = Replay(records, training, strategy)
    taken = list(replay)
    assert replay.verdict.identical, replay.verdict.difference
    assert len(taken) == len(decisions(records))
    assert torch.equal(replay.trainee.model.parameters, second.conductor.trainee.model.parameters)


def test_workers_that_go_because_the_run_is_stopped_do_not_close_the_open_round():
    table = Table(Full(), wait_for=3)
    list(table.play([("join", 0), ("join", 1), ("join", 2), ("deliver", 0, 4)]))
    table.conductor.stop()
    list(table.play([("deliver", 1, 4), ("leave", 0), ("leave", 1), ("leave", 2)]))
    assert table.conductor.trainee.version == 0
    assert not any(isinstance(record, Stepped) for record in table.records)
    assert table.conductor.boundary["roster"] == {"next_draws": []}
