"""One element at a time gives the bits of a whole vector: where a vector is cut, and into how many, changes nothing."""

from __future__ import annotations

import pytest
import torch

from paceline.codecs import QSGD, tensors
from paceline.events import Share, Step
from paceline.strategies.combine import Combiner
from tests.contracts.codec_variants import seeded

LENGTHS = (1, 3, 8, 17, 64, 1001)
STEP = Step(
    version=1,
    fresh=tuple(Share(worker=worker, version=1, weight=1 / 3) for worker in range(3)),
    late=(Share(worker=3, version=0, weight=1 / 7),),
    previous_mean_weight=1 / 7,
)


def updates(gradients: torch.Tensor) -> torch.Tensor:
    """Two steps over some columns of the workers' gradients; the second compensates for the first."""
    combiner = Combiner()
    combiner.update(Step(version=0, fresh=STEP.fresh), lambda share: gradients[share.worker])
    return combiner.update(STEP, lambda share: gradients[share.worker])


@pytest.mark.parametrize("length", LENGTHS)
def test_the_one_summation_gives_the_same_bits_for_each_element_alone(length):
    gradients = torch.randn(4, length, generator=seeded(length))
    alone = [updates(gradients[:, place : place + 1].clone()) for place in range(length)]
    assert torch.equal(updates(gradients), torch.cat(alone))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_one_summation_gives_the_same_bits_with_any_number_of_threads(threads):
    gradients = torch.randn(4, 200_003, generator=seeded(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = updates(gradients)
        torch.set_num_threads(threads)
        assert torch.equal(updates(gradients), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("length", LENGTHS)
def test_random_rounding_of_an_element_depends_on_its_place_and_not_on_how_many_follow(length):
    device = torch.device("cpu")
    assert torch.equal(tensors.uniform(length, 1, 2, device), tensors.uniform(2 * length, 1, 2, device)[:length])


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_a_bucket_is_rounded_as_if_the_vector_ended_with_it(norm):
    codec = QSGD(bucket=64, norm=norm)
    vector = torch.randn(10 * 64, generator=seeded(1))
    whole = codec.decode(codec.encode(vector, seeded(2)))
    for buckets in range(1, 10):
        part = codec.decode(codec.encode(vector[: 64 * buckets], seeded(2)))
        assert torch.equal(part, whole[: 64 * buckets])
