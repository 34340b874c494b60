"""GoogLeNet: Szegedy et al. 2015, "Going deeper with convolutions".

    inception(x) = [ conv1(x) | conv3(conv1(x)) | conv3(conv3(conv1(x))) | conv1(pool(x)) ]

Where we differ, as is customary for CIFAR: the stem is one 3x3 convolution to 192 maps, with no pooling; two
3x3 convolutions stand for the 5x5; normalisation after every convolution (norm="none" is the original, and the
network of the LARS paper's table 6), whose bias is kept, so that the parameters are as many as others count; no
auxiliary outputs, no dropout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.models.layers import classifier, convolution, norm_layer

STEM_CHANNELS = 192


class Widths(NamedTuple):
    """Channels in an inception module, by the paper's column names.

    >>> Widths(64, 96, 128, 16, 32, 32).total
    256
    """

    one: int
    three_reduce: int
    three: int
    five_reduce: int
    five: int
    pool_projection: int

    @property
    def total(self) -> int:
        """Channels that come out.

        >>> Widths(1, 0, 2, 0, 3, 4).total
        10
        """
        return self.one + self.three + self.five + self.pool_projection


# The paper's table 1: stages 3, 4 and 5, with a pooling between stages.
STAGES = (
    (Widths(64, 96, 128, 16, 32, 32), Widths(128, 128, 192, 32, 96, 64)),
    (
        Widths(192, 96, 208, 16, 48, 64),
        Widths(160, 112, 224, 24, 64, 64),
        Widths(128, 128, 256, 24, 64, 64),
        Widths(112, 144, 288, 32, 64, 64),
        Widths(256, 160, 320, 32, 128, 128),
    ),
    (Widths(256, 160, 320, 32, 128, 128), Widths(384, 192, 384, 48, 128, 128)),
)


class Inception(nn.Module):
    """Four ways through side by side, their maps joined.

    >>> Inception(8, Widths(4, 4, 4, 4, 4, 4), norm="group")(torch.zeros(1, 8, 5, 5)).shape
    torch.Size([1, 16, 5, 5])
    """

    def __init__(self, channels: int, widths: Widths, *, norm: str) -> None:
        super().__init__()
        self.one = _unit(channels, widths.one, 1, norm)
        self.three = nn.Sequential(
            _unit(channels, widths.three_reduce, 1, norm), _unit(widths.three_reduce, widths.three, 3, norm)
        )
        self.five = nn.Sequential(
            _unit(channels, widths.five_reduce, 1, norm),
            _unit(widths.five_reduce, widths.five, 3, norm),
            _unit(widths.five, widths.five, 3, norm),
        )
        self.pooled = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1), _unit(channels, widths.pool_projection, 1, norm)
        )

    def forward(self, images: Tensor) -> Tensor:
        ways = [self.one(images), self.three(images), self.five(images), self.pooled(images)]
        return torch.cat(ways, dim=1)


def googlenet(*, input_shape: tuple[int, int, int], classes: int, norm: str = "batch") -> nn.Sequential:
    """Build GoogLeNet: nine inception modules.

    >>> len(googlenet(input_shape=(1, 8, 8), classes=10))
    13
    """
    layers: list[nn.Module] = [_unit(input_shape[0], STEM_CHANNELS, 3, norm)]
    channels = STEM_CHANNELS
    for stage, modules in enumerate(STAGES):
        if stage > 0:
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
        for widths in modules:
            layers.append(Inception(channels, widths, norm=norm))
            channels = widths.total
    return nn.Sequential(*layers, classifier(channels, classes))


def _unit(channels_in: int, channels: int, kernel: int, norm: str) -> nn.Sequential:
    return nn.Sequential(convolution(channels_in, channels, kernel, bias=True), norm_layer(norm, channels), nn.ReLU())
