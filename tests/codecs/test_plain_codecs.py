"""identity, bfloat16, float16 and one-bit: what each promises beyond the laws of all codecs."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.codecs import BFloat16, ErrorFeedback, Float16, Identity, NotFiniteError, OneBit, PayloadError
from paceline.codecs.payload import HEADER_BYTES, Header
from tests.codecs.rings import added_up

LARGEST = torch.finfo(torch.float32).max

vectors = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=70).map(
    lambda values: torch.tensor(values, dtype=torch.float32)
)


def sent(codec, vector):
    return codec.decode(codec.encode(vector))


@given(vector=vectors)
def test_identity_is_exact(vector):
    assert torch.equal(sent(Identity(), vector).view(torch.int32), vector.view(torch.int32))


@pytest.mark.parametrize("codec", [Identity(), BFloat16(), Float16(), OneBit()], ids=str)
def test_a_payload_is_a_copy_that_the_next_gradient_may_not_change(codec):
    vector = torch.randn(100, generator=torch.Generator().manual_seed(0))
    payload = codec.encode(vector)
    before = payload.clone()
    vector.zero_()
    assert torch.equal(payload, before)


@given(vector=vectors)
@example(vector=torch.tensor([LARGEST, -LARGEST, 3.39e38, 1.0]))
def test_bfloat16_is_off_by_one_part_in_256_at_most_and_never_infinite(vector):
    decoded = sent(BFloat16(), vector)
    tiny = torch.finfo(torch.bfloat16).tiny
    assert bool(((decoded - vector).abs() <= vector.abs() / 256 + tiny).all())
    assert bool(torch.isfinite(decoded).all())


@given(vector=vectors)
@example(vector=torch.tensor([65_504.0, -65_504.0, 2.0**-24, 2.0**-25, 2.0**-14]))
def test_float16_is_off_by_one_part_in_2048_or_by_half_its_smallest_number_and_refuses_what_is_beyond_it(vector):
    if bool((vector.abs() > 65_504).any()):
        with pytest.raises(NotFiniteError, match=r"float16 carries numbers up to 65,504 \(.*take bfloat16"):
            Float16().encode(vector)
        vector = vector.clamp(-65_504, 65_504)
    wrong = (sent(Float16(), vector) - vector).abs()
    assert bool((wrong <= (vector.abs() / 2048).clamp(min=2.0**-25)).all())


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_float16_refuses_a_payload_that_is_not_finite(number):
    payload = Header(codec=Float16.NUMBER, elements=3).payload(6)
    payload[HEADER_BYTES:] = torch.tensor([1.0, number, 2.0], dtype=torch.float16).view(torch.uint8)
    with pytest.raises(PayloadError, match="finite"):
        Float16().decode(payload)


# -- added up on their way ------------------------------------------------------------------------------------------

ROUNDING = {Identity(): 2.0**-24, BFloat16(): 2.0**-8, Float16(): 2.0**-11}
in_range = st.one_of(st.floats(-65_000, 65_000, width=32), st.floats(-(2.0**-10), 2.0**-10, width=32))


@pytest.mark.parametrize("codec", ROUNDING, ids=str)
@settings(max_examples=60)
@given(
    rows=st.integers(1, 9).flatmap(
        lambda n: st.lists(st.lists(in_range, min_size=5, max_size=5), min_size=n, max_size=n)
    )
)
@example(rows=[[65_504.0] * 5] * 8)
@example(rows=[[2.0**-25, 2.0**-24, -(2.0**-14), 1e-7, 0.0]] * 7)
def test_the_sum_is_off_by_what_every_hop_may_round_and_the_same_on_all_ranks(codec, rows):
    vectors, world, rounding = [torch.tensor(row) for row in rows], len(rows), ROUNDING[codec]
    found = added_up([codec] * world, vectors)
    exact, sizes = (torch.stack(vectors).double() for _ in range(2))
    allowed = ((1 + rounding) ** world * (1 + 2.0**-24) ** 2 - 1) * sizes.abs().sum(0)
    if isinstance(codec, Float16):
        allowed += world**2 * 2.0**-25
    elif isinstance(codec, BFloat16):
        allowed += world * 2.0**-134  # half its smallest number
    assert bool(((found[0][0].double() - exact.sum(0)).abs() <= allowed).all())
    for total, _ in found:
        assert torch.equal(total, found[0][0])
        assert total.dtype is torch.float32


@pytest.mark.parametrize("codec", ROUNDING, ids=str)
def test_what_travels_is_an_element_each_and_a_place_for_each_rank(codec):
    seen = []
    added_up([codec] * 3, [torch.ones(1000)] * 3, seen=seen)
    assert [(rows.shape, rows.dtype) for rows in seen] == [((3, 1003), codec.DTYPE)]


@pytest.mark.parametrize(("codec", "number"), [(Identity(), 3e38), (BFloat16(), 3e38), (Float16(), 65_504.0)], ids=str)
def test_a_sum_out_of_range_is_refused_with_its_place(codec, number):
    """Three thirds of the largest float16 are beyond it, for a third rounds up."""
    rows = [torch.tensor([1.0, number, 0.0])] * 3
    with pytest.raises(NotFiniteError, match="1 of 3 elements, the first is number 1"):
        added_up([codec] * 3, rows)


@pytest.mark.parametrize("codec", ROUNDING, ids=str)
def test_a_vector_that_is_not_finite_is_refused_before_anything_travels(codec):
    with pytest.raises(NotFiniteError, match="the first is number 1 "):
        next(codec.add_up(torch.tensor([1.0, torch.nan]), 4))
    with pytest.raises(NotFiniteError, match="70000"):
        next(Float16().add_up(torch.tensor([1.0, 70_000.0]), 4))  # though a fourth of it would fit


def test_error_feedback_leaves_out_sums_that_round_on_their_way():
    assert ErrorFeedback(Identity()).plans == ("all-reduce", "gather", "two-step")
    assert ErrorFeedback(Float16()).plans == ErrorFeedback(BFloat16()).plans == ("gather", "two-step")
    assert not ErrorFeedback(Float16()).adds_exactly


# -- one-bit --------------------------------------------------------------------------------------------------------


def test_one_bit_gives_the_lecture_s_example():
    decoded = sent(OneBit(), torch.tensor([0.1, 0.15, -0.2, 20, 15.3, -1.222]))
    assert decoded.tolist() == pytest.approx([8.8875, 8.8875, -0.711, 8.8875, 8.8875, -0.711])


@settings(max_examples=30)
@given(length=st.one_of(st.integers(0, 200), st.integers(0, 20_000)))
def test_one_bit_takes_a_bit_an_element_two_floats_and_a_header(length):
    expected_bytes = HEADER_BYTES + 8 + -(-length // 8)
    assert OneBit().encode(torch.ones(length)).numel() == OneBit().most_bytes(length) == expected_bytes


@given(vector=vectors)
def test_one_bit_keeps_the_sum_of_either_sign(vector):
    decoded = sent(OneBit(), vector).double()
    assert torch.equal(decoded >= 0, (vector >= 0) | (decoded == 0))  # a mean may be too small for a float32
    for kind in (vector >= 0, vector < 0):
        exact = vector[kind].double().sum().item()
        assert decoded[kind].sum().item() == pytest.approx(exact, rel=1e-6, abs=1e-43)
