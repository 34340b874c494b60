"""A multi-layer perceptron: the smallest network that is not linear, for quick runs and tests.

flatten -> 128 -> ReLU -> 128 -> ReLU -> classes
"""

from __future__ import annotations

import math

from torch import nn


def mlp(*, input_shape: tuple[int, ...], classes: int, width: int = 128) -> nn.Sequential:
    """Build two hidden layers on the flattened input.

    >>> len(mlp(input_shape=(1, 8, 8), classes=10))
    6
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, classes),
    )
