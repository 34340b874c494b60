"""What the pruning policies promise, each by itself; tests/parity holds them against their references."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.pruning import PRUNINGS, PruningSettings, make_policy
from paceline.data.pruning.fine_pruning import FinePolicy, FineSchedule
from paceline.data.pruning.info_batch import InfoPolicy

EVERY_EPOCH = FineSchedule(window=50, starting_point=0, attenuation=1, block=1, count=1, prune=0.3)
SAMPLES = 40


def told(policy, epoch, seed=0, samples=None):
    """The policy learns random losses of everybody, or of these."""
    samples = np.arange(policy.samples) if samples is None else samples
    losses = np.random.default_rng((seed, epoch)).random(len(samples), np.float32)
    policy.judge(epoch, samples, losses, np.array([len(samples)]))


def same(first, second):
    return all(np.array_equal(first[name], second[name], equal_nan=first[name] is not None) for name in first)


# -- fine-pruning -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"window": 0}, r"window must be a whole number between 1 and 65,535 \(window=0\)"),
        ({"window": 65_536}, r"window must be a whole number between 1 and 65,535 \(window=65536\)"),
        ({"starting_point": 61}, r"starting_point must be between 0 and window \(starting_point=61, window=60\)"),
        ({"starting_point": -1}, r"starting_point must be a whole number of at least 0 \(starting_point=-1\)"),
        ({"attenuation": 0.5}, r"attenuation must be at least 1 \(attenuation=0.5\)"),
        ({"attenuation": float("nan")}, r"attenuation must be a finite number \(attenuation=nan\)"),
        ({"block": 0}, r"block must be a whole number of at least 1 \(block=0\)"),
        ({"count": 5}, r"count must be between 0 and block \(count=5, block=4\)"),
        ({"prune": 1.0}, r"prune, as a share, must be at least 0 and below 1 \(prune=1.0\)"),
        ({"prune": float("nan")}, r"prune must be a finite number \(prune=nan\)"),
        ({"prune": -1}, r"prune must be at least 0 \(prune=-1\)"),
    ],
)
def test_a_bad_schedule_is_refused(given_, message):
    with pytest.raises(ValueError, match=message):
        FineSchedule(**given_)


@pytest.mark.parametrize("tolerance", [-0.1, float("inf"), float("nan")])
def test_a_bad_tolerance_is_refused(tolerance):
    with pytest.raises(ValueError, match=rf"tolerance must be (at least 0|a finite number) \(tolerance={tolerance}\)"):
        FinePolicy(10, FineSchedule(), tolerance=tolerance)


def test_prune_as_a_number_must_leave_somebody():
    assert FineSchedule(prune=9).prune_num(10) == 9
    with pytest.raises(ValueError, match=r"prune must leave at least one sample \(prune=10, samples=10\)"):
        FinePolicy(10, FineSchedule(prune=10))


@settings(max_examples=200)
@given(hundredths=st.integers(0, 99), samples=st.integers(1, 10_000))
def test_a_share_is_what_was_written_not_its_nearest_double(hundredths, samples):
    assert FineSchedule(prune=hundredths / 100).prune_num(samples) == hundredths * samples // 100


def test_29_hundredths_of_100_are_29():
    assert int(0.29 * 100) == 28
    assert FineSchedule(prune=0.29).prune_num(100) == 29


@pytest.mark.parametrize("prune", [0, 1, 13, 39, 0.0, 0.3, 0.99])
def test_as_many_sit_out_as_were_asked_for(prune):
    policy = FinePolicy(SAMPLES, FineSchedule(window=50, starting_point=0, block=1, count=1, prune=prune))
    for epoch in range(1, 10):
        assert policy.decide(epoch).pruned == (policy.prune_num if epoch > 1 else 0)
        told(policy, epoch)


def test_nobody_sits_out_who_was_counted_less_often_than_one_who_stays():
    policy = FinePolicy(SAMPLES, EVERY_EPOCH)
    for epoch in range(1, 20):
        told(policy, epoch)
        keep = policy.decide(epoch + 1).keep
        assert policy.counts[~keep].min() >= policy.counts[keep].max()


def test_ties_are_drawn_and_not_broken_by_index():
    chosen = np.zeros(SAMPLES)
    for seed in range(200):
        policy = FinePolicy(SAMPLES, EVERY_EPOCH, seed=seed)
        policy.judge(1, np.arange(SAMPLES), np.ones(SAMPLES, np.float32), np.array([SAMPLES]))
        chosen += ~policy.decide(2).keep
    expected, spread = 200 * 0.3, (200 * 0.3 * 0.7) ** 0.5
    assert np.abs(chosen - expected).max() < 4.5 * spread


def test_a_window_forgets_and_begins_whole():
    policy = FinePolicy(4, FineSchedule(window=5, starting_point=0, block=1, count=1, prune=1))
    for epoch in range(1, 5):
        told(policy, epoch)
    assert policy.counts.any()
    assert policy.decide(5).keep is None
    policy.judge(5, np.arange(4), np.array([0, 0, 0, 1], np.float32), np.array([4]))
    assert policy.counts.tolist() == [0, 0, 0, 1]


def test_with_a_tolerance_that_nobody_exceeds_nobody_sits_out():
    policy = FinePolicy(4, EVERY_EPOCH, tolerance=0.5)
    for epoch in range(1, 6):
        assert policy.decide(epoch).keep is None
        policy.judge(epoch, np.arange(4), np.array([1, 1, 1, 1.1], np.float32), np.array([4]))


# -- InfoBatch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"ratio": 1.0}, r"ratio must be at least 0 and below 1 \(ratio=1.0\)"),
        ({"ratio": -0.1}, r"ratio must be at least 0 and below 1 \(ratio=-0.1\)"),
        ({"ratio": float("nan")}, r"ratio must be a finite number \(ratio=nan\)"),
        ({"delta": 1.1}, r"delta must be between 0 and 1 \(delta=1.1\)"),
        ({"delta": -0.1}, r"delta must be between 0 and 1 \(delta=-0.1\)"),
    ],
)
def test_a_bad_info_policy_is_refused(given_, message):
    with pytest.raises(ValueError, match=message):
        InfoPolicy(4, **given_)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_info_batches_weighted_sum_is_that_of_all_samples_on_average(ratio):
    gradients = np.random.default_rng(1).normal(size=SAMPLES)
    sums = []
    for seed in range(500):
        policy = InfoPolicy(SAMPLES, ratio=ratio, seed=seed)
        told(policy, 1)
        decision = policy.decide(2, 0.1)
        sums.append(float((decision.weights * gradients)[decision.keep].sum()))
    assert np.std(sums) > 0
    assert abs(np.mean(sums) - gradients.sum()) < 4 * np.std(sums) / len(sums) ** 0.5


def test_those_at_or_above_the_mean_never_sit_out_and_weigh_1():
    policy = InfoPolicy(SAMPLES, ratio=0.9)
    told(policy, 1)
    hard = policy.scores >= policy.scores.mean(dtype=np.float64)
    for epoch in range(2, 12):
        decision = policy.decide(epoch, 0.1)
        assert decision.keep[hard].all()
        assert set(decision.weights[hard]) == {1.0}
        assert set(decision.weights[~hard]) == {np.float32(10.0)}
        assert not decision.keep[~hard].all()


def test_the_last_epochs_are_whole():
    policy = InfoPolicy(SAMPLES, ratio=0.5, delta=0.875)
    told(policy, 1)
    pruned = [epoch for epoch in range(1, 201) if policy.decide(epoch, (epoch - 1) / 200).pruned]
    assert pruned == list(range(1, 176))
    assert policy.decide(176, 175 / 200).weights is None


def test_nobody_sits_out_before_it_was_seen():
    policy, seen = InfoPolicy(SAMPLES, ratio=0.9), np.arange(0, SAMPLES, 2)
    assert policy.decide(1).keep is None
    told(policy, 1, samples=seen)
    decision = policy.decide(2)
    assert decision.pruned > 0
    assert decision.keep[1::2].all()
    assert set(decision.weights[1::2]) == {1.0}


# -- all of them --------------------------------------------------------------------------------------------------


def policy_named(name, samples=SAMPLES, seed=0):
    always = {"window": 50, "starting_point": 0, "block": 1, "count": 1} if name == "fine-pruning" else {}
    return make_policy(PruningSettings(name=name, **always), samples, seed=seed)


@pytest.mark.parametrize("name", PRUNINGS)
def test_asking_changes_nothing(name):
    policy = policy_named(name)
    for epoch in range(1, 4):
        told(policy, epoch)
    before = policy.state_dict()
    first = policy.decide(4, 0.1)
    for epoch in (9, 60, 3, 4):
        policy.decide(epoch, 0.1)
    again = policy.decide(4, 0.1)
    assert first.pruned > 0
    assert np.array_equal(first.keep, again.keep)
    assert np.array_equal(first.weights, again.weights)
    assert same(before, policy.state_dict())


@pytest.mark.parametrize("name", PRUNINGS)
def test_who_sat_out_is_counted_and_a_state_shares_no_memory(name):
    policy = policy_named(name)
    told(policy, 1)
    decision = policy.decide(2, 0.1)
    state = policy.state_dict()
    policy.end_epoch(decision.keep)
    assert policy.times_pruned.tolist() == (~decision.keep).astype(int).tolist()
    assert not state["times_pruned"].any()
    other = policy_named(name)
    other.load_state_dict(state)
    other.end_epoch(decision.keep)
    assert not state["times_pruned"].any()
    assert same(other.state_dict(), policy.state_dict())


@pytest.mark.parametrize("name", PRUNINGS)
def test_another_seed_draws_other_lots(name):
    chosen = []
    for seed in range(2):
        policy = policy_named(name, seed=seed)
        told(policy, 1)
        chosen.append(policy.decide(2, 0.1).keep.tolist())
    assert chosen[0] != chosen[1]


@pytest.mark.parametrize("name", PRUNINGS)
def test_a_state_of_other_data_or_a_damaged_one_is_refused_and_changes_nothing(name):
    policy = policy_named(name)
    told(policy, 1)
    before = policy.state_dict()
    with pytest.raises(ValueError, match="this state is of 41 samples, and there are 40: it belongs to another"):
        policy.load_state_dict(policy_named(name, samples=SAMPLES + 1).state_dict())
    for key, value in before.items():
        if isinstance(value, np.ndarray):
            with pytest.raises(ValueError, match=f"{key} must be {SAMPLES} values"):
                policy.load_state_dict(before | {key: value[1:]})
            with pytest.raises(ValueError, match=f"{key} must be {SAMPLES} values"):
                policy.load_state_dict(before | {key: value.astype(np.float64)})
    assert same(before, policy.state_dict())


@pytest.mark.parametrize("samples", [0, -1, 2**31])
def test_an_impossible_number_of_samples_is_refused(samples):
    with pytest.raises(ValueError, match=rf"between 1 and 2,147,483,647 \(samples={samples}\)"):
        InfoPolicy(samples)
