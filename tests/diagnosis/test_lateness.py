"""Excess, savings and levels: fast against plain, and what holds of all of them."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paceline.diagnosis.lateness import (
    PRICE_OF_A_CUT,
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
def test_what_is_saved_is_the_kth_arrival_of_before_minus_that_of_after(arrival, data):
    members = np.array(data.draw(st.lists(st.booleans(), min_size=arrival.shape[1], max_size=arrival.shape[1])))
    k = np.array([data.draw(st.integers(1, arrival.shape[1])) for _ in arrival])
    saved = saved_by_round(arrival, k, members)
    for row, times in enumerate(arrival):
        others = times[~members]
        if not members.any() or members.all() or np.isnan(others).all():
            assert saved[row] == 0  # without anybody to remove nothing is saved
            continue
        moved = np.where(members, np.fmin(times, np.nanmedian(others)), times)
        moved = np.where(np.isnan(times), np.nan, moved)
        there = np.sort(times[~np.isnan(times)])
        after = np.sort(moved[~np.isnan(times)])
        at = min(k[row], len(there)) - 1
        assert np.isclose(saved[row], there[at] - after[at])
        excess = np.nanmax(times[members] - np.nanmedian(others)) if not np.isnan(times[members]).all() else 0.0
        assert -1e-9 <= saved[row] <= max(0.0, excess) + 1e-9  # never more than the slowest's excess


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
