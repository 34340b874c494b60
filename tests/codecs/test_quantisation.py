"""QSGD's promises: unbiased, of bounded second moment, on the grid, sparse.

Random numbers come from fixed seeds, so nothing here is a lottery. The bounds are still such that a right codec with
other seeds fails with a probability of at most one in a million for all tests of a kind together (Bernstein).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codecs import QSGD, Sparsifier
from tests.contracts.codec_variants import KINDS, LENGTHS, seeded, vector_of

pytestmark = pytest.mark.slow

SEEDS = 1000
FALSE_ALARMS = 1e-6

CODECS = [
    QSGD(levels=1, bucket=0),
    QSGD(levels=7, bucket=31),
    QSGD(levels=100, bucket=512),
    QSGD(levels=1, bucket=0, norm="l2"),
    QSGD(levels=4, bucket=100, norm="l2"),
    QSGD(levels=4, bucket=100, norm="l2", lossless="elias"),
]


def gradient_like(length: int) -> torch.Tensor:
    """Many small elements, some large ones, some zeros."""
    vector = torch.randn(length, generator=seeded(1)) ** 3
    vector[::17] = 0
    return vector


def bernstein(variances: torch.Tensor, trials: int, chances: int) -> torch.Tensor:
    """How far the mean of so many numbers, each within 1 of its expectation, may be from it, for all the chances."""
    x = math.log(2 * chances / FALSE_ALARMS)
    return x / (3 * trials) + (x**2 / (3 * trials) ** 2 + 2 * variances * x / trials).sqrt()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_mean_of_what_arrives_is_what_was_sent(codec):
    vector = gradient_like(300)
    norms = codec.encode(vector)[16 : 16 + 4 * codec._buckets(300)].view(torch.float32)
    step = (norms.repeat_interleave(codec.bucket or 300)[:300] / codec.levels).double()
    mean = torch.zeros(300, dtype=torch.float64)
    for seed in range(SEEDS):
        mean += codec.decode(codec.encode(vector, seeded(seed))).double() / SEEDS
    off = (mean - vector.double()) / step  # in levels
    up = (vector.double().abs() / step) % 1  # how often it must be rounded up
    variances = up * (1 - up)
    chances = len(CODECS) * (300 + 2)
    rounding = 2**-20 * codec.levels
    assert bool((off.abs() <= bernstein(variances, SEEDS, chances) + rounding).all())
    for towards in (off, off * vector.sign()):  # all elements together: upwards, and away from zero
        assert abs(towards.mean()) <= bernstein(variances.mean(), 300 * SEEDS, chances) + rounding


@pytest.mark.parametrize("levels", [1, 4, 40])
@pytest.mark.parametrize("vector", [torch.full((1000,), -0.3), gradient_like(1000)], ids=["constant", "gradient"])
def test_the_second_moment_is_within_the_lecture_s_bound(levels, vector):
    """For 1,000 equal elements and one level it is sqrt(n), 3% below the bound: 5 standard deviations of this mean."""
    codec, n = QSGD(levels=levels, bucket=0, norm="l2"), 1000
    moments = [codec.decode(codec.encode(vector, seeded(seed))).double().square().sum().item() for seed in range(1000)]
    bound = 1 + min(n / levels**2, math.sqrt(n) / levels)
    assert sum(moments) / len(moments) <= bound * vector.double().square().sum().item()


@settings(max_examples=60)
@given(
    levels=st.one_of(st.integers(1, 20), st.integers(1, 32_767)),
    bucket=st.sampled_from((1, 31, 512, 5000, 0)),
    norm=st.sampled_from(("max", "l2")),
    kind=st.sampled_from(KINDS),
    length=st.sampled_from(LENGTHS[1:]),
    seed=st.integers(0, 999),
)
def test_a_level_is_one_of_the_two_neighbours_and_keeps_its_sign(levels, bucket, norm, kind, length, seed):
    codec, vector = QSGD(levels=levels, bucket=bucket, norm=norm), vector_of(kind, length, seed)
    payload = codec.encode(vector, seeded(seed))
    norms = payload[16 : 16 + 4 * codec._buckets(length)].view(torch.float32).double()
    step = norms.repeat_interleave(bucket or length)[:length] / levels
    decoded = codec.decode(payload).double()
    assert bool((decoded * vector >= 0).all())
    ulp = levels * 2**-22 + torch.finfo(torch.float32).smallest_normal * 2**-23 / step.clamp(min=1e-300)
    assert bool((((decoded - vector.double()) / step.clamp(min=1e-300)).abs() <= 1 + ulp).all())
    assert bool((decoded[vector == 0] == 0).all())


def test_the_sparsifier_sends_at_most_sqrt_n_elements_on_average_and_just_so_many_of_equal_ones():
    """The number of those sent has a variance below sqrt(n): 5.6 standard deviations of the mean are one element."""
    n, codec = 1000, Sparsifier()
    for vector in (torch.full((n,), 0.1), gradient_like(n)):
        sent = [int(codec.decode(codec.encode(vector, seeded(seed))).count_nonzero()) for seed in range(1000)]
        expected = (vector.abs().double().sum() / vector.double().norm()).item()
        assert expected <= math.sqrt(n) * (1 + 1e-9)
        assert sum(sent) / len(sent) == pytest.approx(expected, abs=1)


def test_other_seeds_and_other_places_draw_other_numbers():
    vector, codec = torch.full((4096,), 0.5), QSGD(levels=1, bucket=0)
    vector[0] = 1.0
    drawn = torch.stack([codec.decode(codec.encode(vector, seeded(seed)))[1:] for seed in range(64)])
    signs = 2 * drawn - 1
    between_seeds = (signs @ signs.T / 4095).fill_diagonal_(0)
    assert float(between_seeds.abs().max()) < 0.1  # 2,016 pairs, a standard deviation of 1/64
    for shift in (1, 2, 31, 32, 64, 512):
        assert abs(float((signs[:, shift:] * signs[:, :-shift]).mean())) < 0.012  # 6 standard deviations
