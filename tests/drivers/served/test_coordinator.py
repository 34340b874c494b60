"""The laws of the coordinator, whatever workers do: nothing is lost, nothing is held for ever, all can be replayed."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drivers.rounds.decider import MOST_BAD_GRADIENTS, Decider
from paceline.drivers.rounds.messages import Failed, GradientReady
from paceline.drivers.served.membership import Member, Seat
from paceline.events import Joined, Left, Step
from paceline.strategies import LGC, Async, FastestK, Full
from paceline.traces.journal import Arrived, Refused, StepRecord, WorkerJoined, WorkerLeft
from paceline.traces.replay_events import hear
from paceline.traces.worker_counts import CAME_TOO_LATE
from tests.drivers.served.table import (
    FOREVER,
    MOST,
    MOST_BAD,
    SHARDS,
    SHARES,
    Table,
    decisions,
    histories,
    on_disk,
    strategies,
)

quick = settings(max_examples=60)


def decided_again(records, strategy):
    """The steps that a strategy asks for which hears what the journal says, and the strategy then."""
    running, waiting, steps = strategy.start(), set(), []

    def tell(heard):
        for worker in sorted(waiting):
            steps.extend(running.handle(Joined(worker=worker, at_seconds=0.0)))
        waiting.clear()
        steps.extend(hear(running, heard))

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
                    tell(arrival)
    return [step for step in steps if isinstance(step, Step)], running


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
        for step in decided_again(table.records, strategy)[0]
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
    list(table.play([("bad", 1), ("bad", 1), ("bad", 0), ("bad", 0)]))
    assert not table.coordinator.done
    list(table.play([("bad", 0)]))
    assert table.coordinator.diverged
    assert [record.reason for record in table.records if isinstance(record, Refused)] == 7 * ["not finite"]
    assert table.received == len(table.released)


@pytest.mark.parametrize("others", ["none", "gone", "delivered and gone"])
def test_one_bad_batch_ends_nothing_where_one_worker_is_alive(others):
    """It has as many tries as a worker among others; where another's gradient was finite, its own data is at fault."""
    table = Table(Full(), wait_for=1)
    before = [] if others == "none" else [("join", 1), *([("deliver", 1, 4)] if "delivered" in others else [])]
    list(table.play([("join", 0), *before, ("leave", 1), ("bad", 0), ("bad", 0)]))
    assert not table.coordinator.done
    assert table.coordinator.train_state.version == 0
    assert table.coordinator.members[0].owes, "it was sent the model again"
    again = Table(Full(), wait_for=1)
    list(again.play([("join", 0), *before, ("leave", 1), ("bad", 0), ("bad", 0), ("deliver", 0, 4)]))
    assert again.coordinator.train_state.version == 1
    list(table.play([("bad", 0)]))
    assert table.coordinator.diverged == (others != "delivered and gone")
    assert table.coordinator.alive == ([] if others == "delivered and gone" else [0])


@given(sent=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([True, True, False])), max_size=40))
@settings(max_examples=60)
def test_a_server_and_ranks_judge_gradients_that_are_not_finite_alike(sent):
    """Three that take part, and the same gradients in the same order, until one has no further try."""
    table, decider = Table(Full(), wait_for=SHARDS), Decider(Full(), ranks=range(SHARDS))
    list(table.play([("join", worker) for worker in range(SHARDS)]))
    decider.begin(0.0)
    for number, (worker, bad) in enumerate(sent):
        version = table.coordinator.train_state.version
        if not table.coordinator.members[worker].owes:
            continue
        for _ in range(MOST_BAD_GRADIENTS - MOST_BAD if bad and not table.bad[worker] else 0):  # more tries on ranks
            assert decider.handle(ready(worker, version, number, finite=False), table.now) == []
        list(table.play([("bad", worker) if bad else ("deliver", worker, 4)]))
        notices = decider.handle(ready(worker, version, number, finite=not bad), table.now)
        failed = [notice.reason for notice in notices if isinstance(notice, Failed)]
        assert bool(failed) == (table.coordinator.diverged or worker not in table.coordinator.alive)
        if failed:
            assert failed[0].startswith("the gradients of all ranks") == table.coordinator.diverged
            return
        assert table.coordinator.train_state.version == decider.state.version


def ready(rank, version, draw, *, finite):
    return GradientReady(
        rank=rank, version=version, draw=draw, blocks_done=4, blocks=4, work_seconds=0.1, held_seconds=0.1,
        fingerprint=version, finite=finite,
    )  # fmt: skip


# -- stragglers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "rounds"),
    [(LGC(k=1), 10_000), (FastestK(k=1), 150), (Async(), 150), (LGC(k=1, shares=SHARES), 150)],
    ids=str,
)
def test_a_worker_may_answer_however_many_models_it_was_sent_since(strategy, rounds):
    """Twice: what it answers second is the newest model that it was sent before it answered first."""
    table = Table(strategy, wait_for=2)
    list(table.play([("join", 0), ("join", 1)]))
    slow, computed = table.coordinator.members[1], 0
    for number in range(2):
        list(table.play((rounds if number == 0 else 150) * [("deliver", 0, 4)]))
        table.coordinator.flush()
        seen, newest = len(table.records), table.sent[1][-1]
        sent_seconds = table.sent_seconds[1, computed]
        table.deliver(1, computed)
        assert slow.answered_version == computed
        table.coordinator.flush()
        (came,) = (arrival for record in table.records[seen:] for arrival in record.arrivals)
        assert came.transfer_seconds == pytest.approx(table.clock - sent_seconds - 0.02, abs=1e-5)
        dropped = [drop.reason for record in table.records[seen:] for drop in getattr(record, "dropped", ())]
        assert dropped == ([] if isinstance(strategy, Async) else ["it missed the round after its own too"])
        table.send()
        computed = newest if newest > computed else table.sent[1][-1]
    assert not [record for record in table.records if isinstance(record, Refused)]


