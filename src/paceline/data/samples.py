"""A data set: inputs and targets for training and for testing.

Those of the table are images, held as float32 [n, channels, height, width] with mean 0 and deviation 1 per channel over
the training images; the test images are moved and scaled by the same numbers. A user's own (`own.py`) have any shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.reading import DatasetError

MOST_LABELS = 10_000  # whole numbers beyond it are no classes


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs with their targets, sample by sample, in memory.

    >>> few = Samples(inputs=torch.zeros(5, 1, 8, 8), targets=torch.arange(5))
    >>> len(few), few.take(torch.tensor([3, 1]))[1]
    (5, tensor([3, 1]))
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    reads: ClassVar[bool] = False  # whether taking samples runs code of a user's, which may draw random numbers

    def __post_init__(self) -> None:
        if self.inputs.ndim < 1 or self.targets.ndim < 1 or len(self.inputs) != len(self.targets):
            raise ValueError(
                "there must be a target for each input "
                f"(inputs {tuple(self.inputs.shape)}, targets {tuple(self.targets.shape)})"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, indices: torch.Tensor, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of these samples, in this order; `seed` is for what reading them draws."""
        return self.inputs[indices], self.targets[indices]

    def first(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of the first samples."""
        return self.inputs[:count], self.targets[:count]

    def parts(self, size: int, most: int | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield inputs and targets of `size` samples at a time, in order, of the first `most`.

        >>> [len(inputs) for inputs, _ in Samples(inputs=torch.zeros(5, 2), targets=torch.zeros(5)).parts(2, most=3)]
        [2, 1]
        """
        inputs, targets = self.first(len(self) if most is None else most)
        yield from zip(torch.split(inputs, size), torch.split(targets, size), strict=True)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.inputs.shape[1:])

    def some_targets(self, most: int) -> torch.Tensor:
        """Return the targets of at most so many samples, evenly among all; of those that must be read, of fewer."""
        return self.targets[spread(len(self), most)]

    @cached_property
    def labels(self) -> torch.Tensor | None:
        """The class of each sample; None where targets are something else, such as numbers or sequences.

        >>> Samples(inputs=torch.zeros(2, 3), targets=torch.zeros(2, 3)).labels is None
        True
        """
        return labels_among(self.targets)


def spread(count: int, most: int) -> torch.Tensor:
    """Return at most `most` of the numbers below `count`, evenly among them.

    >>> spread(10, 4), spread(3, 4)
    (tensor([0, 3, 6, 9]), tensor([0, 1, 2]))
    """
    some = min(count, most)
    return torch.arange(some) * (count - 1) // max(1, some - 1)


def labels_among(targets: torch.Tensor) -> torch.Tensor | None:
    """Return targets that are classes, counted from 0, as int64; None for all others.

    >>> labels_among(torch.tensor([2, 0])), labels_among(torch.tensor([0.5, 1.5]))
    (tensor([2, 0]), None)
    """
    if targets.ndim != 1 or targets.is_floating_point() or targets.is_complex() or not len(targets):
        return None
    whole = targets.long()
    return whole if int(whole.min()) >= 0 and int(whole.max()) < MOST_LABELS else None


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples of one kind.

    `classes` is how many a model tells apart: the labels, or the values that a position of a sequence may take. Where
    targets are numbers, it is how many a sample has. `remark` is what results on it should say, if anything.

    >>> few = Samples(inputs=torch.zeros(5, 3, 8, 8), targets=torch.arange(5))
    >>> Dataset(name="few", train=few, test=few, classes=5).input_shape
    (3, 8, 8)
    """

    name: str
    train: Samples
    test: Samples
    classes: int
    remark: str = ""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input, as a model wants to know it: of an image, channels, height and width."""
        return self.train.input_shape


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
