"""Shares by speed: the division of a batch, what is learned of a speed, and when new shares are given."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.events import GradientArrived
from paceline.strategies.shares import Cost, SharesBySpeed, Speed, SpeedEstimate, deal_rest, decide, divide

quick = settings(deadline=None, max_examples=100, derandomize=True)
fixed = st.sampled_from([0.0, 0.25, 1.0, 3.0])
per_sample = st.sampled_from([0.1, 0.25, 1.0, 1.5, 4.0])
costs = st.builds(Cost, sample_seconds=per_sample, fixed_seconds=fixed)


# -- the division of a batch -------------------------------------------------------------------------------------------


@st.composite
def divisions(draw):
    """Two to four ranks and a small batch, with limits of each rank that may contradict the batch."""
    ranks = draw(st.integers(2, 4))
    multiple = draw(st.sampled_from([1, 1, 2, 3]))
    least = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))
    most = draw(st.lists(st.none() | st.integers(1, 9), min_size=ranks, max_size=ranks))
    samples = multiple * draw(st.integers(1, 14 // multiple))
    return samples, draw(st.lists(costs, min_size=ranks, max_size=ranks)), least, most, multiple


def allowed(samples, ranks, least, most, multiple):
    """Every way to give the samples to the ranks within their limits."""
    choices = [
        [given for given in range(0, samples + 1, multiple) if low <= given and (high is None or given <= high)]
        for low, high in zip(least, most, strict=True)
    ]
    return [given for given in itertools.product(*choices) if sum(given) == samples]


@settings(deadline=None, max_examples=400, derandomize=True)
@given(division=divisions())
def test_no_other_division_is_quicker_and_what_cannot_be_divided_is_refused(division):
    samples, costs, least, most, multiple = division
    every = allowed(samples, len(costs), least, most, multiple)
    if not every:
        with pytest.raises(ValueError, match="can take between"):
            divide(samples, costs, least=least, most=most, multiple=multiple)
        return
    found = divide(samples, costs, least=least, most=most, multiple=multiple)
    assert tuple(found) in every  # it sums up to the batch, and every limit holds

    def slowest(given):
        return max(cost.seconds(each) for cost, each in zip(costs, given, strict=True))

    assert slowest(found) <= min(map(slowest, every)) * (1 + 1e-12)


@quick
@given(samples=st.integers(64, 100_000), costs=st.lists(costs, min_size=1, max_size=64))
def test_of_a_large_batch_no_sample_could_move_to_a_quicker_rank(samples, costs):
    found = divide(samples, costs, least=0)
    assert sum(found) == samples
    slowest = max(cost.seconds(each) for cost, each in zip(costs, found, strict=True) if each)
    assert all(cost.seconds(each + 1) >= slowest * (1 - 1e-12) for cost, each in zip(costs, found, strict=True))


@quick
@given(samples=st.integers(2, 40), multiple=st.integers(2, 7))
def test_a_batch_that_is_no_multiple_is_refused(samples, multiple):
    assume(samples % multiple)
    with pytest.raises(ValueError, match=f"multiple of {multiple} samples"):
        divide(samples, [Cost(sample_seconds=1.0)] * 2, multiple=multiple)


@quick
@given(shares=st.lists(st.integers(1, 60), min_size=1, max_size=8), least=st.integers(1, 4), data=st.data())
def test_the_rest_of_an_epoch_is_dealt_as_a_whole_in_proportion_and_to_nobody_too_little(shares, least, data):
    samples = data.draw(st.integers(1, sum(shares) + least - 1))
    dealt = deal_rest(shares, samples, least=least)
    taking = [rank for rank, each in enumerate(dealt) if each]
    assert sum(dealt) == samples
    assert all(dealt[rank] >= min(least, samples) for rank in taking)
    if len(taking) == len(shares) and min(dealt) > least:
        # A whole number next to its proportion, but for what limits and rounding push on to the others.
        for each, share in zip(dealt, shares, strict=True):
            assert abs(each - samples * share / sum(shares)) <= len(shares)
    smallest_taking = min(shares[rank] for rank in taking)
    assert all(shares[rank] <= smallest_taking for rank in range(len(shares)) if rank not in taking)


def test_a_rest_larger_than_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"at most a batch and 1 more \(samples=10, batch=8\)"):
        deal_rest([4, 4], 10, least=2)


# -- a speed -----------------------------------------------------------------------------------------------------------


def watched(*batches):
    """An estimate that has seen (samples, seconds, times) in order."""
    estimate = SpeedEstimate()
    for samples, seconds, times in batches:
        for _ in range(times):
            estimate.observe(samples, seconds)
    return estimate


@quick
@given(
    cost=st.builds(Cost, sample_seconds=st.floats(1e-4, 1.0), fixed_seconds=st.floats(0.0, 5.0, allow_subnormal=False)),
    sizes=st.tuples(st.integers(4, 200), st.integers(4, 200)),
    asked=st.integers(1, 400),
)
def test_two_sizes_without_noise_give_the_fixed_part_and_that_of_a_sample(cost, sizes, asked):
    first, second = sizes
    assume(abs(first - second) >= 0.15 * max(sizes))
    assume(cost.fixed_seconds <= 5 * cost.sample_seconds * max(sizes))  # within what an estimate takes for possible
    speed = watched((first, cost.seconds(first), 4), (second, cost.seconds(second), 4)).speed
    assert speed.sample_seconds == pytest.approx(cost.sample_seconds, rel=1e-6)
    assert speed.fixed_seconds == pytest.approx(cost.fixed_seconds, rel=1e-6, abs=1e-6 * cost.seconds(first))
    assert speed.predict(asked) == pytest.approx(cost.seconds(asked), rel=1e-6)


@quick
@given(spike=st.floats(1.5, 100.0), at=st.integers(3, 20), after=st.integers(0, 20))
def test_a_single_spike_changes_nothing(spike, at, after):
    calm = watched((16, 1.0, at + 1 + after)).speed
    spiked = watched((16, 1.0, at), (16, spike, 1), (16, 1.0, after)).speed
    assert spiked.seconds == calm.seconds == 1.0


@quick
@given(factor=st.sampled_from([0.25, 0.5, 2.0, 3.0, 10.0]), before=st.integers(3, 60), seed=st.integers(0, 99))
def test_a_lasting_change_is_followed_within_six_batches(factor, before, seed):
    noise = random.Random(seed)
    estimate = SpeedEstimate()
    for number in range(before + 6):
        slow = factor if number >= before else 1.0
        estimate.observe(16, slow * noise.uniform(0.98, 1.02))
    assert estimate.speed.seconds == pytest.approx(factor, rel=0.1)


@quick
@given(
    batches=st.lists(st.tuples(st.sampled_from([4, 8, 20]), st.floats(0.01, 9.0)), max_size=50), cut=st.integers(0, 50)
)
def test_an_estimate_that_is_kept_as_json_goes_on_as_it_would_have(batches, cut):
    whole, loaded = SpeedEstimate(), SpeedEstimate()
    for samples, seconds in batches[:cut]:
        whole.observe(samples, seconds)
    loaded.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for samples, seconds in batches[cut:]:
        whole.observe(samples, seconds)
        loaded.observe(samples, seconds)
    assert loaded.speed == whole.speed
    assert json.dumps(loaded.state_dict()) == json.dumps(whole.state_dict())


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clock_that_stands_still_or_was_turned_teaches_nothing(seconds):
    estimate = watched((8, 1.0, 4))
    before = estimate.speed
    estimate.observe(8, seconds)
    assert estimate.speed == before


# -- the decision ------------------------------------------------------------------------------------------------------

speeds = st.builds(
    Speed,
    samples=st.sampled_from([8, 16, 40]),
    seconds=st.floats(0.1, 10.0),
    error_seconds=st.floats(0.0, 0.05),
    offset=st.sampled_from([0.0, 4.0, 30.0]),
)


@quick
@given(ranks=st.lists(st.tuples(speeds, st.integers(1, 40)), min_size=1, max_size=8))
def test_what_is_decided_is_never_slower_than_the_present_by_its_own_prediction(ranks):
    known, shares = [speed for speed, _ in ranks], [share for _, share in ranks]
    decision = decide(known, shares)
    assert sum(decision.shares) == sum(shares)
    assert decision.seconds <= decision.present_seconds * (1 + 1e-12)
    assert decision.seconds <= decision.equal_seconds * (1 + 1e-12)
    assert decision.seconds == max(speed.predict(share) for speed, share in zip(known, decision.shares, strict=True))
    assert not (decision.pays and decision.seconds >= decision.present_seconds)


@quick
@given(ranks=st.lists(st.tuples(speeds, st.integers(1, 40)), min_size=1, max_size=6), data=st.data())
def test_a_decision_does_not_depend_on_the_order_of_the_ranks(ranks, data):
    order = data.draw(st.permutations(range(len(ranks))))
    decision = decide(*zip(*ranks, strict=True))
    shuffled = decide(*zip(*(ranks[rank] for rank in order), strict=True))
    assert shuffled.seconds == pytest.approx(decision.seconds, rel=1e-12)
    assert shuffled.present_seconds == decision.present_seconds
    assert shuffled.equal_seconds == decision.equal_seconds
    # Ranks that would be equally quick may change places, and no others.
    times = [speed.predict(share + 1) for (speed, _), share in zip(ranks, decision.shares, strict=True)]
    if len({round(time, 9) for time in times}) == len(times):
        assert [shuffled.shares[order.index(rank)] for rank in range(len(ranks))] == pytest.approx(
            decision.shares, abs=1
        )


# -- in rounds ---------------------------------------------------------------------------------------------------------


@quick
@given(
    factors=st.lists(st.sampled_from([0.5, 1.0, 1.0, 3.0]), min_size=6, max_size=6),
    comings=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30),
    multiple=st.sampled_from([1, 4]),
)
def test_with_joins_and_leaves_the_shares_are_always_those_of_a_whole_batch(factors, comings, multiple):
    settings = SharesBySpeed(batch_size=16, least=multiple, multiple=multiple, period=2)
    shares, members, sizes = settings.start(), {0, 1, 2}, dict.fromkeys(range(6), 16)
    for version, (worker, there) in enumerate([(0, True)] * 8 + comings):
        if there:
            members.add(worker)
        elif len(members) > 1 and worker in members:
            members.discard(worker)
            shares.forget(worker)
        for each in sorted(members):
            shares.arrived(
                GradientArrived(
                    worker=each, version=version, samples=sizes[each], work_seconds=factors[each] * sizes[each]
                )
            )
        assigned = shares.closed(version=version, members=members)
        if assigned is not None:
            assert set(assigned) == members
            assert sum(assigned.values()) == 16 * len(members)
            assert all(each >= settings.least and each % multiple == 0 for each in assigned.values())
            sizes.update(assigned)
        for gone in set(sizes) - members:
            sizes[gone] = 16
        assert shares.assigned == {} or assigned is None or shares.assigned == assigned


@quick
@given(factors=st.lists(st.floats(0.5, 4.0), min_size=2, max_size=6), cut=st.integers(0, 25))
def test_shares_that_are_kept_as_json_go_on_as_they_would_have(factors, cut):
    settings = SharesBySpeed(batch_size=24, period=3)
    shares, loaded = settings.start(), None
    sizes = dict.fromkeys(range(len(factors)), 24)
    for version in range(25):
        if version == cut:
            loaded = settings.start()
            loaded.load_state_dict(json.loads(json.dumps(shares.state_dict())))
        given_to = [each for each in (shares, loaded) if each is not None]
        for worker, factor in enumerate(factors):
            event = GradientArrived(
                worker=worker, version=version, samples=sizes[worker], work_seconds=factor * sizes[worker]
            )
            for each in given_to:
                each.arrived(event)
        answers = [each.closed(version=version, members=set(sizes)) for each in given_to]
        assert all(answer == answers[0] for answer in answers)
        sizes.update(answers[0] or {})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"batch_size": 0}, "batch_size must be 1 or more"),
        ({"batch_size": 9, "multiple": 4}, "multiple of 4"),
        ({"batch_size": 8, "least": 9}, "between least and most"),
        ({"batch_size": 8, "most": 7}, "between least and most"),
        ({"batch_size": 8, "period": 0}, "period must be 1 or more"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        SharesBySpeed(**wrong)
