"""Made-up images that a network can learn: a pattern for each class, and gaussian noise over it.

    image = pattern[class] + noise,      noise ~ N(0, 1) for every pixel

A pattern is coarse (4x4 patches), so that convolutions have something to find. Its strength falls as
images grow, which keeps the task about as hard at every size: the distance between two patterns,
measured in units of the noise, stays the same.
"""

from __future__ import annotations

import torch

from paceline.data import Request
from paceline.data.samples import Dataset, Samples
from paceline.randomness import torch_generator

PATCHES = 4
DISTANCE = 7.0  # between two patterns; the best possible classifier of 2 classes errs once in 4,000
LARGEST_ELEMENTS = 2**30  # 4 GiB of float32


def load_synthetic(request: Request) -> Dataset:
    """Make `samples` images to train on and a quarter as many to test on, classes of equal size.

    >>> data = load_synthetic(Request(samples=100, classes=3, channels=2, size=6))
    >>> len(data.train), len(data.test), data.input_shape
    (100, 25, (2, 6, 6))
    """
    _check(request)
    patterns = _patterns(request)
    tests = max(request.classes, request.samples // 4)
    train, train_targets = _draw(patterns, request.samples, request.seed, "train")
    test, test_targets = _draw(patterns, tests, request.seed, "test")
    mean = train.mean((0, 2, 3), keepdim=True)
    deviation = train.std((0, 2, 3), keepdim=True, correction=0)
    return Dataset(
        name="synthetic",
        train=Samples(inputs=train.sub_(mean).div_(deviation), targets=train_targets),
        test=Samples(inputs=test.sub_(mean).div_(deviation), targets=test_targets),
        classes=request.classes,
    )


def _check(request: Request) -> None:
    for what, value, least in (
        ("classes", request.classes, 2),
        ("channels", request.channels, 1),
        ("size", request.size, 1),
    ):
        if value < least:
            raise ValueError(f"{what} of synthetic data must be at least {least} ({what}={value})")
    if request.samples < request.classes:
        raise ValueError(
            "samples of synthetic data must be at least classes, one for each "
            f"(samples={request.samples}, classes={request.classes})"
        )
    image = request.channels * request.size**2
    for count, of in ((request.samples, "samples"), (request.classes, "classes")):
        if count * image > LARGEST_ELEMENTS:
            raise ValueError(
                f"{of} x channels x size x size must be at most {LARGEST_ELEMENTS} "
                f"({count} x {request.channels} x {request.size} x {request.size} = {count * image})"
            )


def _patterns(request: Request) -> torch.Tensor:
    generator = torch_generator(request.seed, "synthetic", "patterns")
    side = min(PATCHES, request.size)
    coarse = torch.randn(request.classes, request.channels, side, side, generator=generator)
    fine: torch.Tensor = torch.nn.functional.interpolate(coarse, size=(request.size, request.size), mode="nearest")
    # Two independent patterns of this strength are DISTANCE apart on average.
    strength = DISTANCE / (2 * request.channels * request.size**2) ** 0.5
    return fine.mul_(strength)


def _draw(patterns: torch.Tensor, count: int, seed: int, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch_generator(seed, "synthetic", part)
    targets = (torch.arange(count) % len(patterns))[torch.randperm(count, generator=generator)]
    inputs: torch.Tensor = torch.randn(count, *patterns.shape[1:], generator=generator).add_(patterns[targets])
    return inputs, targets
