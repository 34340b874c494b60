"""How many bytes a vector takes: what theory promises.

Bounds on the expected size hold for any one vector, over the rounding. A few seeds suffice: a size is the sum of what
many elements take, each rounded for itself, so sizes differ little, and three standard errors on top of the mean must
still be within the bound. The payload's header, and the bits that fill up the last byte, are beside the theory.
"""

import math

import numpy as np
import pytest
import torch

from paceline.codecs import QSGD, OneBit, entropy
from paceline.codecs.payload import HEADER_BYTES
from paceline.data import load_dataset
from paceline.models import build_model

NORM_BITS = 32
SEEDS = 6


def sparse_bound(elements):
    """For one level."""
    return math.sqrt(elements) * (math.log2(elements) + math.log2(2 * math.e)) + NORM_BITS


def bound(elements, levels, nonzero):
    """For any number of levels, if at most so many elements are expected to be other than zero."""
    return nonzero * (1.5 * math.log2(2 * (levels**2 + elements) / nonzero) + 3) + NORM_BITS


def bounds(elements, levels):
    """All that hold."""
    found = [bound(elements, levels, levels * (levels + math.sqrt(elements)))]
    if levels == 1:
        found.append(sparse_bound(elements))
    if levels in (1, round(math.sqrt(elements))):
        found.append(bound(elements, levels, levels**2 + math.sqrt(elements)))
    return found


def assert_within_bounds(vector):
    elements = vector.numel()
    for levels in (1, 2, 4, 16, round(math.sqrt(elements))):
        codec = QSGD(levels=levels, bucket=0, norm="l2", lossless="elias")
        payloads = [codec.encode(vector, torch.Generator().manual_seed(seed)) for seed in range(SEEDS)]
        bits = [8 * (payload.numel() - HEADER_BYTES) - 7 for payload in payloads]
        likely = np.mean(bits) + 3 * np.std(bits, ddof=1) / math.sqrt(SEEDS)
        assert likely <= min(bounds(elements, levels)), (elements, levels)


@pytest.mark.parametrize("elements", [1000, 10_000, 100_000, 1_000_000])
def test_elias_keeps_to_the_bounds_on_normally_distributed_elements(elements):
    assert_within_bounds(torch.randn(elements, generator=torch.Generator().manual_seed(elements)))


@pytest.mark.parametrize("elements", [1000, 100_000])
def test_elias_keeps_to_the_bounds_where_most_elements_are_expected(elements):
    """Of all vectors those of equal magnitudes have the most elements other than zero: sqrt(n) with one level."""
    assert_within_bounds(torch.randn(elements, generator=torch.Generator().manual_seed(1)).sign())


def test_elias_keeps_to_the_bounds_on_gradients():
    digits = load_dataset("digits")
    model = build_model("lenet", input_shape=digits.input_shape, classes=10)
    images, labels = digits.train.inputs[:64], digits.train.targets[:64]
    for _ in range(3):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        assert gradient.count_nonzero() > gradient.numel() / 2
        assert_within_bounds(gradient)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad


@pytest.mark.parametrize("levels", [4, 16])
def test_no_coder_could_keep_to_the_bound_that_forgets_a_factor_of_the_levels(levels):
    """Else elias.py would have to. What n independent levels take is n times their entropy, by Shannon."""
    elements = 1_000_000
    generator = torch.Generator().manual_seed(0)
    payload = QSGD(levels, bucket=0, norm="l2").encode(torch.randn(elements, generator=generator), generator)
    _, counts = np.unique(QSGD().decode(payload).numpy(), return_counts=True)
    assert shannon_bytes(counts) * 8 > 1.5 * bound(elements, levels, levels**2 + math.sqrt(elements))


def shannon_bytes(counts):
    return float(counts @ np.log2(counts.sum() / counts)) / 8


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("levels", [1, 7, 127, 32767])
def test_entropy_is_within_two_hundredths_of_shannons_limit(levels, norm):
    elements = 1_000_000
    vector = torch.randn(elements, generator=torch.Generator().manual_seed(levels))
    codec = QSGD(levels=levels, norm=norm, lossless="entropy")
    payload = codec.encode(vector, torch.Generator().manual_seed(0))
    coded = payload[HEADER_BYTES + 4 * math.ceil(elements / codec.bucket) :].numpy()
    counts = np.bincount(entropy.decode(coded, elements, levels))
    limit = shannon_bytes(counts[counts > 0])
    assert limit <= coded.size <= 1.02 * limit


def test_entropy_takes_next_to_nothing_for_what_is_known():
    """All zero, all the same, and two symbols that are far apart in a large alphabet: no table of 65,535 counts."""
    elements = 100_000
    for code in (0, 1, 32767, 65535):
        assert entropy.encode(np.full(elements, code, np.int32), 32767).size < 16
    signs = np.random.default_rng(0).integers(0, 2, elements).astype(np.int32)
    assert entropy.encode(32767 + (signs << 15), 32767).size < elements / 8 + 32


@pytest.mark.parametrize("elements", [0, 1, 7, 8, 9, 31, 32, 33, 4096, 100_001])
def test_one_bit_takes_a_bit_an_element_two_floats_and_the_header(elements):
    payload = OneBit().encode(torch.randn(elements))
    assert payload.numel() == 16 + 2 * 4 + math.ceil(elements / 8)
