"""The coders of levels lose nothing, and believe nothing: what they are given is codes, or a PayloadError."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.codecs import QSGD, PayloadError, Sparsifier, elias, entropy

pytestmark = pytest.mark.slow

CODERS = {"elias": elias, "entropy": entropy}
LEVELS = [1, 2, 3, 4, 7, 8, 127, 1000, 32766, 32767]


def random_codes(elements, levels, density, seed):
    """Codes of which a share is other than zero; zeros come with either sign."""
    random = np.random.default_rng(seed)
    magnitudes = random.integers(1, levels + 1, elements) * (random.random(elements) < density)
    signs = random.integers(0, 2, elements) << levels.bit_length()
    return (magnitudes | signs).astype(np.int32)


def one_zero(codes, levels):
    """The codes as unsigned numbers, their zeros without a sign."""
    return np.where(codes & ((1 << levels.bit_length()) - 1), codes, 0).astype(np.uint32)


def assert_kept(coder, codes, levels):
    before = codes.copy()
    coded = coder.encode(codes, levels)
    decoded = coder.decode(coded, codes.size, levels)
    assert coded.dtype == np.uint8
    assert decoded.dtype == np.uint32
    assert np.array_equal(decoded, one_zero(codes, levels))
    assert np.array_equal(codes, before)


@pytest.mark.parametrize("coder", CODERS.values(), ids=CODERS)
@given(
    levels=st.sampled_from(LEVELS) | st.integers(1, 32767),
    elements=st.sampled_from([0, 1, 2, 31, 32, 33]) | st.integers(0, 3000),
    density=st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_what_is_coded_comes_back(coder, levels, elements, density, seed):
    assert_kept(coder, random_codes(elements, levels, density, seed), levels)


@pytest.mark.parametrize("coder", CODERS.values(), ids=CODERS)
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("elements", [0, 1, 31, 33, 5000])
def test_vectors_of_one_level_come_back(coder, levels, elements):
    sign = 1 << levels.bit_length()
    for code in (0, sign, levels, levels | sign, 1, 1 | sign):
        assert_kept(coder, np.full(elements, code, np.int32), levels)


@pytest.mark.parametrize("coder", CODERS.values(), ids=CODERS)
def test_a_few_levels_far_apart_come_back(coder):
    """Gaps of all lengths, and more symbols than go through the entropy coder in one call."""
    codes = np.zeros(2 * entropy.CHUNK + 1, np.int32)
    codes[[0, 1, 3, 7, 100, 4095, 4096, 70_000, 2 * entropy.CHUNK]] = 32767
    codes[::65_536] |= 32768
    assert_kept(coder, codes, 32767)


@given(elements=st.integers(0, 300), levels=st.sampled_from(LEVELS), density=st.floats(0, 1), seed=st.integers(0, 99))
def test_elias_writes_the_bits_that_a_slow_writer_of_strings_writes(elements, levels, density, seed):
    def gamma(number):
        low = f"{number:b}"[1:]
        return "0" * len(low) + "1" + low[::-1]  # the lowest bit comes first

    def delta(number):
        low = f"{number:b}"[1:]
        return gamma(len(low) + 1) + low[::-1]

    codes = random_codes(elements, levels, density, seed)
    written, last = "", -1
    for place in np.flatnonzero(one_zero(codes, levels)).tolist():
        sign, magnitude = divmod(int(codes[place]), 1 << levels.bit_length())
        written += delta(place - last) + str(sign) + (gamma(magnitude) if levels > 1 else "")
        last = place
    written += "0" * (-len(written) % 8)
    expected = [int(written[start : start + 8][::-1], 2) for start in range(0, len(written), 8)]
    assert elias.encode(codes, levels).tolist() == expected


@pytest.mark.parametrize("lossless", CODERS)
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bucket", [0, 512])
@pytest.mark.parametrize("levels", [1, 7, 127, 32767])
def test_all_coders_carry_the_values_that_packed_carries_in_no_more_bytes(lossless, norm, bucket, levels):
    for elements in (0, 1, 33, 5000):
        vector = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
        sent = {
            name: QSGD(levels, bucket, norm, name).encode(vector, torch.Generator().manual_seed(3))
            for name in ("packed", lossless)
        }
        assert sent[lossless].numel() <= sent["packed"].numel()
        assert torch.equal(QSGD().decode(sent[lossless]), QSGD().decode(sent["packed"]))


@pytest.mark.parametrize("lossless", CODERS)
def test_sparse_levels_are_sent_by_the_coder_that_was_asked_for(lossless):
    vector = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    packed, coded = (Sparsifier(name).encode(vector, torch.Generator().manual_seed(3)) for name in ("packed", lossless))
    assert coded.numel() < packed.numel() / 5
    assert torch.equal(QSGD().decode(coded), QSGD().decode(packed))


# -- bytes from outside ---------------------------------------------------------------------------------------------


def mutations(coded, random):
    """The bytes with some changed, cut off or added; now and then wholly random ones."""
    kind = random.integers(5)
    if kind == 0:
        return random.integers(0, 256, random.integers(0, 40), np.uint8)
    if kind == 1:
        return coded[: random.integers(0, coded.size + 1)]
    if kind == 2:
        return np.concatenate([coded, random.integers(0, 256, random.integers(1, 9), np.uint8)])
    changed = coded.copy()
    places = random.integers(0, min(coded.size, 12) if kind == 3 else coded.size, random.integers(1, 4))
    changed[places] ^= random.integers(1, 256, places.size, np.uint8)
    return changed


@pytest.mark.parametrize("coder", CODERS.values(), ids=CODERS)
@pytest.mark.parametrize("levels", [1, 7, 1000, 32767])
def test_whatever_bytes_come_they_are_levels_or_refused(coder, levels):
    random, refused = np.random.default_rng(levels), 0
    honest = [
        random_codes(elements, levels, density, elements) for elements, density in ((1, 1), (33, 0.3), (400, 0.3))
    ]
    sent = [(coder.encode(codes, levels), codes.size) for codes in honest]
    for trial in range(2000):
        coded, elements = sent[trial % 3]
        claimed = elements if trial % 4 else int(random.integers(0, 500))
        try:
            codes = coder.decode(mutations(coded, random), claimed, levels)
        except PayloadError:
            refused += 1
        else:
            assert codes.shape == (claimed,)
            assert not claimed or int((codes & ((1 << levels.bit_length()) - 1)).max()) <= levels
            assert not claimed or int(codes.max()) < 2 << levels.bit_length()
    assert refused > 500


@pytest.mark.parametrize("coder", CODERS.values(), ids=CODERS)
def test_another_number_of_elements_or_fewer_levels_than_were_sent_are_refused(coder):
    coded = coder.encode(np.full(100, 7, np.int32), 7)
    for elements, levels in ((99, 7), (100, 6), (0, 7)):
        with pytest.raises(PayloadError, match=r"elias|entropy"):
            coder.decode(coded, elements, levels)


@pytest.mark.parametrize("coded", [[0], [0, 0, 0], [64], [192], [255] * 9, [16, 0, 0, 0, 0, 0]])
def test_elias_refuses_bits_that_no_encoder_writes(coded):
    """Zeros that fill no byte up, gaps without end, levels beyond the last, elements beyond the last."""
    with pytest.raises(PayloadError, match="the elias code"):
        elias.decode(np.array(coded, np.uint8), 4, 3)


def test_entropy_finds_out_every_altered_byte_of_its_words():
    codes = random_codes(2000, 7, 0.5, 1)
    coded = entropy.encode(codes, 7)
    for place in range(coded.size // 2, coded.size):
        altered = coded.copy()
        altered[place] ^= 16
        with pytest.raises(PayloadError, match="the entropy code"):
            entropy.decode(altered, codes.size, 7)
