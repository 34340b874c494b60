"""MobileNetV2: Sandler, Howard, Zhu, Zhmoginov and Chen 2018, "Inverted residuals and linear bottlenecks".

    block(x) = narrow(depthwise(widen(x))) + x        no ReLU after narrowing; no + x where the map halves

Where we differ, as is customary for CIFAR: the stem and the 24-channel stage have stride one; a block of
stride one that changes the channels carries x through a 1x1 convolution, where the paper carries nothing;
the first block widens by one (a 1x1 convolution), where the paper leaves that convolution out.
"""

from __future__ import annotations

from torch import Tensor, nn

from paceline.models.layers import classifier, convolution, norm_layer

STEM_CHANNELS, LAST_CHANNELS = 32, 1280

# The paper's table 2: expansion, channels, blocks, stride of the first block.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """Widen, convolve each map by itself, narrow; carry the input around if the map keeps its size.

    >>> import torch
    >>> InvertedResidual(4, 8, expansion=6, stride=2, norm="group")(torch.zeros(1, 4, 6, 6)).shape
    torch.Size([1, 8, 3, 3])
    """

    def __init__(self, channels_in: int, channels: int, *, expansion: int, stride: int, norm: str) -> None:
        super().__init__()
        wide = channels_in * expansion
        self.residual = nn.Sequential(
            _unit(channels_in, wide, 1, norm),
            _unit(wide, wide, 3, norm, stride=stride, groups=wide),
            convolution(wide, channels, 1),
            norm_layer(norm, channels),
        )
        self.carries_input = stride == 1
        self.shortcut: nn.Module = nn.Identity()
        if self.carries_input and channels_in != channels:
            self.shortcut = nn.Sequential(convolution(channels_in, channels, 1), norm_layer(norm, channels))

    def forward(self, images: Tensor) -> Tensor:
        residual: Tensor = self.residual(images)
        return residual + self.shortcut(images) if self.carries_input else residual


def mobilenetv2(*, input_shape: tuple[int, int, int], classes: int, norm: str = "batch") -> nn.Sequential:
    """Build MobileNetV2 of width one: seventeen inverted residuals.

    >>> len(mobilenetv2(input_shape=(1, 8, 8), classes=10))
    20
    """
    layers: list[nn.Module] = [_unit(input_shape[0], STEM_CHANNELS, 3, norm)]
    carried = STEM_CHANNELS
    for expansion, channels, blocks, first_stride in STAGES:
        for position in range(blocks):
            stride = first_stride if position == 0 else 1
            layers.append(InvertedResidual(carried, channels, expansion=expansion, stride=stride, norm=norm))
            carried = channels
    last = _unit(carried, LAST_CHANNELS, 1, norm)
    return nn.Sequential(*layers, last, classifier(LAST_CHANNELS, classes))


def _unit(
    channels_in: int, channels: int, kernel: int, norm: str, *, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        convolution(channels_in, channels, kernel, stride=stride, groups=groups),
        norm_layer(norm, channels),
        nn.ReLU6(),
    )
