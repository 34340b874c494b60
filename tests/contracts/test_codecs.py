"""The laws of every codec: what it takes, what it gives, what it refuses, and what it remembers."""

import copy
import math
import re

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from paceline.codecs import CODECS, NotFiniteError, OneBit, PayloadError, TopK, machine_code, make_codec
from paceline.codecs.payload import HEADER_BYTES, read_header
from tests.contracts.codec_variants import (
    EVERY_CODEC,
    VARIANTS,
    carries,
    every_codec,
    every_plain_codec,
    gradients,
    seeded,
    shaped,
    vector_of,
)
from tests.long.hostile import besiege

seeds = st.integers(0, 2**32)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the last bit, the sign of zero too."""
    return torch.equal(left, right) and torch.equal(left.signbit(), right.signbit())


def test_every_codec_of_the_table_is_held_to_the_laws():
    assert VARIANTS.keys() == CODECS.keys()
    assert all(VARIANTS.values())


@every_codec
@settings(max_examples=40)
@given(gradient=gradients(), seed=seeds)
@example(gradient=torch.tensor(3.0), seed=0)
@example(gradient=torch.zeros(0, 5), seed=0)
def test_what_comes_back_is_flat_finite_and_as_long_and_the_payload_says_so(codec, gradient, seed):
    assume(carries(codec, gradient))
    codec, length, before = codec.fresh(), gradient.numel(), gradient.detach().clone()
    payload = codec.encode(gradient, seeded(seed))
    assert same(gradient, before)
    assert (payload.dtype, payload.dim(), payload.requires_grad) == (torch.uint8, 1, False)
    assert HEADER_BYTES <= payload.numel() <= codec.most_bytes(length)
    assert payload.numel() == codec.most_bytes(length) or not codec.fixed_size
    assert (read_header(payload).elements, read_header(payload).codec) == (length, codec.NUMBER)
    decoded = codec.decode(payload)
    assert (decoded.dtype, decoded.shape, decoded.requires_grad) == (torch.float32, (length,), False)
    assert bool(torch.isfinite(decoded).all())
    assert same(decoded, codec.decode(payload, expected_length=length))
    out = torch.full((length,), math.nan)
    assert codec.decode(payload, out=out).data_ptr() == out.data_ptr()
    assert same(decoded, out)


@every_codec
@pytest.mark.parametrize("length", [0, 1, 100, 5003])
def test_a_vector_that_is_not_as_long_as_expected_is_refused(codec, length):
    payload = codec.fresh().encode(torch.ones(length))
    told = re.escape(f"a vector of {length + 1:,} elements was expected (this one has {length:,})")
    with pytest.raises(PayloadError, match=told):
        codec.decode(payload, expected_length=length + 1)
    with pytest.raises(PayloadError, match=told):
        codec.decode(payload, out=torch.empty(length + 1))
    with pytest.raises(ValueError, match="out must be a flat float32 tensor"):
        codec.decode(payload, out=torch.empty(length, dtype=torch.float64))
    with pytest.raises(ValueError, match="out must be a flat float32 tensor"):
        codec.decode(payload, out=torch.empty(1, length))


@every_codec
@settings(max_examples=25)
@given(
    length=st.sampled_from((1, 5, 40, 600, 4100)),
    spoiled=st.sets(st.integers(0, 4099), min_size=1, max_size=4),
    number=st.sampled_from((math.nan, math.inf, -math.inf)),
)
def test_what_is_not_finite_is_refused_with_how_many_and_where_and_is_not_remembered(codec, length, spoiled, number):
    codec, places = codec.fresh(), sorted({place % length for place in spoiled})
    good = vector_of("normal", length, seed=1)
    bad = good.clone()
    bad[places] = number
    codec.encode(good, seeded(1))
    untouched = copy.deepcopy(codec)
    told = f"{len(places)} of {length:,} elements, the first is number {places[0]} ({number})"
    with pytest.raises(NotFiniteError, match=re.escape(told)):
        codec.encode(bad, seeded(2))
    assert same(codec.encode(good, seeded(3)), untouched.encode(good, seeded(3)))


@every_codec
def test_whole_numbers_are_no_gradient(codec):
    with pytest.raises(ValueError, match="real floating-point numbers"):
        codec.fresh().encode(torch.ones(3, dtype=torch.int64))


@every_codec
@settings(max_examples=5)
@given(kind=st.sampled_from(("normal", "mixed")), length=st.sampled_from((4097, 20_011, 30_000)), seed=seeds)
def test_the_same_seed_gives_the_same_bytes_on_any_number_of_threads(codec, kind, length, seed):
    vector = vector_of(kind, length, seed=7)
    assume(carries(codec, vector))
    payloads, vectors, before = [], [], (torch.get_num_threads(), machine_code.LEAST_ELEMENTS)
    machine_code.LEAST_ELEMENTS = 1
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            payloads.append(codec.fresh().encode(vector, seeded(seed)))
            vectors.append(codec.decode(payloads[-1]))
    finally:
        torch.set_num_threads(before[0])
        machine_code.LEAST_ELEMENTS = before[1]
    assert same(payloads[0], payloads[1])
    assert same(payloads[0], payloads[2])
    assert same(vectors[0], vectors[1])
    assert same(vectors[0], vectors[2])


@every_codec
@pytest.mark.parametrize("form", ["strided", "transposed", "parameter"])
def test_a_layout_in_memory_changes_nothing(codec, form):
    vector = vector_of("normal", 1026, seed=3)
    assert same(codec.fresh().encode(shaped(vector, form), seeded(5)), codec.fresh().encode(vector, seeded(5)))


@every_codec
@pytest.mark.parametrize("length", [1, 100, 4097])
def test_a_payload_may_lie_anywhere_in_memory(codec, length):
    payload = codec.fresh().encode(vector_of("normal", length, seed=4), seeded(6))
    decoded, size = codec.decode(payload), payload.numel()
    for offset in range(9):
        moved = torch.zeros(offset + size, dtype=torch.uint8)[offset:].copy_(payload)
        assert same(codec.decode(moved), decoded)
        moved = torch.frombuffer(bytearray(offset + size + 8), dtype=torch.uint8, offset=offset)
        aligned = moved[-moved.data_ptr() % 8 :][:size].copy_(payload)  # by its address, and not by its offset
        assert same(codec.decode(aligned), decoded)
    spread = torch.zeros(size, 2, dtype=torch.uint8)[:, 0].copy_(payload)
    assert same(codec.decode(spread), decoded)


@every_codec
def test_the_defaults_of_torch_are_not_taken_for_granted(codec):
    vector = vector_of("normal", 1000, seed=4)
    payload = codec.fresh().encode(vector, seeded(6))
    decoded = codec.decode(payload)
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            assert same(codec.fresh().encode(vector, seeded(6)), payload)
            assert same(codec.decode(payload), decoded)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        inferred = codec.fresh().encode(vector, seeded(6))
    assert same(codec.decode(inferred, out=torch.empty(1000)), decoded)


@every_codec
@settings(max_examples=8)
@given(length=st.sampled_from((1, 100, 4097)), seed=seeds)
def test_a_memory_goes_on_where_it_was_saved_and_a_fresh_one_is_empty_and_its_own(codec, length, seed):
    first, second, third = (vector_of("normal", length, seed=number) for number in range(3))
    codec = codec.fresh()
    opening = codec.encode(first, seeded(seed))
    codec.encode(second, seeded(seed))
    saved = codec.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in saved.values())
    kept = copy.deepcopy(saved)

    other = codec.fresh()
    assert same(other.encode(first, seeded(seed)), opening)  # it began with nothing, and this changed nothing of ours
    restored = codec.fresh()
    restored.load_state_dict(saved)
    following = codec.encode(third, seeded(seed))
    assert all(same(saved[name], kept[name]) for name in kept)  # what was saved is a copy
    assert same(restored.encode(third, seeded(seed)), following)
    assert same(codec.encode(third, seeded(seed)), restored.encode(third, seeded(seed)))


def test_a_codec_refuses_what_another_codec_sent():
    payloads = [(other.NUMBER, other.fresh().encode(torch.ones(40))) for other in EVERY_CODEC]
    for codec in EVERY_CODEC:
        for number, payload in payloads:
            if number != codec.NUMBER:
                with pytest.raises(PayloadError, match=f"codec number {number}, and this codec has number"):
                    codec.decode(payload)


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("qsgd", {"levels": 0}, "levels must be between 1 and 32,767 (levels=0)"),
        ("qsgd", {"levels": 32_768}, "levels must be between 1 and 32,767 (levels=32768)"),
        ("qsgd", {"bucket": -1}, "bucket must be between 0 (the whole vector) and 2**32 - 1 (bucket=-1)"),
        ("qsgd", {"bucket": 2**32}, "(bucket=4294967296)"),
        ("qsgd", {"norm": "l1"}, "unknown norm 'l1'"),
        ("qsgd", {"lossless": "zip"}, "unknown lossless 'zip'"),
        ("sparsifier", {"lossless": "zip"}, "unknown lossless 'zip'"),
        ("top-k", {"fraction": 0.0}, "fraction must be above 0, and 1 at most (fraction=0.0)"),
        ("top-k", {"fraction": 1.5}, "(fraction=1.5)"),
        ("top-k", {"fraction": math.nan}, "(fraction=nan)"),
        ("power-sgd", {"rank": 0}, "rank must be between 1 and 65,536 (rank=0)"),
        ("power-sgd", {"rank": 65_537}, "(rank=65537)"),
        ("int8-sum", {"bucket": -1}, "bucket must be between 0 (the whole vector) and 2**32 - 1 (bucket=-1)"),
        ("int8-sum", {"bucket": 2**32}, "(bucket=4294967296)"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_their_value_and_range(name, settings, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        make_codec(name, **settings)


@every_plain_codec
def test_hostile_payloads_are_refused_or_give_what_they_promise_in_the_memory_that_allows(codec):
    siege = besiege(codec, 1500)
    assert siege.breaches == []
    assert siege.refused > 300
    assert siege.decoded > 100  # else the attacks are too coarse to get anywhere


def test_a_siege_finds_what_gives_way(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("paceline.codecs.top_k.check_claim", lambda *_: None)  # anybody may have 16 GB
        assert any("memory" in breach for breach in besiege(TopK(), 1500).breaches)
    with monkeypatch.context() as patch:
        patch.setattr("paceline.codecs.one_bit.check_bytes", lambda *_: None)
        assert besiege(OneBit(), 300).breaches
