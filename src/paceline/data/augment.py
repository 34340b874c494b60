"""Varying training images, a batch at a time.

Pad, crop and flip is what nearly every CIFAR result since He et al. 2016 uses: put a border of `padding`
pixels around the image, cut a piece of the old size out at a random place, mirror half of the pieces.

    ..............          ..............
    ..............          ....+--------+
    ..+--------+..          ....|        |      the border is zero, and since images are normalised
    ..|  image |..   ->     ....|  piece |      zero is the average colour, not black
    ..+--------+..          ....+--------+
    ..............          ..............

The extended augmentation varies the scale, the aspect ratio and the colours too, as Szegedy et al. 2015 do ("Going
deeper with convolutions"): a piece of `least_area` to all of the image's area is cut out, stretched to the old size
and perhaps mirrored. Each image then gets a contrast, a brightness and a shift of each colour:

    x <- contrast * x + brightness + shift of the channel        in deviations: images are normalised

Where we differ: pieces that would be larger than the image are cut to it instead of drawn again; colours are moved by
straight lines around the average colour, since normalised images are no longer between black and white. Everything
is + - * / and roots, one torch call each, so that an image has the same bits in any batch and in any layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Augmentation(Protocol):
    """Varies a batch of images; the randomness is passed in.

    >>> vary: Augmentation = NoAugmentation()
    """

    def __call__(self, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return a varied batch; the batch passed in is left as it is."""


@dataclass(frozen=True, kw_only=True)
class NoAugmentation:
    """Leaves images as they are.

    >>> images = torch.zeros(2, 3, 8, 8)
    >>> NoAugmentation()(images, torch.Generator()) is images
    True
    """

    def __call__(self, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the same batch."""
        return inputs


@dataclass(frozen=True)
class PadCropFlip:
    """Shift every image by up to `padding` pixels each way, and mirror every other one, at random.

    Set `flip` to false where a mirrored image means something else, as with digits.

    >>> from paceline.randomness import torch_generator
    >>> images = torch.rand(16, 3, 32, 32)
    >>> PadCropFlip(padding=4)(images, torch_generator(0, "augment", 3)).shape
    torch.Size([16, 3, 32, 32])
    """

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"padding must be at least 0 (padding={self.padding})")

    def __call__(self, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return a crop of every image [n, channels, height, width], each drawn on its own."""
        _check_images(inputs)
        count, channels, height, width = inputs.shape
        top = _draw(count, 2 * self.padding + 1, inputs, generator)
        left = _draw(count, 2 * self.padding + 1, inputs, generator)
        mirrored = _draw(count, 2, inputs, generator).bool() & self.flip

        rows = top + torch.arange(height, device=inputs.device)
        columns = left + torch.arange(width, device=inputs.device)
        columns = torch.where(mirrored, columns.flip(1), columns)
        # Where each pixel comes from, counted along the padded image: one gather does all three.
        source = rows[:, :, None] * (width + 2 * self.padding) + columns[:, None, :]
        padded = torch.nn.functional.pad(inputs, (self.padding,) * 4).flatten(2)
        return padded.gather(2, source.flatten(1)[:, None].expand(-1, channels, -1)).reshape(inputs.shape)


@dataclass(frozen=True, kw_only=True)
class ExtendedAugmentation:
    """Stretch a piece of every image to its size, mirror every other one, and move its colours, at random.

    A piece has between `least_area` of the image's area and all of it, and is up to 1 / `least_aspect` times as wide as
    it is high, or as high as it is wide, beside the image's own ratio. Contrast is between 1 - `contrast` and
    1 + `contrast`; `brightness` and `colour` are the largest shifts of all channels and of each, in deviations.

    >>> from paceline.randomness import torch_generator
    >>> images = torch.rand(16, 3, 32, 32)
    >>> ExtendedAugmentation(least_area=0.5)(images, torch_generator(0, "augment", 3)).shape
    torch.Size([16, 3, 32, 32])
    """

    least_area: float = 0.25
    least_aspect: float = 0.75
    flip: bool = True
    contrast: float = 0.2
    brightness: float = 0.2
    colour: float = 0.1

    def __post_init__(self) -> None:
        for name in ("least_area", "least_aspect"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1 ({name}={getattr(self, name)})")
        for name in ("contrast", "brightness", "colour"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1 ({name}={getattr(self, name)})")

    def __call__(self, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return a varied version of every image [n, channels, height, width], each drawn on its own."""
        _check_images(inputs)
        count, channels, height, width = inputs.shape
        area = _uniform((count, 1), self.least_area, 1.0, inputs, generator)
        aspect = _uniform((count, 1), self.least_aspect, 1.0, inputs, generator)
        upright = _draw(count, 2, inputs, generator).bool()
        tall, wide = torch.sqrt(area / aspect), torch.sqrt(area * aspect)  # shares of the image's sides
        rows = self._places(torch.where(upright, tall, wide), height, inputs, generator)
        columns = self._places(torch.where(upright, wide, tall), width, inputs, generator)
        mirrored = _draw(count, 2, inputs, generator).bool() & self.flip
        columns = torch.where(mirrored, columns.flip(1), columns)
        contrast = _uniform((count, 1, 1, 1), 1 - self.contrast, 1 + self.contrast, inputs, generator)
        brightness = _uniform((count, 1, 1, 1), -self.brightness, self.brightness, inputs, generator)
        colour = _uniform((count, channels, 1, 1), -self.colour, self.colour, inputs, generator)

        stretched = _between_neighbours(_between_neighbours(inputs, rows, dim=2), columns, dim=3)
        return (stretched * contrast + (brightness + colour)).to(inputs.dtype)

    @staticmethod
    def _places(share: torch.Tensor, side: int, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return where along a side each pixel of a piece is taken from, [n, side]; pixels have their middle at .0."""
        share = share.clamp(max=1.0)
        start = _uniform(tuple(share.shape), 0.0, 1.0, inputs, generator) * (1.0 - share) * side
        middles = torch.arange(side, device=inputs.device) + 0.5
        return (start + middles * share - 0.5).clamp(0.0, side - 1.0)


def _between_neighbours(images: torch.Tensor, places: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Return rows (dim 2) or columns (dim 3) from between others, as much of each as it is near."""
    last = images.shape[dim] - 1
    before = places.floor()
    shape = [len(images), 1, 1, 1]
    shape[dim] = images.shape[dim]
    nearness = (places - before).reshape(shape)
    first = before.long()
    wanted = list(images.shape)

    def taken(indices: torch.Tensor) -> torch.Tensor:
        return images.gather(dim, indices.reshape(shape).expand(wanted))

    lower, upper = taken(first), taken((first + 1).clamp(max=last))
    return lower + nearness * (upper - lower)


def _check_images(inputs: torch.Tensor) -> None:
    if inputs.ndim != 4:
        raise ValueError(f"inputs must be [n, channels, height, width] (shape={tuple(inputs.shape)})")


def _draw(count: int, below: int, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randint(below, (count, 1), generator=generator, device=generator.device)
    return drawn.to(inputs.device)


def _uniform(
    shape: tuple[int, ...], least: float, most: float, inputs: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    drawn = torch.rand(shape, generator=generator, device=generator.device)
    return (least + drawn * (most - least)).to(inputs.device)