@pytest.mark.parametrize("answers", [[], [0], [0, 150]])
def test_a_worker_may_answer_each_version_behind_its_last_answer_up_to_the_last_that_it_was_sent(answers):
    """Also one that is neither among the first nor among the last: its way may take longer than many rounds."""
    table = Table(LGC(k=1), wait_for=2)
    list(table.play([("join", 0), ("join", 1), *(300 * [("deliver", 0, 4)])]))
    slow = table.coordinator.members[1]
    for version in answers:
        table.deliver(1, version)
    first = answers[-1] + 1 if answers else 0
    assert [version for version in range(-1, 310) if slow.may_answer(version)] == list(range(first, 301))


def test_what_is_remembered_of_a_worker_does_not_grow_with_the_models_that_it_was_sent():
    table = Table(LGC(k=1), wait_for=2)
    list(table.play([("join", 0), ("join", 1), *(300 * [("deliver", 0, 4)])]))
    before, slow = len(table.coordinator.members[1].sent_at), table.coordinator.members[1]
    list(table.play(300 * [("deliver", 0, 4)]))
    assert len(slow.sent_at) == len(slow.asked_samples) == before
    assert slow.sent_seconds(300, -1.0) <= table.sent_seconds[1, 300], "nothing seems quicker than it was"


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


@quick
@given(
    k=st.sampled_from([1, 2, "auto"]),
    orders=st.lists(st.permutations(range(SHARDS)), min_size=6, max_size=6),
    total=st.integers(1, 5),
)
def test_a_run_that_is_over_knows_what_its_replay_does_and_so_both_go_on_alike_when_it_is_extended(k, orders, total):
    """The gradient that takes the last step tells its losses too."""
    table = Table(LGC(k=k), wait_for=SHARDS, total_steps=total)
    list(table.play([("join", worker) for worker in range(SHARDS)]))
    list(table.play([("deliver", worker, 4) for order in orders for worker in order]))
    assert table.coordinator.done
    _, replayed = decided_again(table.records, LGC(k=k))
    assert on_disk(table.coordinator)[0]["strategy"] == json.loads(json.dumps(replayed.state_dict()))


@quick
@given(
    strategy=st.sampled_from([LGC(k="auto"), LGC(k="auto", scale_partial=True), FastestK(k="auto")]),
    orders=st.lists(st.permutations(range(SHARDS)), min_size=10, max_size=20),
    behind=st.lists(st.sampled_from(["deliver", "deliver", "older"]), min_size=60, max_size=60),
)
def test_losses_told_with_the_gradient_give_the_same_k_as_those_told_after_the_step(strategy, orders, behind):
    """A server has them with each gradient; on the virtual clock they are computed for those that a step took."""
    table = Table(strategy, wait_for=SHARDS)
    list(table.play([("join", worker) for worker in range(SHARDS)]))
    list(table.play([(kind, worker, 4) for worker, kind in zip(itertools.chain(*orders), behind, strict=False)]))
    table.coordinator.flush()
    running, losses, steps = strategy.start(), {}, []
    for worker in range(SHARDS):
        running.handle(Joined(worker=worker, at_seconds=0.25 * SHARDS))
    for record in table.records:
        for arrival in getattr(record, "arrivals", ()):
            arrived, losses[arrival.worker, arrival.version] = events_of(arrival)
            for step in [action for action in running.handle(arrived) if isinstance(action, Step)]:
                steps.append(step)
                for share in (*step.late, *step.fresh):
                    running.handle(losses[share.worker, share.version])
    written = [(record.fresh, record.late) for record in table.records if isinstance(record, StepRecord)]
    assert [(places(step.fresh), places(step.late)) for step in steps] == written
    assert running.k == table.coordinator.strategy.k


def places(shares):
    return tuple((share.worker, share.version) for share in shares)


def events_of(arrival):
    told = []
    hear(SimpleNamespace(handle=lambda event: told.append(event) or []), arrival)
    return told


def test_workers_that_go_because_the_run_is_stopped_do_not_close_the_open_round():
    table = Table(Full(), wait_for=3)
    list(table.play([("join", 0), ("join", 1), ("join", 2), ("deliver", 0, 4)]))
    table.coordinator.stop()
    list(table.play([("deliver", 1, 4), ("leave", 0), ("leave", 1), ("leave", 2)]))
    assert table.coordinator.train_state.version == 0
    assert not any(isinstance(record, StepRecord) for record in table.records)
    assert table.coordinator.boundary["roster"] == {"next_draws": []}


def test_who_has_just_joined_may_answer_nothing_from_before():
    member = Member(worker=0, seat=Seat(worker=0, shard=0, first_draw=0), host="here")
    member.sent(50, 0.0)
    assert [version for version in range(60) if member.may_answer(version)] == [50]
