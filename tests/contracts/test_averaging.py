"""What every member of the averaging family keeps to, in whatever order workers come."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.events import Asked, Release, Standing, Stepped
from paceline.strategies.averaging import AVERAGING, AveragingState
from tests.contracts.averaging_play import VARIANTS, Play

LEAVING = Standing.LEAVING
ON_THE_WAY = [Standing.SETTLING, Standing.FLUSHING]
everyone = pytest.mark.parametrize("member", VARIANTS.values(), ids=VARIANTS)
some = settings(max_examples=15)


@st.composite
def alike(draw):
    """Plans that ask for the same things in the same order, as one program on every worker does; steps differ."""
    workers = draw(st.integers(2, 5))
    asks = [*draw(st.lists(st.sampled_from(ON_THE_WAY), max_size=3)), LEAVING]
    return [[(draw(st.integers(0, 9)), standing) for standing in asks] for _ in range(workers)]


@st.composite
def unlike(draw):
    """Plans that have nothing in common but their end."""
    steps = st.integers(0, 9)
    plan = st.lists(st.tuples(steps, st.sampled_from(ON_THE_WAY)), max_size=3)
    return [[*draw(plan), (draw(steps), LEAVING)] for _ in range(draw(st.integers(2, 5)))]


seeds = st.integers(0, 2**32)


def test_every_member_is_among_the_variants():
    assert {member.name for member in VARIANTS.values()} == set(AVERAGING)


# -- laws -------------------------------------------------------------------------------------------------------------


def everybody_has_been_in_the_same_averages(member, plans, play):
    """And all have merged those in which somebody brought something, or everybody flushed."""
    merged = [
        number
        for number in play.averages
        if any(window.brought for window in play.windows(number))
        or min(window.standing for window in play.windows(number)) >= Standing.FLUSHING
    ]
    for runner in play.runners:
        assert [begin.number for begin in runner.begins] == list(range(len(play.averages)))
        assert [merge.number for merge in runner.merges] == merged


def every_step_is_brought_exactly_once(member, plans, play):
    for plan, runner in zip(plans, play.runners, strict=True):
        assert runner.taken == sum(steps for steps, _ in plan)
        assert sum(begin.window.brought for begin in runner.begins) == runner.taken


def the_weights_come_to_the_mean_number_of_steps(member, plans, play):
    """One unit of change in every step moves the shared model by the mean over all workers of their steps."""
    for merges in zip(*(runner.merges for runner in play.runners), strict=True):
        assert len({merge.weight for merge in merges}) == 1
        begins = [runner.begins[merges[0].number] for runner in play.runners]
        moved = sum(merges[0].weight * begin.scale * begin.window.brought for begin in begins)
        assert math.isclose(moved, sum(begin.window.brought for begin in begins) / len(play.runners))
        scaled = [begin.scale * begin.window.brought for begin in begins if begin.window.brought]
        assert not member.normalize or all(math.isclose(each, 1.0) for each in scaled)


def training_waits_where_the_member_says_so_and_else_only_when_asked(member, plans, play):
    for runner in play.runners:
        asked = [begin for begin in runner.begins if begin.window.standing is not Standing.TRAINING]
        if member.overlap:
            assert runner.waited <= len(asked) + len(runner.releases)
        else:
            assert runner.waited == len(runner.begins)
        if member.period is None:
            assert len(asked) == len(runner.begins)


LAWS = (
    everybody_has_been_in_the_same_averages,
    every_step_is_brought_exactly_once,
    the_weights_come_to_the_mean_number_of_steps,
    training_waits_where_the_member_says_so_and_else_only_when_asked,
)


@everyone
@some
@given(plans=alike() | unlike(), seed=seeds)
def test_every_history_ends_and_keeps_the_laws(member, plans, seed):
    play = Play(member, plans, seed=seed).run()
    for law in LAWS:  # one history for all laws: to make one up takes longer than to look at it
        law(member, plans, play)


@everyone
@some
@given(plans=alike(), seed=seeds)
def test_all_are_released_at_the_same_average_and_go_on_from_their_states_as_if_nothing_had_been(member, plans, seed):
    plain, reloaded = (Play(member, plans, seed=seed, reload=reload).run() for reload in (False, True))
    assert [standing for standing, _ in plain.runners[0].releases] == [standing for _, standing in plans[0]]
    assert all(runner.releases == plain.runners[0].releases for runner in plain.runners)
    assert reloaded.averages == plain.averages
    for one, other in zip(plain.runners, reloaded.runners, strict=True):
        assert (one.begins, one.merges, one.releases) == (other.begins, other.merges, other.releases)


@everyone
def test_one_worker_hears_nothing_but_that_it_is_released(member):
    course = AveragingState(member, workers=1)
    assert [course.handle(Stepped()) for _ in range(300)] == [[]] * 300
    for standing in (Standing.SETTLING, Standing.FLUSHING, LEAVING):
        assert course.handle(Asked(standing=standing)) == [Release(standing=standing)]
    assert course.finished


@everyone
def test_a_state_in_the_middle_of_an_average_is_refused(member):
    course = AveragingState(member, workers=2)
    course.handle(Stepped())
    course.handle(Asked(standing=Standing.FLUSHING))
    with pytest.raises(ValueError, match="ask for settling first"):
        course.state_dict()
