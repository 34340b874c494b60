"""Varying training images, a batch at a time.

Pad, crop and flip is what nearly every CIFAR result since He et al. 2016 uses: put a border of `padding`
pixels around the image, cut a piece of the old size out at a random place, mirror half of the pieces.

    ..............          ..............
    ..............          ....+--------+
    ..+--------+..          ....|        |      the border is zero, and since images are normalised
    ..|  image |..   ->     ....|  piece |      zero is the average colour, not black
    ..+--------+..          ....+--------+
    ..............          ..............
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
        if inputs.ndim != 4:
            raise ValueError(f"inputs must be [n, channels, height, width] (shape={tuple(inputs.shape)})")
        count, channels, height, width = inputs.shape
        top = self._draw(count, 2 * self.padding + 1, inputs, generator)
        left = self._draw(count, 2 * self.padding + 1, inputs, generator)
        mirrored = self._draw(count, 2, inputs, generator).bool() & self.flip

        rows = top + torch.arange(height, device=inputs.device)
        columns = left + torch.arange(width, device=inputs.device)
        columns = torch.where(mirrored, columns.flip(1), columns)
        # Where each pixel comes from, counted along the padded image: one gather does all three.
        source = rows[:, :, None] * (width + 2 * self.padding) + columns[:, None, :]
        padded = torch.nn.functional.pad(inputs, (self.padding,) * 4).flatten(2)
        return padded.gather(2, source.flatten(1)[:, None].expand(-1, channels, -1)).reshape(inputs.shape)

    @staticmethod
    def _draw(count: int, below: int, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        drawn = torch.randint(below, (count, 1), generator=generator, device=generator.device)
        return drawn.to(inputs.device)
