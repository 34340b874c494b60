"""The laws of the coordinator, whatever workers do: nothing is lost, nothing is held for ever, all can be replayed."""

from __future__ import annotations

import copy
import json
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.events import Joined, Left, Step
from paceline.strategies import LGC, Async, Full
from paceline.traces.journal import Arrived, Refused, StepRecord, WorkerJoined, WorkerLeft
from paceline.traces.replay_events import events_of
from paceline.traces.worker_counts import CAME_TOO_LATE
from tests.drivers.served.table import FOREVER, MOST, SHARDS, Table, decisions, histories, on_disk, strategies

quick = settings(max_examples=60)


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
            case Arrived() | StepRecord():
                for arrival in record.arrivals:
                    tell(*events_of(arrival))
    return [step for step in steps if isinstance(step, Step)]


@quick
@given(strategy=strategies, moves=histories, wait_for=st.integers(1, SHARDS), steps=st.sampled_from([2, 5, FOREVER]))
def test_every_gradient_is_given_back_once_and_no_more_than_two_of_a_worker_wait(strategy, moves, wait_for, steps):
    table = Table(strategy, wait_for=wait_for, total_steps=steps)
    for _ in table.play(moves):
        version = table.coordinator.train_state.version
        assert set(table.released.values()) <= {1}
        assert table.received == len(table.released) + table.waiting.total()
        assert set(table.waiting.values()) <= {1}
        assert {held for _, held in table.waiting} <= {version - 1, version}
        assert bool(torch.isfinite(table.coordinator.train_state.model.parameters).all())
        assert version <= steps


@quick
@given(strategy=strategies, moves=histories, wait_for=st.integers(1, SHARDS))
def test_what_the_journal_says_is_enough_to_decide_every_step_again(strategy, moves, wait_for):
    table = Table(strategy, wait_for=wait_for)
    for _ in table.play(moves):
        pass
    table.coordinator.flush()
    written = [(record.fresh, record.late) for record in table.records if isinstance(record, StepRecord)]
    decided = [
        tuple(tuple((share.worker, share.version) for share in shares) for shares in (step.fresh, step.late))
        for step in decided_again(table.records, strategy)
    ]
    assert decided[: len(written)] == written
    assert len(decided) == len(written) or table.coordinator.done


@quick
@given(strategy=strategies, moves=histories)
def test_every_gradient_in_the_journal_ends_once_and_none_that_was_refused_is_in_it(strategy, moves):
    table = Table(strategy)
    for _ in table.play(moves):
        pass
    table.coordinator.flush()
    arrived, ended, refused = Counter(), Counter(), 0
    for record in table.records:
        if isinstance(record, Arrived | StepRecord):
            arrived.update((arrival.worker, arrival.version) for arrival in record.arrivals)
            ended.update((dropped.worker, dropped.version) for dropped in record.dropped)
            assert all(dropped.reason for dropped in record.dropped)
        if isinstance(record, StepRecord):
            ended.update((*record.fresh, *record.late))
        refused += isinstance(record, Refused)
    after_the_end = table.received - arrived.total() - refused
    assert after_the_end == 0 or table.coordinator.done
    if not table.coordinator.diverged:
        assert arrived - ended == table.waiting
    assert not ended - arrived


@quick
@given(strategy=strategies, moves=histories)
def test_what_is_shown_of_a_worker_while_the_run_goes_on_is_what_the_journal_says(strategy, moves):
    table = Table(strategy)
    for _ in table.play(moves):
        pass
    table.coordinator.flush()
    written = Counter()
    for record in table.records:
        if isinstance(record, Arrived | StepRecord):
            written.update((drop.worker, "dropped") for drop in record.dropped)
            written.update((drop.worker, "too_late") for drop in record.dropped if drop.reason in CAME_TOO_LATE)
        if isinstance(record, StepRecord):
            written.update((worker, "used") for worker, _ in record.fresh)
            written.update((worker, "late") for worker, _ in record.late)
    shown = {
        (number, name): getattr(member.counts, name)
        for number, member in table.coordinator.members.items()
        for name in ("used", "late", "dropped", "too_late")
    }
    assert Counter(shown) == written


