"""AlexNet: Krizhevsky, Sutskever and Hinton 2012, and the AlexNet-BN of the LARS paper (You et al. 2017).

    conv5 96 -> pool -> conv5 256 -> pool -> conv3 384 -> conv3 384 -> conv3 256 -> pool
      -> linear 1024 -> linear 1024 -> classes

Convolutions 2, 4 and 5 are in two groups, as in the original and in Caffe's, which the LARS paper trains.
`alexnet` has local response normalisation after the first two convolutions. `alexnet-bn` has none; it
normalises all five convolutions before their ReLU and drops their biases, as the LARS authors' Caffe file
does (which keeps the bias of the fifth).

Where we differ: the first convolution is 5x5 of stride one instead of 11x11 of stride four; poolings pad by
one, so no map vanishes; maps larger than 4x4 are averaged to 4x4 before the linear layers, which are 1024
wide instead of 4096; no dropout.
"""

from __future__ import annotations

from torch import nn

from paceline.models.layers import convolution, halved, norm_layer

LINEAR_WIDTH = 1024
LARGEST_LAST_SIDE = 4


def alexnet(*, input_shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """Build AlexNet with local response normalisation.

    >>> len(alexnet(input_shape=(1, 8, 8), classes=10))
    13
    """
    return _alexnet(input_shape, classes, norm=None)


def alexnet_bn(*, input_shape: tuple[int, int, int], classes: int, norm: str = "batch") -> nn.Sequential:
    """Build AlexNet with batch (or group) normalisation after every convolution.

    >>> len(alexnet_bn(input_shape=(1, 8, 8), classes=10))
    13
    """
    return _alexnet(input_shape, classes, norm=norm)


def _alexnet(input_shape: tuple[int, int, int], classes: int, norm: str | None) -> nn.Sequential:
    channels, height, width = input_shape
    last_height = min(LARGEST_LAST_SIDE, halved(height, times=3))
    last_width = min(LARGEST_LAST_SIDE, halved(width, times=3))
    return nn.Sequential(
        _stage(channels, 96, 5, norm, local_response=True),
        _pooling(),
        _stage(96, 256, 5, norm, groups=2, local_response=True),
        _pooling(),
        _stage(256, 384, 3, norm),
        _stage(384, 384, 3, norm, groups=2),
        _stage(384, 256, 3, norm, groups=2),
        _pooling(),
        nn.AdaptiveAvgPool2d((last_height, last_width)),
        nn.Flatten(),
        nn.Sequential(nn.Linear(256 * last_height * last_width, LINEAR_WIDTH), nn.ReLU()),
        nn.Sequential(nn.Linear(LINEAR_WIDTH, LINEAR_WIDTH), nn.ReLU()),
        nn.Linear(LINEAR_WIDTH, classes),
    )


def _stage(
    channels_in: int,
    channels: int,
    kernel: int,
    norm: str | None,
    *,
    groups: int = 1,
    local_response: bool = False,
) -> nn.Sequential:
    if norm is not None:
        return nn.Sequential(
            convolution(channels_in, channels, kernel, groups=groups), norm_layer(norm, channels), nn.ReLU()
        )
    convolved = convolution(channels_in, channels, kernel, groups=groups, bias=True)
    after = nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=1.0) if local_response else nn.Identity()
    return nn.Sequential(convolved, nn.ReLU(), after)


def _pooling() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2, padding=1)
