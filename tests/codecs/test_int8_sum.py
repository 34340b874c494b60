"""int8-sum's promises: unbiased, on the grid that all ranks share, never beyond a byte, the same total everywhere."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codecs import ErrorFeedback, Int8Sum, NotFiniteError, PayloadError, machine_code, tensors
from paceline.codecs.payload import HEADER_BYTES, Header
from tests.codecs.rings import added_up
from tests.contracts.codec_variants import KINDS, LENGTHS, seeded, vector_of

LEAST = 2.0**-149
EVERY_NUMBER = range(1, Int8Sum.most_ranks + 1)


def vectors_of(kind, length, world):
    return [vector_of(kind, length, seed=place) for place in range(world)]


def sums(vectors, bucket=512, seed=0, seen=None):
    generators = [seeded(seed * 1000 + place) for place in range(len(vectors))]
    codecs = [Int8Sum(bucket=bucket)] * len(vectors)
    return added_up(codecs, vectors, generators, seen)


def steps_of(vectors, bucket):
    """The distance of two levels at each element: that of the largest magnitude of its bucket on any rank."""
    largest = torch.stack(vectors).abs().amax(0)
    scales = tensors.bucket_norms(largest, max(1, min(bucket or largest.numel(), largest.numel())), "max")
    return scales.repeat_interleave(bucket or max(1, largest.numel()))[: largest.numel()].double() / (
        127 // len(vectors)
    )


@settings(max_examples=40)
@given(
    kind=st.sampled_from(KINDS), length=st.sampled_from(LENGTHS),
    world=st.sampled_from((1, 2, 3, 5, 42)), bucket=st.sampled_from((0, 31, 512)), seed=st.integers(0, 99),
)  # fmt: skip
def test_each_rank_s_part_is_a_neighbour_on_the_shared_grid_and_the_total_is_their_sum(
    kind, length, world, bucket, seed
):
    """A neighbour each time, and right in the mean: so the variance is a quarter of a step squared at the most."""
    vectors, seen = vectors_of(kind, length, world), []
    found = sums(vectors, bucket, seed, seen)
    steps = steps_of(vectors, bucket)
    for (total, part), vector in zip(found, vectors, strict=True):
        assert torch.equal(total, found[0][0])
        assert bool(((part - vector.double()).abs() <= steps * (1 + 1e-5) + LEAST).all())
        off_grid = part - steps * (part / steps.clamp(min=LEAST)).round()
        assert bool((off_grid.abs() <= 1e-5 * steps + LEAST).all())
    parts = torch.stack([part for _, part in found])
    assert bool(((parts.sum(0) - found[0][0]).abs() <= 2.0**-22 * parts.abs().sum(0) + (world + 1) * LEAST).all())
    if length:
        assert [rows.dtype for rows in seen] == [torch.float32, torch.int8]
        assert bool((seen[1].abs().amax() <= 127 // world).all())


@pytest.mark.parametrize("world", EVERY_NUMBER)
def test_no_number_of_ranks_overflows_whatever_they_bring(world):
    """All at the largest magnitude, of equal signs, and one rank alone with it, and a mixture."""
    same, mixed = torch.tensor([3.0, -3.0, 3.0, 0.0]), torch.tensor([3.0, 2.999, -1.5, 1e-30])
    for vectors in ([same] * world, [same, *[mixed] * (world - 1)], [mixed * (-1) ** place for place in range(world)]):
        seen = []
        total = sums(list(vectors), seen=seen)[0][0]
        levels = seen[1].int().sum(0)
        assert int(levels.abs().max()) <= 127
        assert torch.allclose(total, levels * (3.0 / (127 // world)), rtol=1e-6)
        assert bool((seen[1].int().sum(0) == seen[1].sum(0, dtype=torch.int8)).all())


@pytest.mark.parametrize("world", [1, 2, 7])
def test_the_mean_of_the_total_is_the_sum(world):
    """Over all elements and seeds together, and for each element within six standard errors of a quarter each."""
    vectors, seeds = vectors_of("normal", 200, world), 400
    exact, steps = torch.stack(vectors).double().sum(0), steps_of(vectors, 31)
    off = torch.stack([(sums(vectors, 31, seed)[0][0].double() - exact) / steps for seed in range(seeds)])
    error = math.sqrt(world / 4)  # of one total, in steps, at the most
    assert off.mean(0).abs().max() <= 6 * error / math.sqrt(seeds)
    assert abs(off.mean()) <= 5 * error / math.sqrt(off.numel())
    away = off * exact.sign()
    assert abs(away.mean()) <= 5 * error / math.sqrt(off.numel())
    assert off.var(0).mean() <= world / 4
    assert off.var(0).mean() >= world / 12  # else ranks would not round for themselves, or not at all


@pytest.mark.parametrize("length", [1, 31, 513, 4097, 9000])
@pytest.mark.parametrize("bucket", [0, 100, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_gives_the_bits_of_the_same_arithmetic_in_torch(length, bucket, kind):
    vector, codec = vector_of(kind, length, seed=3), Int8Sum(bucket=bucket)
    seed = int(torch.randint(2**62, (1,), generator=seeded(5)))
    wide = max(1, min(bucket or length, length))
    scales = tensors.bucket_norms(vector, wide, "max")
    levels = tensors.int8_levels(vector, scales, wide, 127, seed & 0xFFFFFFFF, seed >> 32)
    payload = codec.encode(vector, seeded(5))
    assert torch.equal(payload[HEADER_BYTES:], torch.cat([scales.view(torch.uint8), levels.view(torch.uint8)]))
    assert torch.equal(codec.decode(payload), tensors.int8_values(levels, scales, wide, 127))


def test_totals_do_not_depend_on_threads(monkeypatch):
    monkeypatch.setattr(machine_code, "LEAST_ELEMENTS", 1)
    before, vectors, totals = torch.get_num_threads(), vectors_of("normal", 20_000, 3), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            totals.append(sums(vectors)[0][0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(totals[0], totals[1])
    assert torch.equal(totals[0], totals[2])


def test_zeros_stay_zeros_and_nothing_is_nothing():
    assert not sums([torch.zeros(1000)] * 5)[0][0].any()
    assert sums([torch.zeros(0)] * 5)[0][0].shape == (0,)
    alone = [torch.zeros(3), torch.tensor([0.0, 5.0, 0.0])]
    assert sums(alone)[0][0].tolist() == [0.0, 5.0, 0.0]


def test_more_ranks_than_a_byte_has_room_for_are_refused_with_what_to_take():
    with pytest.raises(ValueError, match=r"at most 42 ranks \(there are 43\); take 'qsgd levels=127'"):
        next(Int8Sum().add_up(torch.ones(3), 43))
    assert 127 // Int8Sum.most_ranks == 3


def test_a_sum_beyond_float32_is_refused_and_large_numbers_that_cancel_are_not():
    large = torch.tensor([3.4e38, 1.0])
    with pytest.raises(NotFiniteError, match="beyond float32"):
        sums([large, large])
    assert sums([large, -large])[0][0].tolist() == [0.0, pytest.approx(0.0, abs=1e37)]


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_not_finite_is_refused_before_anything_travels(number):
    with pytest.raises(NotFiniteError, match="1 of 3 elements, the first is number 2"):
        next(Int8Sum().add_up(torch.tensor([1.0, 2.0, number]), 2))


def test_error_feedback_may_be_around_it():
    assert ErrorFeedback(Int8Sum()).plans == ("all-reduce",)
    assert ErrorFeedback(Int8Sum()).adds_exactly


@pytest.mark.parametrize(
    ("scale", "levels", "first", "told"),
    [
        (1.0, [1, -128], 0, "there is a -128"),
        (math.inf, [1, 1], 0, "finite and not negative"),
        (math.nan, [1, 1], 0, "finite and not negative"),
        (-1.0, [1, 1], 0, "finite and not negative"),
        (1.0, [1, 1, 1], 0, "must have 6 bytes"),
        (1.0, [1, 1], 7, "first parameter"),
    ],
)
def test_a_payload_that_lies_is_refused(scale, levels, first, told):
    payload = Header(codec=Int8Sum.NUMBER, elements=2, first=first, second=512).payload(4 + len(levels))
    payload[HEADER_BYTES:] = torch.cat(
        [torch.tensor([scale]).view(torch.uint8), torch.tensor(levels, dtype=torch.int8).view(torch.uint8)]
    )
    with pytest.raises(PayloadError, match=told):
        Int8Sum().decode(payload)


def test_a_receiver_goes_by_the_bucket_in_the_payload():
    payload = Int8Sum(bucket=7).encode(torch.randn(100, generator=seeded(1)), seeded(2))
    assert payload.numel() == Int8Sum(bucket=7).most_bytes(100) == 16 + 4 * 15 + 100
    assert torch.equal(Int8Sum().decode(payload), Int8Sum(bucket=7).decode(payload))
