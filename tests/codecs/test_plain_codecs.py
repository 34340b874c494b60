"""What goes in comes out: exactly, or within the codec's precision."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.codecs import CODECS, make_codec

vectors = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40).map(
    lambda values: torch.tensor(values, dtype=torch.float32)
)


@pytest.mark.parametrize("name", CODECS)
@given(vector=vectors)
def test_every_codec_gives_back_as_many_elements_all_finite_within_its_bound_of_bytes(name, vector):
    codec = make_codec(name)
    payload = codec.encode(vector)
    assert payload.dtype is torch.uint8
    assert payload.numel() <= codec.most_bytes(vector.numel())
    decoded = codec.decode(payload)
    assert decoded.dtype is torch.float32
    assert decoded.shape == vector.shape
    assert bool(torch.isfinite(decoded).all())


@given(vector=vectors)
def test_identity_is_exact_and_takes_no_copy(vector):
    codec = make_codec("identity")
    payload = codec.encode(vector)
    assert torch.equal(codec.decode(payload), vector)
    assert not vector.numel() or payload.data_ptr() == vector.data_ptr()


@given(vector=vectors)
def test_bfloat16_is_off_by_one_part_in_256_at_most(vector):
    codec = make_codec("bfloat16")
    decoded = codec.decode(codec.encode(vector))
    tiny = torch.finfo(torch.bfloat16).tiny
    assert bool(((decoded - vector).abs() <= vector.abs() / 256 + tiny).all())


@pytest.mark.parametrize("name", CODECS)
def test_infinities_and_nan_stay_what_they_are_so_that_they_can_be_refused(name):
    codec = make_codec(name)
    vector = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    assert torch.equal(codec.decode(codec.encode(vector)), vector) or torch.isnan(codec.decode(codec.encode(vector)))[0]
    assert not bool(torch.isfinite(codec.decode(codec.encode(vector))[1:3]).any())


@pytest.mark.parametrize("name", CODECS)
def test_a_torn_payload_is_refused(name):
    with pytest.raises(ValueError, match="whole elements"):
        make_codec(name).decode(torch.zeros(7, dtype=torch.uint8))
