"""The decider: the strategy's decisions whatever ranks report when, nobody waits for ever, and nothing is lost."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drivers.rounds.decider import ENDED, MOST_BAD_GRADIENTS, Decider
from paceline.drivers.rounds.messages import AllWaiting, Failed, GradientReady, Overdue, RoundClosed, Stop, Waiting
from paceline.drivers.rounds.outcomes import NOT_FINITE
from paceline.events import Drop, Joined, Step
from paceline.strategies import LGC, FastestK, Full
from paceline.traces.replay_events import hear

RANKS = 4
BLOCKS = 4
STRATEGIES = [
    Full(),
    FastestK(k=1),
    FastestK(k=3, warmup_rounds=2),
    FastestK(k="auto"),
    LGC(k=1),
    LGC(k=2),
    LGC(k=3, warmup_rounds=2),
    LGC(k=4),
    LGC(k=2, scale_partial=False),
    LGC(k=2, scale_partial="samples"),
    LGC(k="auto"),
]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
quick = settings(max_examples=40)


def ready(rank, version, *, draw=0, blocks_done=BLOCKS, finite=True, fingerprint=None, loss=None):
    return GradientReady(
        rank=rank,
        version=version,
        draw=draw,
        blocks_done=blocks_done,
        blocks=BLOCKS,
        work_seconds=0.1 + 0.01 * rank,
        held_seconds=0.1,
        fingerprint=1000 + version if fingerprint is None else fingerprint,
        finite=finite,
        loss_mean=loss,
        loss_variance=loss,
        samples=0 if loss is None else 8,
    )


class Rank:
    """What one rank does: it reports a gradient and waits for its round, or waits for all."""

    def __init__(self, place):
        self.place, self.version, self.draws = place, 0, 0
        self.waits_for = None  # a round, or "all", or "the end"
        self.gone = False

    def may_go_on(self, newest):
        if isinstance(self.waits_for, int) and newest > self.waits_for:
            self.waits_for = None
        return not self.gone and self.waits_for is None


class World:
    """A decider and its ranks, one report after the other; keeps all that was reported and all that became of it."""

    def __init__(self, strategy, ranks=RANKS):
        self.decider = Decider(strategy, range(ranks))
        self.decider.begin(0.0)
        self.ranks = [Rank(place) for place in range(ranks)]
        self.now, self.notices, self.reported = 0.0, [], Counter()
        self.newest = 0

    def hand_in(self, report):
        self.now += 0.25
        notices = self.decider.handle(report, self.now)
        for notice in notices:
            assert not isinstance(notice, Failed), notice
            if isinstance(notice, RoundClosed):
                assert notice.step.version == self.newest
                self.newest += 1
            else:
                assert notice.version == self.newest
                assert all(rank.gone or rank.waits_for in ("all", "the end") for rank in self.ranks)
                for rank in self.ranks:
                    if rank.waits_for == "all" or notice.leaving:
                        rank.gone, rank.waits_for, rank.version = notice.leaving, None, notice.version
        self.notices += notices
        return notices

    def deliver(self, rank, *, lag=0, finite=True, loss=None):
        """Take the newest model, or one a little older, and report a gradient of it: whole while its round is open."""
        rank.version = max(rank.version, self.newest - lag)
        blocks_done = BLOCKS if rank.version == self.newest else 1 + (rank.draws + rank.place) % BLOCKS
        rank.draws += 1
        self.reported[rank.place, rank.version, finite] += 1
        rank.waits_for = rank.version if finite else None
        version, draw, rank.version = rank.version, rank.draws - 1, rank.version + finite
        return self.hand_in(ready(rank.place, version, draw=draw, blocks_done=blocks_done, finite=finite, loss=loss))

    def wait(self, rank, *, leaving):
        rank.waits_for = "the end" if leaving else "all"
        return self.hand_in(
            Waiting(rank=rank.place, version=rank.version, fingerprint=1000 + rank.version, leaving=leaving)
        )

    def able(self):
        return [rank for rank in self.ranks if rank.may_go_on(self.newest)]

    def finish(self):
        """Let everybody leave, as soon as it can."""
        while able := self.able():
            self.wait(able[0], leaving=True)
        assert all(rank.gone for rank in self.ranks), "somebody waits for ever"

    def check_nothing_is_lost(self):
        became = Counter()
        for notice in self.notices:
            if isinstance(notice, RoundClosed):
                became.update((share.worker, share.version, True) for share in (*notice.step.fresh, *notice.step.late))
            became.update((drop.worker, drop.version, drop.reason != NOT_FINITE) for drop in notice.dropped)
        assert became == self.reported


def play(world, drawn):
    """One move for each byte: mostly gradients, now and then one that is not finite, a flush, or an end."""
    for byte in drawn:
        able = world.able()
        if not able:
            break
        rank, move = able[byte % len(able)], byte // 8
        if move < 24:
            world.deliver(rank, lag=move % 3, loss=0.5 + move / 10 if move % 2 else None)
        elif move < 26:
            world.deliver(rank, finite=False)
        elif move < 30:
            world.wait(rank, leaving=False)
        else:
            world.wait(rank, leaving=True)


plays = st.binary(min_size=5, max_size=60)


@every_strategy
@quick
@given(plays)
def test_whatever_ranks_do_everybody_is_released_and_every_gradient_is_used_once_or_dropped(strategy, drawn):
    world = World(strategy)
    play(world, drawn)
    world.finish()
    world.check_nothing_is_lost()


@every_strategy
@quick
@given(plays)
def test_the_decisions_are_those_of_the_strategy_itself(strategy, drawn):
    """As long as nobody waits: the same steps and drops as from the bare strategy, by the same arrivals."""
    world, alone = World(strategy), strategy.start()
    for rank in range(RANKS):
        alone.handle(Joined(worker=rank, at_seconds=0.0))
    steps, drops = [], []
    for byte in drawn:
        able = world.able()
        world.deliver(able[byte % len(able)], lag=byte // 8 % 3, loss=byte / 99 if byte % 2 else None)
        for arrival in world.decider._arrivals[-1:]:
            for action in hear(alone, arrival):
                steps += [action] if isinstance(action, Step) else []
                drops += [action] if isinstance(action, Drop) else []
        assert alone.state_dict() == world.decider.state.state_dict()
    assert [notice.step for notice in world.notices] == steps
    told = [drop for notice in world.notices for drop in notice.dropped]
    assert told == drops[: len(told)]
    world.finish()
    world.check_nothing_is_lost()


def interleavings(world, programs):
    """Yield the world at the end of every order in which ranks can do what their programs say."""
    able = [rank for rank in world.able() if programs[rank.place]]
    if not able:
        yield world, programs
    for rank in able:
        then = world if len(able) == 1 else copy.deepcopy(world)
        doing, *rest = programs[rank.place]
        mine = then.ranks[rank.place]
        if doing == "gradient":
            then.deliver(mine)
        else:
            then.wait(mine, leaving=doing == "close")
        yield from interleavings(then, programs | {rank.place: rest})


@pytest.mark.parametrize("strategy", [Full(), FastestK(k=1), LGC(k=2), LGC(k=2, warmup_rounds=1)], ids=str)
@pytest.mark.parametrize(
    "counts",
    [
        ([2, 1], [0, 2]),
        ([0, 2], [2, 0]),
        ([1, 1], [0, 1], [1, 0]),
        ([2], [1], [0]),
        ([1], [1], [0], [1]),
    ],
    ids=str,
)
def test_no_order_of_gradients_flushes_and_ends_leaves_anybody_waiting(strategy, counts):
    """All orders of a few reports: each rank has so many gradients before each flush, the last of which is close."""
    programs = {}
    for place, before_each in enumerate(counts):
        *until_last, _ = itertools.chain(*(["gradient"] * count + ["flush"] for count in before_each))
        programs[place] = [*until_last, "close"]
    ends = 0
    for world, left in interleavings(World(strategy, len(counts)), programs):
        assert not any(left.values()), "somebody waits for ever"
        assert all(rank.gone for rank in world.ranks)
        world.check_nothing_is_lost()
        ends += 1
    assert ends > 1


@every_strategy
@quick
@given(plays, plays)
def test_a_decider_goes_on_from_json_as_if_it_had_not_stopped(strategy, before, after):
    world = World(strategy)
    play(world, bytes(byte % 240 for byte in before))  # nobody leaves
    released = False
    while not released:
        released = any(isinstance(notice, AllWaiting) for notice in world.wait(world.able()[0], leaving=False))
    state = json.loads(json.dumps(world.decider.state_dict()))
    other = copy.deepcopy(world)
    other.decider = Decider(strategy, range(RANKS))
    other.decider.load_state_dict(state, version=world.newest)
    other.decider.begin(world.now)
    world.decider._opened[world.newest] = world.now  # the pause is no transfer
    for each in (world, other):
        play(each, after)
        each.finish()
        each.check_nothing_is_lost()
    assert world.notices == other.notices


def test_a_round_after_a_flush_waits_for_those_that_others_did_not_wait_for_in_it():
    world = World(Full(), ranks=2)
    first, second = world.ranks
    world.wait(first, leaving=False)
    (closed,) = world.deliver(second)
    assert [share.worker for share in closed.step.fresh] == [1]
    world.wait(second, leaving=False)
    assert world.deliver(second) == []
    (closed,) = world.deliver(first)
    assert [share.worker for share in closed.step.fresh] == [0, 1]


def test_late_gradients_that_are_dropped_at_the_end_are_in_no_state():
    world = World(LGC(k=1), ranks=2)
    first, second = world.ranks
    world.deliver(first)
    world.deliver(second, lag=1)
    world.finish()
    assert world.notices[-1].dropped == (Drop(worker=1, version=0, reason=ENDED),)
    assert world.decider.state_dict()["undelivered"] == []
    assert world.decider.state.state_dict()["late_scales"] == []


def test_a_state_of_another_round_is_refused():
    state = Decider(LGC(k=1), [0, 1]).state_dict()
    with pytest.raises(ValueError, match="of round 0, and the rank's of round 3"):
        Decider(LGC(k=1), [0, 1]).load_state_dict(state, version=3)


# -- what ends the rounds ----------------------------------------------------------------------------------------------


def decider_of(strategy, ranks=(0, 3, 5)):
    decider = Decider(strategy, ranks)
    decider.begin(0.0)
    return decider


@pytest.mark.parametrize(("first", "second"), [(0, 2), (2, 0)])
def test_ranks_that_drift_apart_are_both_named(first, second):
    decider = decider_of(Full())
    assert decider.handle(ready(first, 0, fingerprint=7), 0.1) == []
    (failed,) = decider.handle(ready(second, 0, fingerprint=8), 0.2)
    assert failed.kind == "drift"
    assert failed.reason.startswith("rank 0 and rank 5 have different parameters in round 0")


def test_ranks_with_different_learning_rates_are_named_before_their_parameters_differ():
    decider = decider_of(Full())
    assert decider.handle(replace(ready(0, 0), rates=(0.1,)), 0.1) == []
    (failed,) = decider.handle(replace(ready(2, 0), rates=(0.2,)), 0.2)
    assert failed.kind == "drift"
    assert failed.reason.startswith("rank 0 and rank 5 have different learning rates in round 0: (0.1,) and (0.2,)")


def test_all_ranks_may_set_other_rates_where_they_are_together():
    """And a gradient that is not finite is in no step, whatever the rate was."""
    decider = decider_of(Full(), ranks=(0, 3))

    def handle(place, rate, finite=True):
        return decider.handle(replace(ready(place, 0, fingerprint=7, finite=finite), rates=(rate,)), 0.1)

    assert handle(0, 0.1) == []
    assert decider.handle(Waiting(rank=0, version=0, fingerprint=7), 0.2) == []
    assert isinstance(decider.handle(Waiting(rank=1, version=0, fingerprint=7), 0.2)[0], AllWaiting)
    assert handle(0, 0.3, finite=False) == []
    assert handle(0, 0.2) == []
    assert isinstance(handle(1, 0.2)[0], RoundClosed)


def test_ranks_that_come_to_a_flush_with_different_parameters_are_named():
    decider = Decider(Full(), ranks=[4, 7])
    decider.begin(0.0)
    assert decider.handle(Waiting(rank=0, version=0, fingerprint=7), 0.1) == []
    (failed,) = decider.handle(Waiting(rank=1, version=0, fingerprint=8), 0.2)
    assert failed.kind == "drift"
    assert "rank 4 and rank 7 have different parameters in round 0" in failed.reason


def test_ranks_whose_epochs_end_at_different_rounds_are_named():
    decider = Decider(FastestK(k=1), ranks=[4, 7])
    decider.begin(0.0)
    decider.handle(replace(ready(0, 0), epoch=1, epoch_ends=10), 0.1)
    (failed,) = decider.handle(replace(ready(1, 0), epoch=1, epoch_ends=12), 0.2)
    assert failed.kind == "drift"
    assert "epoch 1 ends at round 10 on rank 4, and at round 12 on rank 7" in failed.reason


def test_drift_is_seen_in_a_late_gradient_too():
    decider = decider_of(LGC(k=1))
    decider.handle(ready(0, 0, fingerprint=7), 0.1)
    decider.handle(ready(0, 1, fingerprint=9), 0.2)
    (failed,) = decider.handle(ready(1, 0, fingerprint=8), 0.3)
    assert failed.reason.startswith("rank 0 and rank 3 have different parameters in round 0")


def test_a_rank_ahead_of_the_rounds_is_named():
    (failed,) = decider_of(Full()).handle(ready(1, 4), 0.1)
    assert failed.kind == "drift"
    assert "rank 3 has a model of round 4, and the rounds are at 0" in failed.reason


def test_one_rank_with_bad_numbers_is_named_after_a_while_and_the_others_go_on():
    decider = decider_of(LGC(k=2))
    for number in range(MOST_BAD_GRADIENTS - 1):
        assert decider.handle(ready(1, number, finite=False), 0.1) == []
        decider.handle(ready(0, number), 0.2)
        (closed,) = decider.handle(ready(2, number), 0.3)
        assert closed.dropped == (Drop(worker=1, version=number, reason=NOT_FINITE),)
    (failed,) = decider.handle(ready(1, 19, finite=False), 0.1)
    assert failed.kind == "diverged"
    assert failed.reason.startswith("rank 3 has had 20 gradients in a row that are not finite")


def test_a_good_gradient_ends_the_row_of_bad_ones():
    decider = decider_of(FastestK(k=3))
    for _ in range(MOST_BAD_GRADIENTS - 1):
        assert decider.handle(ready(1, 0, finite=False), 0.1) == []
    decider.handle(ready(1, 0), 0.2)
    decider.handle(ready(0, 0), 0.2)
    decider.handle(ready(2, 0), 0.2)
    for _ in range(MOST_BAD_GRADIENTS - 1):
        assert decider.handle(ready(1, 1, finite=False), 0.3) == []


def test_all_ranks_may_overflow_for_a_while_as_a_loss_scaler_lets_them_and_then_it_is_the_learning_rate():
    decider = decider_of(Full())
    reports = [ready(rank, 0, finite=False) for _ in range(MOST_BAD_GRADIENTS) for rank in range(3)]
    told = [decider.handle(report, 0.1) for report in reports]
    assert not any(told[: 3 * (MOST_BAD_GRADIENTS - 1)])
    (failed,) = told[3 * (MOST_BAD_GRADIENTS - 1)]
    assert failed.kind == "diverged"
    assert failed.reason == "the gradients of all ranks are not finite in round 0: lower the learning rate"


def test_who_has_not_delivered_is_named_but_nobody_whom_the_round_does_not_wait_for():
    decider = decider_of(LGC(k=3), ranks=(0, 3, 5, 6))
    decider.handle(ready(0, 0), 0.1)
    decider.handle(Waiting(rank=1, version=0, fingerprint=1000), 0.2)
    (failed,) = decider.handle(Overdue(rank=0, version=0, seconds=9.0), 9.1)
    assert failed.kind == "late"
    assert (
        "round 0 did not close in 9 s: 3 gradients close it, and rank 5 and rank 6 have not delivered" in failed.reason
    )


def test_who_has_not_come_to_a_flush_is_named():
    decider = decider_of(LGC(k=1))
    decider.handle(Waiting(rank=0, version=0, fingerprint=1000), 0.1)
    (failed,) = decider.handle(Overdue(rank=0, version=0, seconds=9.0, flushing=True), 9.1)
    assert failed.reason.startswith("rank 0 waited 9 s in a flush: rank 3 and rank 5 have not come")


def test_an_overdue_round_that_has_closed_meanwhile_is_none():
    decider = decider_of(LGC(k=1))
    decider.handle(ready(0, 0), 0.1)
    assert decider.handle(Overdue(rank=1, version=0, seconds=9.0), 9.1) == []
    assert decider.handle(Stop(), 9.2) == []
