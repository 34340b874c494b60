"""Augmented images are what they are said to be: crops and mirror images; or stretched pieces with other colours."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import ExtendedAugmentation, NoAugmentation, PadCropFlip
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


# -- the extended one --------------------------------------------------------------------------------------------------

PLAIN = {"contrast": 0.0, "brightness": 0.0, "colour": 0.0}  # colours stay


@settings(deadline=None)
@given(st.integers(0, 4), st.integers(1, 3), st.integers(1, 7), st.integers(1, 7), st.integers(0, 99))
def test_whole_images_without_colours_stay_as_they_are(count, channels, height, width, seed):
    images = torch.randn(count, channels, height, width)
    vary = ExtendedAugmentation(least_area=1.0, least_aspect=1.0, flip=False, **PLAIN)
    torch.testing.assert_close(vary(images, torch_generator(seed)), images, rtol=0, atol=1e-5)


@settings(deadline=None)
@given(st.integers(6, 12), st.integers(6, 12), st.floats(0.3, 1), st.floats(0.5, 1), st.integers(0, 99))
def test_a_piece_of_a_slope_is_a_gentler_slope_of_the_promised_area(height, width, least_area, least_aspect, seed):
    """On images whose values are their coordinates, the corners of a piece can be read off; edges are repeated."""
    rows = torch.arange(float(height)).reshape(1, 1, height, 1).expand(40, 1, height, width)
    columns = torch.arange(float(width)).reshape(1, 1, 1, width).expand(40, 1, height, width)
    vary = ExtendedAugmentation(least_area=least_area, least_aspect=least_aspect, flip=False, **PLAIN)
    varied = vary(torch.cat([rows, columns], dim=1), torch_generator(seed))
    down, across = varied[:, 0], varied[:, 1]
    assert torch.allclose(down, down[:, :, :1].expand_as(down))
    assert torch.allclose(across, across[:, :1].expand_as(across))
    assert bool((down.diff(dim=1) >= -1e-5).all())
    assert bool((across.diff(dim=2) >= -1e-5).all())
    assert float(varied.min()) >= 0
    assert float(down.max()) <= height - 1
    shares = [_share(down[:, :, 0]), _share(across[:, 0])]
    area, aspect = shares[0] * shares[1], shares[0] / shares[1]
    assert bool((area <= 1 + 1e-4).all())
    whole = torch.maximum(*shares) > 1 - 1e-4  # cut to the image
    assert bool((area[~whole] >= least_area - 1e-4).all())
    assert bool((aspect[~whole] >= least_aspect - 1e-3).all())
    assert bool((aspect[~whole] <= 1 / least_aspect + 1e-3).all())


def _share(places: torch.Tensor) -> torch.Tensor:
    """The steps between two pixels of a piece that both lie within the image: the piece's share of the side."""
    return places.diff(dim=1).max(dim=1).values


def test_half_of_the_images_are_mirrored_and_without_flip_none():
    slope = torch.arange(8.0).reshape(1, 1, 1, 8).expand(2000, 1, 8, 8)
    falling = ExtendedAugmentation(**PLAIN)(slope, torch_generator(0))[:, 0, 0].diff(dim=1).sum(1) < 0
    assert 900 < int(falling.sum()) < 1100
    straight = ExtendedAugmentation(flip=False, **PLAIN)(slope, torch_generator(0))[:, 0, 0].diff(dim=1).sum(1)
    assert bool((straight >= 0).all())


def test_colours_move_within_their_limits_and_every_channel_by_itself():
    flat = torch.ones(4000, 3, 2, 2)
    varied = ExtendedAugmentation(contrast=0.3, brightness=0.2, colour=0.1)(flat, torch_generator(0))
    assert torch.allclose(varied, varied[:, :, :1, :1].expand_as(varied))
    channels = varied[:, :, 0, 0]
    assert 0.4 <= float(channels.min()) < 0.5
    assert 1.5 < float(channels.max()) <= 1.6
    assert float(channels.mean()) == pytest.approx(1.0, abs=0.02)
    apart = channels.max(1).values - channels.min(1).values
    assert 0.15 < float(apart.max()) <= 0.2 + 1e-6
    alike = ExtendedAugmentation(colour=0.0)(flat, torch_generator(0))[:, :, 0, 0]
    assert torch.equal(alike, alike[:, :1].expand_as(alike))


def test_of_the_extended_one_the_generator_decides_and_inputs_stay():
    images, vary = torch.rand(32, 3, 8, 8), ExtendedAugmentation()
    before, state = images.clone(), torch.get_rng_state()
    first = vary(images, torch_generator(0, "augment"))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(images, before)
    assert torch.equal(vary(images, torch_generator(0, "augment")), first)
    assert not torch.equal(vary(images, torch_generator(1, "augment")), first)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"least_area": 0.0}, r"least_area must be above 0 and at most 1 \(least_area=0.0\)"),
        ({"least_aspect": 1.5}, r"least_aspect must be above 0 and at most 1 \(least_aspect=1.5\)"),
        ({"contrast": -0.1}, r"contrast must be between 0 and 1 \(contrast=-0.1\)"),
        ({"colour": float("nan")}, r"colour must be between 0 and 1 \(colour=nan\)"),
    ],
)
def test_settings_beyond_their_limits_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        ExtendedAugmentation(**wrong)


@pytest.mark.parametrize("vary", [PadCropFlip(), ExtendedAugmentation()])
def test_what_is_no_batch_of_images_is_refused(vary):
    with pytest.raises(ValueError, match=r"inputs must be \[n, channels, height, width\] \(shape=\(3, 8, 8\)\)"):
        vary(torch.zeros(3, 8, 8), torch_generator(0))