@quick
@given(strategy=strategies, moves=histories)
def test_workers_that_are_alive_and_have_answered_all_are_waiting_for_others(strategy, moves):
    """Nobody is forgotten: who owes nothing is in the open round, or was late in it, and somebody else owes."""
    table = Table(strategy)
    for _ in table.play(moves):
        coordinator = table.coordinator
        if coordinator.begun and not coordinator.done and coordinator.alive:
            assert any(coordinator.members[worker].owes for worker in coordinator.alive)


def test_numbers_that_are_not_finite_never_reach_the_model_and_all_workers_sending_them_ends_the_run():
    table = Table(Full(), wait_for=2)
    list(table.play([("join", 0), ("join", 1), ("bad", 0), ("bad", 0)]))
    assert not table.coordinator.done
    assert table.coordinator.members[0].refused == 2
    list(table.play([("deliver", 0, 4), ("deliver", 1, 4)]))
    assert table.coordinator.train_state.version == 1
    list(table.play([("bad", 1), ("bad", 0)]))
    assert table.coordinator.diverged
    assert [record.reason for record in table.records if isinstance(record, Refused)] == 4 * ["not finite"]
    assert table.received == len(table.released)


# -- going on later ------------------------------------------------------------------------------------------------


def gone_on_with(strategy, saved):
    state, tensors = copy.deepcopy(saved)
    table = Table(strategy, seed=1)
    table.coordinator.train_state.load_state(state["trainee"], tensors)
    table.coordinator.load_boundary(state)
    return table


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
        version = table.coordinator.train_state.version
        list(table.play([next(moves)]))
        stepped = table.coordinator.train_state.version > version
        stopped_after -= 1
    clock, first = table.clock, len(table.records)
    again = gone_on_with(strategy, on_disk(table.coordinator))
    again.coordinator.wait_for, again.clock = SHARDS, clock - 0.25 * SHARDS  # so that all get the model now
    list(again.play(everybody))
    left = list(moves)
    for one in (table, again):
        list(one.play(left))
    assert decisions(again.records) == decisions(table.records[first:])
    known, known_later = (json.loads(json.dumps(one.coordinator.boundary)) for one in (table, again))
    assert known_later["roster"] == known["roster"]
    assert known_later["strategy"]["chooser"] == known["strategy"]["chooser"]


@given(strategy=strategies, moves=histories)
@settings(max_examples=40)
def test_a_boundary_holds_nobody_and_nothing_of_the_open_round(strategy, moves):
    table = Table(strategy)
    for _ in table.play(moves):
        pass
    again = gone_on_with(strategy, on_disk(table.coordinator))
    assert again.coordinator.alive == []
    assert not again.coordinator.begun
    assert again.coordinator.train_state.version == table.coordinator.train_state.version
    assert all(again.coordinator.seats.next_draw(w) <= table.coordinator.seats.next_draw(w) for w in range(MOST))


def test_a_boundary_holds_what_the_gradient_told_that_closed_the_round():
    table = Table(LGC(k="auto"), wait_for=3)  # of three workers it begins with all
    list(table.play([*(("join", worker) for worker in range(3)), *(("deliver", worker, 4) for worker in (0, 2, 1))]))
    assert table.coordinator.train_state.version == 1
    assert table.coordinator.boundary["strategy"] == table.coordinator.strategy.state_dict()


def test_workers_that_go_because_the_run_is_stopped_do_not_close_the_open_round():
    table = Table(Full(), wait_for=3)
    list(table.play([("join", 0), ("join", 1), ("join", 2), ("deliver", 0, 4)]))
    table.coordinator.stop()
    list(table.play([("deliver", 1, 4), ("leave", 0), ("leave", 1), ("leave", 2)]))
    assert table.coordinator.train_state.version == 0
    assert not any(isinstance(record, StepRecord) for record in table.records)
    assert table.coordinator.boundary["roster"] == {"next_draws": []}
