"""Random numbers by place: uniform, independent of what else is drawn, and the same for ever."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from paceline.randomness import seed_for, torch_generator, uniform

FALSE_ALARM = 1e-6  # of each statistical test below; seeds are fixed, so a test that passed goes on passing
DRAWS = 50_000
GOLDEN_SEEDS = [3581690635855307741, 5232298418191868132, 3436536529774095425]
GOLDEN_DRAWS = [0.44326379516765013, 0.35228388552877754]


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1, -1])
def test_draws_are_uniform_along_every_place(seed):
    many = np.arange(DRAWS)
    for draws in (uniform(seed, many), uniform(seed, many, 3), uniform(seed, 3, many), uniform(seed, 3, many, 0)):
        assert stats.kstest(draws, "uniform").pvalue > FALSE_ALARM
        assert draws.min() >= 0.0
        assert draws.max() < 1.0


@pytest.mark.parametrize("bit", [0, 1, 20, 40, 52])
def test_every_bit_of_a_draw_is_a_fair_coin(bit):
    ones = int(((uniform(5, np.arange(DRAWS)) * 2.0**53).astype(np.uint64) >> np.uint64(52 - bit) & np.uint64(1)).sum())
    assert stats.binomtest(ones, DRAWS).pvalue > FALSE_ALARM


def test_neighbouring_places_and_seeds_are_independent():
    many = np.arange(DRAWS)
    here = uniform(9, many, 0)
    for there in (uniform(9, many + 1, 0), uniform(9, many, 1), uniform(10, many, 0), uniform(9, 0, many)):
        counts, _, _ = np.histogram2d(here, there, bins=10, range=[[0, 1], [0, 1]])
        assert stats.chisquare(counts.ravel()).pvalue > FALSE_ALARM


def test_no_two_places_of_a_large_run_share_a_draw():
    draws = uniform(1, np.arange(1000)[:, None], np.arange(500)[None, :])
    # 53 random bits: two of half a million are equal with probability 1.4e-5.
    assert len(np.unique(draws)) == draws.size


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    seed=st.integers(-(2**70), 2**70),
    workers=st.integers(1, 6),
    draws=st.integers(1, 6),
    places=st.lists(st.integers(0, 2**40), max_size=2),
)
def test_a_draw_does_not_depend_on_the_shape_it_is_drawn_in(seed, workers, draws, places):
    table = uniform(seed, np.arange(workers)[:, None], np.arange(draws)[None, :], *places)
    assert table.shape == (workers, draws)
    assert table.dtype == np.float64
    for worker in range(workers):
        for draw in range(draws):
            assert uniform(seed, worker, draw, *places).item() == table[worker, draw]


def test_draws_are_the_same_for_every_integer_type():
    wide = uniform(4, np.arange(10, dtype=np.int64))
    for dtype in (np.int32, np.uint8, np.uint64):
        assert np.array_equal(uniform(4, np.arange(10, dtype=dtype)), wide)


def test_arithmetic_modulo_two_to_the_64_warns_nobody():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uniform(2**64 - 1, 5)
        uniform(-3, 2**62, 2**62)
        uniform(7, np.array([2**62, 0]), -1)


def test_golden_values():
    """These numbers are in every recorded result: if they change, no run can be repeated."""
    assert [seed_for(0), seed_for(0, "model"), seed_for(7, "batches", 3, 0)] == GOLDEN_SEEDS
    assert uniform(0, np.arange(2), 5).tolist() == GOLDEN_DRAWS


def test_seeds_are_the_same_in_another_process():
    program = "from paceline.randomness import seed_for; print(seed_for(7, 'batches', 3, 0))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(printed) == seed_for(7, "batches", 3, 0)


def test_places_that_look_alike_have_different_seeds():
    places = [(), (0,), ("0",), (0, 0), ("00",), ("a", "b"), ("ab",), ("a", 1), ("a1",), (1, "a"), (-1,), (10,), (1, 0)]
    seeds = [seed_for(0, *place) for place in places]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_generator_is_seeded_by_its_place_and_leaves_torchs_own_alone():
    before = torch.get_rng_state()
    first, second, other = (torch.rand(4, generator=torch_generator(0, "x", n)) for n in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)
