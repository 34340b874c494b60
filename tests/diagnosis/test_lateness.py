"""Excess, savings and levels: fast against plain, and what holds of all of them."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paceline.diagnosis import lateness
from paceline.diagnosis.lateness import (
    PRICE_OF_A_CUT,
    as_the_others,
    excesses,
    kth_arrival,
    later_than_chance,
    levels,
    saved_by_round,
)

SECONDS = st.floats(0, 100, allow_nan=False, width=32)
ARRIVALS = arrays.arrays(
    np.float64,
    st.tuples(st.integers(1, 6), st.integers(2, 7)),
    elements=st.one_of(SECONDS, st.just(np.nan)),
)


@given(ARRIVALS)
def test_the_excess_is_the_arrival_minus_the_median_of_the_others(arrival):
    found = excesses(arrival)
    for row, column in np.ndindex(*arrival.shape):
        others = np.delete(arrival[row], column)
        if np.isnan(arrival[row, column]) or np.isnan(others).all():
            assert np.isnan(found[row, column])
        else:
            assert np.isclose(found[row, column], arrival[row, column] - np.nanmedian(others))


@given(ARRIVALS, st.data())
def test_nobody_comes_later_without_a_delay_and_those_who_are_not_suspected_come_as_before(arrival, data):
    members = np.array(data.draw(st.lists(st.booleans(), min_size=arrival.shape[1], max_size=arrival.shape[1])))
    k = np.array([data.draw(st.integers(1, arrival.shape[1])) for _ in arrival])
    saved = saved_by_round(arrival, k, members)
    assert (saved >= 0).all()
    if not members.any() or members.all():
        assert not saved.any()  # without anybody to take out, or to compare with, nothing is saved
        return
    moved = as_the_others(arrival, members)
    assert np.array_equal(np.isnan(moved), np.isnan(arrival))
    assert np.array_equal(moved[:, ~members], arrival[:, ~members], equal_nan=True)
    assert (np.nan_to_num(moved) <= np.nan_to_num(arrival) + 1e-9).all()
    assert np.allclose(saved, np.maximum(0.0, kth_arrival(arrival, k) - kth_arrival(moved, k)))


@given(st.integers(2, 6), st.integers(0, 2**20), st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([1.0, 0.4]))
def test_the_saving_is_that_of_the_same_noise_without_the_delay(workers, seed, delay, probability):
    """The noise is 1, and its difference of two workers 1.4: the delay is less, or as much, or more."""
    random = np.random.default_rng(seed)
    usual = random.normal(10.0, 1.0, (400, workers))
    slow = usual + delay * (np.arange(workers) == 1) * (random.random((400, 1)) < probability)
    k = np.full(400, workers)
    truth = (kth_arrival(slow, k) - kth_arrival(usual, k)).mean()
    found = saved_by_round(slow, k, np.arange(workers) == 1).mean()
    assert abs(found - truth) < 0.15 + 0.15 * truth


@given(ARRIVALS)
def test_a_round_goes_on_with_its_last_arrival_where_all_are_waited_for(arrival):
    last = kth_arrival(arrival, np.full(len(arrival), arrival.shape[1]))
    assert np.array_equal(last, np.nan_to_num(np.fmax.reduce(arrival, axis=1)))


@given(arrays.arrays(np.float64, st.integers(2, 8), elements=st.floats(-5, 5, width=16)))
def test_the_levels_are_the_cheapest_of_all_ways_to_cut(series):
    noise = max(1.4826 * np.median(np.abs(np.diff(series))) / np.sqrt(2), 0.1 * np.ptp(series), 1e-12)
    price = PRICE_OF_A_CUT * np.log(len(series)) * noise

    def cost(edges):
        return sum(np.abs(series[a:b] - np.median(series[a:b])).sum() for a, b in itertools.pairwise(edges)) + price * (
            len(edges) - 2
        )

    inner = range(1, len(series))
    cheapest = min(
        cost([0, *cuts, len(series)]) for count in range(len(series)) for cuts in itertools.combinations(inner, count)
    )
    found = levels(series)
    assert [span.first for span in found[1:]] == [span.last + 1 for span in found[:-1]]
    assert (found[0].first, found[-1].last) == (0, len(series) - 1)
    assert np.isclose(cost([span.first for span in found] + [len(series)]), cheapest)


def test_a_single_pause_moves_no_level():
    series = np.zeros(100)
    series[40] = 50.0
    assert len(levels(series)) == 1


def test_the_same_arrivals_in_another_unit_give_the_same_names():
    random = np.random.default_rng(3)
    arrival = random.lognormal(0, 0.2, (60, 5))
    arrival[:, 3] += 1.0
    assert later_than_chance(arrival).late == later_than_chance(1e-3 * arrival).late == (3,)
    shuffled = arrival[:, [3, 0, 1, 2, 4]]
    assert later_than_chance(shuffled).late == (0,)


@given(arrays.arrays(np.float64, st.integers(1, 40), elements=st.sampled_from([0.0, 0.1, 0.3, 2.0, -1.7, 1e6])))
def test_the_distances_of_every_stretch_are_those_from_its_median(series):
    found = lateness._distances(series.tolist())
    for first, last in itertools.combinations_with_replacement(range(len(series)), 2):
        stretch = series[first : last + 1]
        assert np.isclose(found[first, last], np.abs(stretch - np.median(stretch)).sum(), atol=1e-8)


def test_levels_ask_for_few_medians(monkeypatch):
    """Each of the 7,260 stretches of 120 bins asked for one: a tenth of a second, for each of 64 ranks."""
    asked, median = [], np.median
    monkeypatch.setattr(lateness.np, "median", lambda *given, **more: asked.append(0) or median(*given, **more))
    levels(np.random.default_rng(0).exponential(1.0, 2000))
    assert 0 < len(asked) <= 2 * lateness.BINS
