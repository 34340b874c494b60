"""The network of the golden runs: a perceptron of 1,898 weights, so that their checkpoints stay small."""

from __future__ import annotations

import math

from torch import nn


def tiny(*, input_shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """Return a perceptron of one hidden layer with 24 units and BatchNorm, so that buffers are recorded too."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(input_shape), 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, classes)
    )
