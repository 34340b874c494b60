"""identity, bfloat16 and one-bit: what each promises beyond the laws of all codecs."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.codecs import BFloat16, Identity, OneBit
from paceline.codecs.payload import HEADER_BYTES

LARGEST = torch.finfo(torch.float32).max

vectors = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=70).map(
    lambda values: torch.tensor(values, dtype=torch.float32)
)


def sent(codec, vector):
    return codec.decode(codec.encode(vector))


@given(vector=vectors)
def test_identity_is_exact(vector):
    assert torch.equal(sent(Identity(), vector).view(torch.int32), vector.view(torch.int32))


@pytest.mark.parametrize("codec", [Identity(), BFloat16(), OneBit()], ids=str)
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
