"""LeNet-5: LeCun, Bottou, Bengio and Haffner 1998, "Gradient-based learning applied to document recognition".

    conv5 6 -> pool -> conv5 16 -> pool -> 120 -> 84 -> classes

Where we differ, as is customary: ReLU for tanh, max pooling for trained subsampling, every map of the second
convolution sees every map of the first, a linear output layer.
Small inputs: a convolution pads a side by two where the map is smaller than LeCun's (32, then 14). So 32x32
and 28x28 inputs both reach the linear layers as 16 maps of 5x5, as his did.
"""

from __future__ import annotations

from torch import nn

from paceline.models.layers import halved

KERNEL = 5
FIRST_MAP, SECOND_MAP = 32, 14


def lenet(*, input_shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """Build LeNet-5 for any input size.

    >>> from paceline.models import count_parameters
    >>> count_parameters(lenet(input_shape=(3, 32, 32), classes=10))
    62006
    """
    channels, height, width = input_shape
    first = _padding(height, FIRST_MAP), _padding(width, FIRST_MAP)
    height, width = _after_stage(height, first[0]), _after_stage(width, first[1])
    second = _padding(height, SECOND_MAP), _padding(width, SECOND_MAP)
    height, width = _after_stage(height, second[0]), _after_stage(width, second[1])
    return nn.Sequential(
        _stage(channels, 6, first),
        _stage(6, 16, second),
        nn.Flatten(),
        nn.Sequential(nn.Linear(16 * height * width, 120), nn.ReLU()),
        nn.Sequential(nn.Linear(120, 84), nn.ReLU()),
        nn.Linear(84, classes),
    )


def _stage(channels_in: int, channels_out: int, padding: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, KERNEL, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2, ceil_mode=True),
    )


def _padding(side: int, full_side: int) -> int:
    return KERNEL // 2 if side < full_side else 0


def _after_stage(side: int, padding: int) -> int:
    return halved(side + 2 * padding - (KERNEL - 1))
