"""DenseNet: Huang, Liu, van der Maaten and Weinberger 2017, "Densely connected convolutional networks".

    layer(x) = [ conv3(conv1(x)) | x ]      each layer adds 32 maps to all those before it

DenseNet-121 (the BC kind): dense stages of 6, 12, 24 and 16 layers; between two stages the maps become half
as many, and their sides half as long.

Where we differ, as is customary for CIFAR: the stem is one 3x3 convolution of stride one, with no pooling.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.models.layers import classifier, convolution, norm_layer

GROWTH = 32
LAYERS_PER_STAGE = (6, 12, 24, 16)


class DenseLayer(nn.Module):
    """Makes `GROWTH` new maps from all the earlier ones and joins them.

    >>> DenseLayer(8, norm="group")(torch.zeros(1, 8, 5, 5)).shape
    torch.Size([1, 40, 5, 5])
    """

    def __init__(self, channels: int, *, norm: str) -> None:
        super().__init__()
        self.new_maps = nn.Sequential(
            norm_layer(norm, channels),
            nn.ReLU(),
            convolution(channels, 4 * GROWTH, 1),
            norm_layer(norm, 4 * GROWTH),
            nn.ReLU(),
            convolution(4 * GROWTH, GROWTH, 3),
        )

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.new_maps(images), images], dim=1)


def densenet121(*, input_shape: tuple[int, int, int], classes: int, norm: str = "batch") -> nn.Sequential:
    """Build DenseNet-121: 58 dense layers.

    >>> len(densenet121(input_shape=(1, 8, 8), classes=10))
    64
    """
    channels = 2 * GROWTH
    layers: list[nn.Module] = [convolution(input_shape[0], channels, 3)]
    for stage, dense_layers in enumerate(LAYERS_PER_STAGE):
        if stage > 0:
            layers.append(_transition(channels, channels // 2, norm))
            channels //= 2
        for _ in range(dense_layers):
            layers.append(DenseLayer(channels, norm=norm))
            channels += GROWTH
    last_activation = nn.Sequential(norm_layer(norm, channels), nn.ReLU())
    return nn.Sequential(*layers, last_activation, classifier(channels, classes))


def _transition(channels_in: int, channels: int, norm: str) -> nn.Sequential:
    return nn.Sequential(
        norm_layer(norm, channels_in),
        nn.ReLU(),
        convolution(channels_in, channels, 1),
        nn.AvgPool2d(2, ceil_mode=True),
    )
