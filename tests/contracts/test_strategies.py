"""The laws every strategy in the table keeps, whatever happens to the cluster."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.events import Assign, Drop, GradientArrived, Joined, Left, LossSeen, Send, Step
from paceline.strategies import STRATEGIES
from tests.contracts.play import (
    WORKERS,
    Deliver,
    Join,
    Leave,
    any_histories,
    histories,
    members,
    play,
    sized_histories,
    steps_of,
)
from tests.contracts.variants import (
    VARIANTS,
    every_strategy,
    every_strategy_with_shares,
    every_synchronous_strategy,
)

quick = settings(deadline=None, max_examples=40, derandomize=True)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_listed_strategy_has_variants_that_the_laws_are_tried_on(name):
    assert VARIANTS.get(name), f"add a line for {name!r} to tests/contracts/variants.py"
    assert {type(variant) for variant in VARIANTS[name]} == {STRATEGIES[name]}


def test_importing_the_strategies_does_not_import_torch():
    program = "import sys, paceline.strategies; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@every_strategy
@quick
@given(moves=any_histories)
def test_every_gradient_that_arrives_ends_in_one_step_or_in_one_drop_or_still_waits(settings, moves):
    running = settings.start()
    arrived, ended = Counter(), Counter()
    for event, actions in play(running, moves):
        if isinstance(event, GradientArrived):
            arrived[event.worker, event.version] += 1
        for action in actions:
            if isinstance(action, Step):
                ended.update((share.worker, share.version) for share in (*action.fresh, *action.late))
            elif isinstance(action, Drop):
                assert action.reason
                ended[action.worker, action.version] += 1
    assert not ended - arrived
    waiting = arrived - ended
    assert all(count == 1 for count in waiting.values())
    assert {version for _, version in waiting} <= {running.version, running.version - 1}


@every_strategy
@quick
@given(moves=any_histories)
def test_a_drop_is_of_the_gradient_that_just_arrived(settings, moves):
    for event, actions in play(settings.start(), moves):
        for action in actions:
            if isinstance(action, Drop):
                assert (action.worker, action.version) == (event.worker, event.version)


@every_strategy
@quick
@given(moves=any_histories)
def test_versions_count_the_steps(settings, moves):
    running = settings.start()
    steps = steps_of(play(running, moves))
    assert [step.version for step in steps] == list(range(len(steps)))
    assert running.version == len(steps)


@every_strategy
@quick
@given(moves=any_histories)
def test_the_new_model_goes_to_workers_that_are_alive_and_to_one_that_joins(settings, moves):
    played = play(settings.start(), moves)
    for count, (event, actions) in enumerate(played, start=1):
        alive = members(played[:count])
        sends = [action for action in actions if isinstance(action, Send)]
        assert len(sends) == (isinstance(event, Joined) or any(isinstance(action, Step) for action in actions))
        for send in sends:
            assert set(send.workers) <= alive
            assert list(send.workers) == sorted(set(send.workers))
            assert not isinstance(event, Joined) or send.workers == (event.worker,)


@every_strategy
@quick
@given(moves=any_histories)
def test_a_loss_that_is_told_asks_for_nothing(settings, moves):
    assert all(actions == [] for event, actions in play(settings.start(), moves) if isinstance(event, LossSeen))


@every_synchronous_strategy
@quick
@given(moves=any_histories)
def test_a_synchronous_step_is_sent_to_everybody_alive(settings, moves):
    played = play(settings.start(), moves)
    for count, (_, actions) in enumerate(played, start=1):
        if any(isinstance(action, Step) for action in actions):
            assert actions[-1] == Send(workers=tuple(sorted(members(played[:count]))))


@every_strategy
@quick
@given(moves=any_histories)
def test_shares_are_sorted_by_worker_and_name_each_once(settings, moves):
    for step in steps_of(play(settings.start(), moves)):
        for shares in (step.fresh, step.late):
            workers = [share.worker for share in shares]
            assert workers == sorted(set(workers))
        assert step.fresh
        assert all(share.version == step.version - 1 for share in step.late)


@every_synchronous_strategy
@quick
@given(moves=histories)
def test_fresh_shares_are_equal_and_sum_to_one(settings, moves):
    for step in steps_of(play(settings.start(), moves)):
        assert all(share.version == step.version for share in step.fresh)
        assert len({share.weight for share in step.fresh}) == 1
        assert sum(share.weight for share in step.fresh) == pytest.approx(1.0, abs=1e-12)


@every_strategy
@quick
@given(moves=histories)
def test_the_compensation_never_weighs_more_than_the_part_of_the_round_that_was_missing(settings, moves):
    steps = steps_of(play(settings.start(), moves))
    for before, step in itertools.pairwise(steps):
        if step.late:
            members_before = len(step.late) / step.previous_mean_weight
            assert len(step.late) + len(before.fresh) <= members_before + 1e-9


@every_synchronous_strategy
@quick
@given(moves=any_histories)
def test_a_round_is_never_left_open_when_everybody_alive_has_delivered(settings, moves):
    running = settings.start()
    alive, delivered, version = set(), set(), 0
    for event, actions in play(running, moves):
        if isinstance(event, Joined):
            alive.add(event.worker)
        elif isinstance(event, Left):
            alive.discard(event.worker)
        elif isinstance(event, GradientArrived) and event.version == version and event.whole and event.worker in alive:
            delivered.add(event.worker)
        if any(isinstance(action, Step) for action in actions):
            version, delivered = version + 1, set()
        assert not (alive and alive <= delivered), "everybody is in and the round is still open"


@every_synchronous_strategy
@quick
@given(moves=any_histories)
def test_a_step_takes_at_least_k_gradients_or_everybody_alive(settings, moves):
    # K is what the strategy said before the event; a worker that leaves can only lower it.
    running = settings.start()
    for number, move in enumerate(moves):
        k_before, alive_before = running.k, len(running.state_dict()["alive"])
        ((_, actions),) = play(running, [move], start_seconds=number)
        for action in actions:
            if isinstance(action, Step):
                assert len(action.fresh) >= min(k_before, alive_before) - isinstance(move, Leave)


@every_synchronous_strategy
@quick
@given(moves=any_histories)
def test_whatever_happened_before_the_round_closes_once_the_alive_deliver(settings, moves):
    running = settings.start()
    played = play(running, moves)
    version = running.version
    alive = sorted(members(played) | {0})
    played += play(running, [Join(0), *(Deliver(worker, age=0) for worker in alive)])
    assert running.version > version


@every_synchronous_strategy
def test_a_round_closes_when_the_last_worker_it_waited_for_leaves(settings):
    running = settings.start()
    everybody = list(range(WORKERS))
    play(running, [Join(worker) for worker in everybody])
    waited_for = everybody[running.k - 1 :]
    play(running, [Deliver(worker) for worker in everybody[: running.k - 1]])
    assert running.version == 0
    if running.k == 1:
        return  # nobody is in, so there is nothing a round could close with
    play(running, [Leave(worker) for worker in waited_for])
    assert running.version == 1


@every_strategy
def test_with_nobody_left_nothing_closes_and_it_goes_on_when_one_joins(settings):
    running = settings.start()
    everybody = range(WORKERS)
    play(running, [Join(worker) for worker in everybody])
    play(running, [Leave(worker) for worker in everybody])
    gone = play(running, [Deliver(worker) for worker in everybody])
    assert all(isinstance(action, Drop) for _, (action,) in gone)
    assert running.version == 0
    back = play(running, [Join(3), Deliver(3)])
    assert back[0][1] == [Send(workers=(3,))]
    assert [type(action) for action in back[1][1]] == [Step, Send]


@every_strategy
@quick
@given(moves=any_histories)
def test_the_same_events_give_the_same_actions(settings, moves):
    first, second = settings.start(), settings.start()
    assert play(first, moves) == play(second, moves)
    assert first.state_dict() == second.state_dict()


@every_strategy
@quick
@given(moves=any_histories, cut=st.integers(0, 40))
def test_a_copy_loaded_from_json_at_any_point_goes_on_identically(settings, moves, cut):
    running, copy = settings.start(), settings.start()
    play(running, moves[:cut])
    copy.load_state_dict(json.loads(json.dumps(running.state_dict())))
    assert copy.k == running.k
    assert play(copy, moves[cut:], start_seconds=cut) == play(running, moves[cut:], start_seconds=cut)
    assert json.dumps(copy.state_dict()) == json.dumps(running.state_dict())


@every_strategy
@quick
@given(moves=any_histories, ahead=st.integers(1, 3), worker=st.integers(0, WORKERS - 1))
def test_a_gradient_from_the_future_is_refused_and_changes_nothing(settings, moves, ahead, worker):
    running = settings.start()
    play(running, moves)
    before = json.dumps(running.state_dict())
    with pytest.raises(ValueError, match=f"version {running.version + ahead}.* version {running.version}"):
        running.handle(GradientArrived(worker=worker, version=running.version + ahead))
    assert json.dumps(running.state_dict()) == before


# -- batches of different sizes ------------------------------------------------------------------------------------


@every_synchronous_strategy
@quick
@given(moves=sized_histories)
def test_fresh_shares_are_the_samples_of_each_in_those_of_all(settings, moves):
    sizes = {}
    for event, actions in play(settings.start(), moves):
        if isinstance(event, GradientArrived) and not any(isinstance(action, Drop) for action in actions):
            sizes[event.worker, event.version] = event.samples  # one that came twice is dropped
        for step in (action for action in actions if isinstance(action, Step)):
            taken = [sizes[share.worker, share.version] for share in step.fresh]
            assert [share.weight for share in step.fresh] == [size / sum(taken) for size in taken]


@every_synchronous_strategy
@quick
@given(moves=sized_histories)
def test_the_late_weigh_what_was_missing_of_their_round(settings, moves):
    sizes = {}
    for event, actions in play(settings.start(), moves):
        if isinstance(event, GradientArrived) and not any(isinstance(action, Drop) for action in actions):
            sizes[event.worker, event.version] = event
        for step in (action for action in actions if isinstance(action, Step)):
            scaled = {"auto": "samples"}.get(asked := getattr(settings, "scale_partial", True), asked)
            late = [sizes[share.worker, share.version] for share in step.late]
            scales = [1.0 if scaled is True else each.blocks / each.blocks_done for each in late]
            unscaled = [share.weight / scale for share, scale in zip(step.late, scales, strict=True)]
            counted = [
                each.samples * each.blocks_done / each.blocks if scaled == "samples" else each.samples for each in late
            ]
            assert sum(unscaled) == pytest.approx(step.previous_mean_weight, abs=1e-12)
            assert step.previous_mean_weight < 1
            for one, other in itertools.combinations(range(len(late)), 2):
                assert unscaled[one] * counted[other] == pytest.approx(unscaled[other] * counted[one])


@every_strategy_with_shares
@quick
@given(moves=sized_histories)
def test_assigned_samples_are_a_whole_batch_of_those_alive_and_come_between_step_and_model(settings, moves):
    played = play(settings.start(), moves)
    for count, (_, actions) in enumerate(played, start=1):
        for place, action in enumerate(actions):
            if isinstance(action, Assign):
                alive = sorted(members(played[:count]))
                assert [type(each) for each in actions[place - 1 : place + 2]] == [Step, Assign, Send]
                assert [worker for worker, _ in action.samples] == alive
                assert sum(samples for _, samples in action.samples) == settings.shares.batch_size * len(alive)
                assert all(samples >= 4 and samples % 4 == 0 for _, samples in action.samples)


@every_synchronous_strategy
@quick
@given(moves=histories)
def test_where_nobody_says_a_size_nothing_is_assigned(settings, moves):
    assert not any(isinstance(action, Assign) for _, actions in play(settings.start(), moves) for action in actions)


@every_strategy_with_shares
def test_a_worker_that_is_slow_for_a_sample_gets_fewer_of_them(settings):
    running = settings.start()
    play(running, [Join(worker) for worker in range(WORKERS)])
    assigned = dict.fromkeys(range(WORKERS), 8)
    for version in range(12):
        fast = [worker for worker in range(WORKERS) if worker]
        for move in [*(Deliver(worker, samples=assigned[worker]) for worker in fast), Deliver(0, samples=assigned[0])]:
            late = running.version > version
            for _, actions in play(running, [Deliver(move.worker, int(late), 4, move.samples)]):
                for action in actions:
                    if isinstance(action, Assign):
                        assigned = dict(action.samples)
    assert assigned[0] == 4 < min(samples for worker, samples in assigned.items() if worker)
