"""Three versions of the quantising codecs, to the last bit: kernels, torch's operations, and plain Python."""

from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.codecs import QSGD, OneBit, one_bit, qsgd, tensors
from tests.contracts.codec_variants import KINDS, LENGTHS, seeded, vector_of
from tests.oracles import strategies as reference

BUCKETS = (1, 2, 31, 100, 512, 4096, 5000, 0, 2**32 - 1)

vectors = st.builds(vector_of, st.sampled_from(KINDS), st.sampled_from(LENGTHS), st.integers(0, 999))
short_vectors = st.builds(vector_of, st.sampled_from(KINDS), st.integers(0, 300), st.integers(0, 999))
codecs = st.builds(
    QSGD,
    levels=st.one_of(st.integers(1, 40), st.integers(1, 32_767), st.just(32_767)),
    bucket=st.sampled_from(BUCKETS),
    norm=st.sampled_from(qsgd.NORMS),
)
seeds = st.integers(0, 2**62)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.int32).tolist() if tensor.dtype is torch.float32 else tensor.tolist()


# What a GPU would do.
NO_KERNELS = {
    QSGD: mock.patch.multiple(
        qsgd,
        _pack_by_kernel=qsgd._pack_by_torch,
        _quantise_by_kernel=qsgd._quantise_by_torch,
        _unpack_by_kernel=qsgd._unpack_by_torch,
    ),
    OneBit: mock.patch.multiple(
        one_bit, _encode_by_kernel=one_bit._encode_by_torch, _decode_by_kernel=one_bit._decode_by_torch
    ),
}


def check_kernels_against_torch(codec, vector, seed):
    payload = codec.encode(vector, seeded(seed))
    decoded = codec.decode(payload)
    with NO_KERNELS[type(codec)]:
        assert bits(codec.encode(vector, seeded(seed))) == bits(payload)
        assert bits(codec.decode(payload)) == bits(decoded)


@settings(max_examples=150)
@given(codec=codecs, vector=vectors, seed=seeds)
@example(codec=QSGD(levels=32_767, bucket=5000, norm="l2"), vector=vector_of("mixed", 20_011, 1), seed=1)
@example(codec=QSGD(levels=1, bucket=0), vector=vector_of("normal", 40_000, 1), seed=2)
def test_qsgd_s_kernels_give_the_bits_that_torch_gives(codec, vector, seed):
    check_kernels_against_torch(codec, vector, seed)


@settings(max_examples=30)
@given(codec=codecs, lossless=st.sampled_from(qsgd.LOSSLESS[1:]), vector=vectors, seed=seeds)
def test_so_do_those_that_leave_the_packing_to_a_lossless_coder(codec, lossless, vector, seed):
    coded = QSGD(levels=codec.levels, bucket=codec.bucket, norm=codec.norm, lossless=lossless)
    check_kernels_against_torch(coded, vector, seed)
    packed = codec.decode(codec.encode(vector, seeded(seed)))
    assert torch.equal(coded.decode(coded.encode(vector, seeded(seed))), packed)  # but for the sign of zero


@settings(max_examples=60)
@given(vector=vectors)
@example(vector=vector_of("mixed", 20_011, 1))
def test_one_bit_s_kernels_give_the_bits_that_torch_gives(vector):
    check_kernels_against_torch(OneBit(), vector, 0)


@settings(max_examples=60)
@given(codec=codecs, vector=short_vectors, seed=seeds)
def test_qsgd_is_what_the_reference_says_given_the_same_random_numbers(codec, vector, seed):
    drawn = int(torch.randint(2**62, (1,), generator=seeded(seed)))
    uniform = tensors.uniform(vector.numel(), drawn & 0xFFFFFFFF, drawn >> 32, vector.device)
    norms, levels = reference.qsgd(
        vector.tolist(), uniform.tolist(), levels=codec.levels, bucket=codec.bucket, norm=codec.norm
    )
    expected = reference.qsgd_decoded(norms, levels, levels=codec.levels, bucket=codec.bucket)
    payload = codec.encode(vector, seeded(seed))
    assert payload[16 : 16 + 4 * len(norms)].view(torch.float32).tolist() == norms
    assert codec.decode(payload).tolist() == expected


@settings(max_examples=40)
@given(vector=short_vectors)
def test_one_bit_is_what_the_reference_says(vector):
    decoded = OneBit().decode(OneBit().encode(vector)).tolist()
    assert decoded == pytest.approx(reference.one_bit(vector.tolist()), rel=2**-23, abs=0)
