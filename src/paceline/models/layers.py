"""The pieces that most of the networks are made of, and how their weights begin.

None of the pieces makes a map vanish: convolutions pad, and pooling rounds a map's size up, so that a map of one pixel
stays one. On even sizes that is the usual pooling.

Normalisation goes by name: batch, group or none. Batch normalisation makes a sample's output depend on the others of
its batch, and carries running averages that workers must agree on; group normalisation (Wu and He 2018) does neither.

Initial weights are normal, with He et al.'s (2015) variance 2/fan-in before a ReLU. Fan-in and not fan-out: it keeps
the size of the activations from layer to layer, which the networks without normalisation need, and it is right for
grouped and depthwise convolutions, whose fan-out torch overstates. Biases start at zero. The last linear layer, which
no ReLU follows, has variance 1/fan-in.
"""

from __future__ import annotations

from torch import nn

MOST_GROUPS = 32
FEWEST_CHANNELS_PER_GROUP = 4


def convolution(
    channels_in: int, channels_out: int, kernel: int, *, stride: int = 1, groups: int = 1, bias: bool = False
) -> nn.Conv2d:
    """Return a convolution with an odd kernel, padded so that stride alone makes the map smaller.

    >>> convolution(3, 8, 3)
    Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
    """
    return nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, groups=groups, bias=bias)


def classifier(channels: int, classes: int) -> nn.Sequential:
    """Return the last layers: the mean of every map, and one linear layer.

    >>> import torch
    >>> classifier(8, 10)(torch.zeros(2, 8, 5, 3)).shape
    torch.Size([2, 10])
    """
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def halved(side: int, times: int = 1) -> int:
    """Return a map's side after so many poolings of stride two.

    >>> halved(32), halved(7), halved(7, times=3), halved(1)
    (16, 4, 1, 1)
    """
    return -(-side // (1 << times))


def norm_layer(norm: str, channels: int) -> nn.Module:
    """Return the layer that normalises `channels` maps in the way that `norm` names.

    >>> norm_layer("group", 24)
    GroupNorm(6, 24, ...)
    """
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "group":
        return nn.GroupNorm(group_count(channels), channels)
    return nn.Identity()


def group_count(channels: int) -> int:
    """Return the most groups, up to 32, that divide the channels and leave at least four in each, or one group.

    A group of one channel on a map of one pixel would always be normalised to zero: hence the four.

    >>> [group_count(channels) for channels in (512, 64, 24, 7, 3)]
    [32, 16, 6, 1, 1]
    """
    most = max(1, min(MOST_GROUPS, channels // FEWEST_CHANNELS_PER_GROUP))
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)


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
