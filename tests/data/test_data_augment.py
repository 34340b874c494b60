"""Augmented images are crops and mirror images of their inputs, and nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import NoAugmentation, PadCropFlip
from paceline.randomness import torch_generator


def all_versions(image: torch.Tensor, padding: int) -> list[torch.Tensor]:
    """The slow, plain way: every place of the window, and its mirror image."""
    height, width = image.shape[1:]
    padded = torch.zeros(image.shape[0], height + 2 * padding, width + 2 * padding)
    padded[:, padding : padding + height, padding : padding + width] = image
    shifts = range(2 * padding + 1)
    crops = [padded[:, top : top + height, left : left + width] for top in shifts for left in shifts]
    return crops + [crop.flip(-1) for crop in crops]


@settings(deadline=None)
@given(
    st.integers(0, 5),
    st.integers(1, 3),
    st.integers(1, 7),
    st.integers(1, 7),
    st.integers(0, 3),
    st.integers(0, 99),
)
def test_every_output_is_a_crop_or_a_mirrored_crop_of_its_input(count, channels, height, width, padding, seed):
    images = torch.arange(count * channels * height * width).reshape(count, channels, height, width) + 1.0
    before = images.clone()
    varied = PadCropFlip(padding=padding)(images, torch_generator(seed, "augment"))
    assert varied.shape == images.shape
    assert torch.equal(images, before)
    for image, version in zip(images, varied, strict=True):
        assert any(torch.equal(version, valid) for valid in all_versions(image, padding))


def test_every_version_comes_up_about_equally_often():
    image = torch.arange(9.0).reshape(1, 1, 3, 3) + 1
    versions = all_versions(image[0], 1)
    varied = PadCropFlip(padding=1)(image.expand(9000, 1, 3, 3), torch_generator(0, "augment"))
    counts = [int((varied == version).flatten(1).all(1).sum()) for version in versions]
    assert sum(counts) == 9000
    assert min(counts) > 400  # 500 expected, 22 the deviation
    assert max(counts) < 600


def test_without_flip_nothing_is_mirrored():
    images = torch.arange(4.0).expand(200, 1, 1, 4)
    varied = PadCropFlip(padding=0, flip=False)(images, torch_generator(0, "augment"))
    assert torch.equal(varied, images)


def test_the_generator_decides_and_the_global_one_does_not():
    images = torch.rand(32, 3, 8, 8)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = PadCropFlip()(images, torch_generator(0, "augment"))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(PadCropFlip()(images, torch_generator(0, "augment")), first)
    assert not torch.equal(PadCropFlip()(images, torch_generator(1, "augment")), first)


def test_no_augmentation_changes_nothing():
    images = torch.rand(4, 3, 8, 8)
    assert NoAugmentation()(images, torch_generator(0)) is images


def test_bad_values_are_refused():
    with pytest.raises(ValueError, match="padding=-1"):
        PadCropFlip(padding=-1)
    with pytest.raises(ValueError, match=r"shape=\(3, 8, 8\)"):
        PadCropFlip()(torch.zeros(3, 8, 8), torch_generator(0))
