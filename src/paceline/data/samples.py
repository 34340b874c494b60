"""A data set in memory: inputs and targets for training and for testing, normalised.

Images are held as float32 [n, channels, height, width] with mean 0 and deviation 1 per channel over the
training images; the test images are moved and scaled by the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.reading import DatasetError


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs with their targets, sample by sample.

    >>> len(Samples(inputs=torch.zeros(5, 1, 8, 8), targets=torch.zeros(5, dtype=torch.int64)))
    5
    """

    inputs: torch.Tensor
    targets: torch.Tensor

    def __post_init__(self) -> None:
        if self.inputs.ndim != 4 or self.inputs.dtype != torch.float32:
            raise ValueError(
                "inputs must be float32 [n, channels, height, width] "
                f"(shape={tuple(self.inputs.shape)}, dtype={self.inputs.dtype})"
            )
        if self.targets.shape != self.inputs.shape[:1] or self.targets.dtype != torch.int64:
            raise ValueError(
                f"targets must be int64 [{len(self.inputs)}], one for each input "
                f"(shape={tuple(self.targets.shape)}, dtype={self.targets.dtype})"
            )

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples of one kind.

    >>> few = Samples(inputs=torch.zeros(5, 3, 8, 8), targets=torch.arange(5))
    >>> Dataset(name="few", train=few, test=few, classes=5).input_shape
    (3, 8, 8)
    """

    name: str
    train: Samples
    test: Samples
    classes: int

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image, as a model wants to know them."""
        channels, height, width = self.train.inputs.shape[1:]
        return channels, height, width


@dataclass(frozen=True, kw_only=True, eq=False)
class Pixels:
    """Images as files hold them: bytes [n, channels, height, width], and a label for each.

    >>> Pixels(images=np.zeros((2, 1, 2, 2), np.uint8), labels=np.zeros(2, np.uint8)).images.shape
    (2, 1, 2, 2)
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.integer]


def from_pixels(name: str, train: Pixels, test: Pixels, *, classes: int) -> Dataset:
    """Return a data set from bytes, normalised; labels outside the classes are refused.

    Mean and deviation come from a count of each of the 256 values, so they are exact and no second
    copy of the images is made.

    >>> black_and_white = np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)
    >>> images = Pixels(images=black_and_white, labels=np.array([0, 1]))
    >>> from_pixels("two", images, images, classes=2).train.inputs.flatten().tolist()
    [-1.0, 1.0]
    """
    for part, pixels in (("training", train), ("test", test)):
        if len(pixels.images) != len(pixels.labels) or len(pixels.labels) == 0:
            raise DatasetError(
                f"{name} must have one label for each {part} image, and at least one "
                f"(images={len(pixels.images)}, labels={len(pixels.labels)})"
            )
        if not 0 <= int(pixels.labels.min()) <= int(pixels.labels.max()) < classes:
            raise DatasetError(
                f"{name} must have {part} labels between 0 and {classes - 1} "
                f"(smallest={pixels.labels.min()}, largest={pixels.labels.max()}): the file is damaged"
            )
    mean, deviation = _mean_and_deviation(train.images)
    return Dataset(
        name=name,
        train=_normalised(train, mean, deviation),
        test=_normalised(test, mean, deviation),
        classes=classes,
    )


def _mean_and_deviation(images: NDArray[np.uint8]) -> tuple[torch.Tensor, torch.Tensor]:
    counts = np.zeros((images.shape[1], 256), dtype=np.int64)
    for start in range(0, len(images), 1000):  # in pieces, because bincount makes eight bytes of each
        for channel, count in enumerate(counts):
            count += np.bincount(images[start : start + 1000, channel].ravel(), minlength=256)
    values, total = np.arange(256.0), counts.sum(axis=1)
    mean = counts @ values / total
    variance = counts @ values**2 / total - mean**2
    deviation = np.sqrt(np.where(variance > 1e-9, variance, 1.0))  # a channel of one value becomes zeros
    return _per_channel(mean), _per_channel(deviation)


def _per_channel(values: NDArray[np.float64]) -> torch.Tensor:
    return torch.from_numpy(values).to(torch.float32).reshape(1, -1, 1, 1)


def _normalised(pixels: Pixels, mean: torch.Tensor, deviation: torch.Tensor) -> Samples:
    inputs = torch.from_numpy(pixels.images.astype(np.float32)).sub_(mean).div_(deviation)
    return Samples(inputs=inputs, targets=torch.tensor(pixels.labels, dtype=torch.int64))
