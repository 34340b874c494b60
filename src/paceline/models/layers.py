"""The few pieces that most of the networks are made of.

None of them makes a map vanish: convolutions pad, and pooling rounds a map's size up, so that a map of one
pixel stays one. On even sizes that is the usual pooling.
"""

from __future__ import annotations

from torch import nn


def convolution(
    channels_in: int, channels_out: int, kernel: int, *, stride: int = 1, groups: int = 1, bias: bool = False
) -> nn.Conv2d:
    """A convolution with an odd kernel, padded so that stride alone makes the map smaller.

    >>> convolution(3, 8, 3)
    Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
    """
    return nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, groups=groups, bias=bias)


def classifier(channels: int, classes: int) -> nn.Sequential:
    """The mean of every map, and one linear layer.

    >>> import torch
    >>> classifier(8, 10)(torch.zeros(2, 8, 5, 3)).shape
    torch.Size([2, 10])
    """
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def halved(side: int, times: int = 1) -> int:
    """A map's side after so many poolings of stride two.

    >>> halved(32), halved(7), halved(7, times=3), halved(1)
    (16, 4, 1, 1)
    """
    return -(-side // (1 << times))
