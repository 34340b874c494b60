"""Initial weights: normal, with He et al.'s (2015) variance 2/fan-in before a ReLU.

Fan-in and not fan-out: it keeps the size of the activations from layer to layer, which the networks without
normalisation need, and it is right for grouped and depthwise convolutions, whose fan-out torch overstates.
Biases start at zero. The last linear layer, which no ReLU follows, has variance 1/fan-in.
"""

from __future__ import annotations

from torch import nn


def initialise(model: nn.Module) -> None:
    """Draw every convolution's and linear layer's weights, in the order of the layers.

    >>> import torch
    >>> layer = nn.Linear(4, 2)
    >>> initialise(layer)
    >>> layer.bias.tolist()
    [0.0, 0.0]
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="linear" if layer is layers[-1] else "relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
