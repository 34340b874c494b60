"""The largest magnitudes travel, exactly those that a full sort gives, and everything else is zero."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.codecs import NotFiniteError, PayloadError, TopK, top_k
from paceline.codecs.payload import HEADER_BYTES, Header

SUBNORMAL = 1e-45
few_values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0000001, -2.5, SUBNORMAL, -SUBNORMAL, 1e-40, 3e38, -3e38])
any_values = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = st.lists(few_values | any_values, max_size=60).map(lambda values: torch.tensor(values, dtype=torch.float32))
fractions = st.floats(min_value=1e-3, max_value=1.0)


def sorted_reference(vector, kept):
    """Sort by (-|x|, index), keep the first."""
    values = vector.tolist()
    places = sorted(sorted(range(len(values)), key=lambda index: (-abs(values[index]), index))[:kept])
    dense = torch.zeros_like(vector)
    dense[places] = vector[places]
    return places, dense


def positions_of(payload):
    kept = (payload.numel() - HEADER_BYTES) // 8
    return payload[HEADER_BYTES : HEADER_BYTES + 4 * kept].numpy().view(np.uint32).tolist()


def bits(vector):
    return vector.view(torch.int32)


def by_torch(codec, vector):
    """The payload as the version for other devices makes it."""
    kept = codec.kept(vector.numel())
    payload = Header(codec=codec.NUMBER, elements=vector.numel(), first=kept).payload(8 * kept)
    if kept:
        top_k._select_by_torch(vector, *top_k._parts(payload[HEADER_BYTES:], kept))
    return payload


@given(vector=vectors, fraction=fractions)
def test_what_is_kept_is_what_a_full_sort_by_magnitude_and_place_gives(vector, fraction):
    codec = TopK(fraction=fraction)
    payload = codec.encode(vector)
    places, dense = sorted_reference(vector, codec.kept(vector.numel()))
    assert positions_of(payload) == places
    assert torch.equal(bits(codec.decode(payload)), bits(dense))
    assert payload.numel() == codec.most_bytes(vector.numel())


@given(vector=vectors, fraction=fractions)
def test_kernel_and_torch_agree_to_the_last_bit(vector, fraction):
    codec = TopK(fraction=fraction)
    payload = codec.encode(vector)
    assert torch.equal(payload, by_torch(codec, vector))
    parts = top_k._parts(payload[HEADER_BYTES:], codec.kept(vector.numel()))
    decoded = [place(*parts, vector.numel(), None) for place in (top_k._place_by_kernel, top_k._place_by_torch)]
    assert torch.equal(bits(decoded[0]), bits(decoded[1]))


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("kind", ["normal", "ties", "constant", "zeros", "tiny", "misleading", "hidden"])
def test_long_vectors_in_several_threads_agree_with_torch(kind, fraction):
    generator = torch.Generator().manual_seed(3)
    vector = torch.randn(200_003, generator=generator)
    vector = {
        "normal": vector,
        "ties": vector.round(),
        "constant": torch.full_like(vector, -0.25),
        "zeros": torch.zeros_like(vector),
        "tiny": vector * 1e-43,
        "misleading": vector.index_fill(0, torch.arange(0, vector.numel(), top_k._STRIDE), 1e9),
        "hidden": vector.index_fill(0, torch.arange(0, vector.numel(), top_k._STRIDE), 0.0),
    }[kind]
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        payload = TopK(fraction=fraction).encode(vector)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(payload, by_torch(TopK(fraction=fraction), vector))


def test_a_fraction_is_rounded_up_and_at_least_one_element_travels():
    assert [TopK(fraction=0.01).kept(elements) for elements in (0, 1, 100, 101, 1000)] == [0, 1, 1, 2, 10]
    assert TopK(fraction=1.0).kept(7) == 7
    with pytest.raises(ValueError, match=r"fraction=0\b"):
        TopK(fraction=0)
    for fraction in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="fraction must be above 0"):
            TopK(fraction=fraction)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_wherever_it_lies(bad):
    for length, place in ((10_000, 0), (10_000, 5000), (10_000, 9999), (140_000, 70_000)):
        vector = torch.ones(length)
        vector[place] = bad
        for encode in (TopK().encode, lambda vector: by_torch(TopK(), vector)):
            with pytest.raises(NotFiniteError, match=f"number {place}"):
                encode(vector)


def payload_of(elements, positions, values, kept=None):
    kept = len(positions) if kept is None else kept
    payload = Header(codec=TopK.NUMBER, elements=elements, first=kept).payload(4 * (len(positions) + len(values)))
    body = np.concatenate([np.array(positions, np.uint32), np.array(values, np.float32).view(np.uint32)])
    payload[HEADER_BYTES:] = torch.from_numpy(body.view(np.uint8))
    return payload


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (payload_of(4, [0, 1, 2, 3, 3], [1.0] * 5), "at most all 4"),
        (payload_of(4, [1, 1], [1.0, 2.0]), "must ascend"),
        (payload_of(4, [2, 1], [1.0, 2.0]), "must ascend"),
        (payload_of(4, [0, 4], [1.0, 2.0]), "below 4"),
        (payload_of(4, [0, 2**32 - 1], [1.0, 2.0]), "at 4,294,967,295"),
        (payload_of(4, [0, 1], [1.0, math.nan]), "finite"),
        (payload_of(4, [0, 1], [math.inf, 1.0]), "finite"),
        (payload_of(4, [0, 1], [1.0]), "16 bytes"),
        (payload_of(4, [0, 1], [1.0, 2.0], kept=1), "8 bytes"),
        (payload_of(2**32 - 1, [0], [1.0]), "give expected_length"),
    ],
)
def test_a_payload_that_lies_is_refused_and_out_is_untouched(payload, message):
    with pytest.raises(PayloadError, match=message):
        TopK().decode(payload)
    out = torch.full((4,), 7.0)
    with pytest.raises(PayloadError):
        TopK().decode(payload, out=out)
    assert bool((out == 7).all())


def test_the_torch_version_refuses_the_same_places():
    for positions, values in (([1, 1], [1.0, 2.0]), ([0, 4], [1.0, 2.0]), ([0, 1], [1.0, math.inf])):
        parts = top_k._parts(payload_of(4, positions, values)[HEADER_BYTES:], 2)
        with pytest.raises(PayloadError, match="number 1"):
            top_k._place_by_torch(*parts, 4, None)


def test_out_is_filled_and_returned_without_what_was_there_before():
    vector, out = torch.tensor([0.0, 5.0, 1.0, -6.0]), torch.full((4,), 9.0)
    codec = TopK(fraction=0.5)
    assert codec.decode(codec.encode(vector), out=out) is out
    assert out.tolist() == [0.0, 5.0, 0.0, -6.0]


def test_mutated_payloads_are_refused_or_give_the_promised_length():
    generator = np.random.default_rng(0)
    codec, refused, given_back = TopK(fraction=0.2), 0, 0
    original = codec.encode(torch.randn(60, generator=torch.Generator().manual_seed(0)))
    for _ in range(2000):
        payload = original.clone()
        for place in generator.integers(0, payload.numel(), generator.integers(1, 4)):
            payload[place] = int(generator.integers(256))
        payload = payload[: generator.integers(payload.numel() + 1)] if generator.random() < 0.2 else payload
        try:
            decoded = codec.decode(payload, expected_length=60)
        except ValueError:
            refused += 1
        else:
            given_back += 1
            assert decoded.shape == (60,)
            assert bool(torch.isfinite(decoded).all())
    assert refused > 100
    assert given_back > 100
