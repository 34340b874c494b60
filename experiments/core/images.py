"""The images that small runs train on: the first of a data set, averaged over squares of pixels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from paceline.data import (
    Augmentation,
    DatasetError,
    ExtendedAugmentation,
    NoAugmentation,
    PadCropFlip,
    Samples,
    load_dataset,
)
from paceline.data.download import VARIABLE


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """What runs are trained on, what rates are chosen by, and what tables show."""

    training: Samples
    held_out: Samples
    test: Samples
    input_shape: tuple[int, int, int]
    classes: int


@lru_cache(maxsize=1)
def load_images(data: str, *, images: int, shrink: int = 1, held_out: int = 0, normalise: bool = False) -> Images:
    """Load the first `images` to train on and the last `held_out` of the training images, once per process.

    They are averaged over squares of `shrink` pixels; averaging takes from their deviation, which `normalise` brings
    back to 1. Nothing is ever fetched.

    >>> found = load_images("digits", images=512, held_out=256, shrink=2)
    >>> found.input_shape, found.classes, len(found.held_out)
    ((1, 4, 4), 10, 256)
    """
    try:
        whole = load_dataset(data, download=False)
    except DatasetError as error:
        hint = "; Debian has them: apt-get install dataset-fashion-mnist" if data == "fashion-mnist" else ""
        raise ValueError(f"{error}, or name another folder in ${VARIABLE}{hint}") from error
    if images + held_out > len(whole.train):
        among = f" (images={images}, held_out={held_out})" if held_out else f" (images={images})"
        what = "images and held_out" if held_out else "images"
        raise ValueError(f"{what} must be at most the {len(whole.train)} training images of {data}{among}")
    first = len(whole.train) - held_out
    training, last, test = (
        avg_pool2d(inputs, shrink)
        for inputs in (whole.train.inputs[:images], whole.train.inputs[first:], whole.test.inputs)
    )
    if normalise:
        mean, deviation = training.mean((0, 2, 3), keepdim=True), training.std((0, 2, 3), keepdim=True).clamp_min(1e-6)
        training, last, test = ((each - mean) / deviation for each in (training, last, test))
    return Images(
        training=_samples(training, whole.train.targets[:images]),
        held_out=_samples(last, whole.train.targets[first:]),
        test=_samples(test, whole.test.targets),
        input_shape=(training.shape[1], training.shape[2], training.shape[3]),
        classes=whole.classes,
    )


def _samples(inputs: Tensor, targets: Tensor) -> Samples:
    return Samples(inputs=inputs.contiguous(memory_format=torch.channels_last), targets=targets)


def augmentation(name: str, side: int) -> Augmentation:
    """Return how images with sides of so many pixels are varied: not at all, by a crop and a flip, or in all ways.

    >>> augmentation("minimal", 32)
    PadCropFlip(padding=4, flip=True)
    """
    if name == "none":
        return NoAugmentation()
    return PadCropFlip(padding=max(1, side // 8)) if name == "minimal" else ExtendedAugmentation()  # 4 pixels of 32
