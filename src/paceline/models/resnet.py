"""ResNet: He, Zhang, Ren and Sun 2016, "Deep residual learning for image recognition".

    block(x) = ReLU(convolutions(x) + x)

Four stages of blocks at 64, 128, 256 and 512 channels; each stage but the first halves the map.

Where we differ, as is customary for CIFAR: the stem is one 3x3 convolution of stride one, with no pooling. In
a bottleneck the 3x3 convolution has the stride. Where a block changes the shape, x goes through a 1x1
convolution.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from paceline.models.layers import classifier, convolution, norm_layer

STAGE_CHANNELS = (64, 128, 256, 512)


class _ResidualBlock(nn.Module):
    """ReLU(residual(x) + shortcut(x)); the shortcut is x itself unless the shape changes."""

    def __init__(self, residual: nn.Module, channels_in: int, channels_out: int, stride: int, norm: str) -> None:
        super().__init__()
        self.residual = residual
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            shortcut = convolution(channels_in, channels_out, 1, stride=stride), norm_layer(norm, channels_out)
            self.shortcut = nn.Sequential(*shortcut)
        self.activation = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        activated: Tensor = self.activation(self.residual(images) + self.shortcut(images))
        return activated


class BasicBlock(_ResidualBlock):
    """Two 3x3 convolutions around which the input is carried.

    >>> import torch
    >>> BasicBlock(4, 8, stride=2, norm="group")(torch.zeros(1, 4, 6, 6)).shape
    torch.Size([1, 8, 3, 3])
    """

    expansion = 1

    def __init__(self, channels_in: int, channels: int, *, stride: int, norm: str) -> None:
        residual = nn.Sequential(
            convolution(channels_in, channels, 3, stride=stride),
            norm_layer(norm, channels),
            nn.ReLU(),
            convolution(channels, channels, 3),
            norm_layer(norm, channels),
        )
        super().__init__(residual, channels_in, channels, stride, norm)


class Bottleneck(_ResidualBlock):
    """A 3x3 convolution between two 1x1 that narrow and widen, around which the input is carried.

    >>> import torch
    >>> Bottleneck(8, 4, stride=2, norm="group")(torch.zeros(1, 8, 6, 6)).shape
    torch.Size([1, 16, 3, 3])
    """

    expansion = 4

    def __init__(self, channels_in: int, channels: int, *, stride: int, norm: str) -> None:
        channels_out = channels * self.expansion
        residual = nn.Sequential(
            convolution(channels_in, channels, 1),
            norm_layer(norm, channels),
            nn.ReLU(),
            convolution(channels, channels, 3, stride=stride),
            norm_layer(norm, channels),
            nn.ReLU(),
            convolution(channels, channels_out, 1),
            norm_layer(norm, channels_out),
        )
        super().__init__(residual, channels_in, channels_out, stride, norm)


def resnet(
    block: type[BasicBlock] | type[Bottleneck],
    blocks_per_stage: tuple[int, ...],
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    norm: str = "batch",
) -> nn.Sequential:
    """Build a ResNet with so many blocks in each of its four stages.

    >>> [len(build(input_shape=(1, 8, 8), classes=10)) for build in (resnet18, resnet34, resnet50, resnet101)]
    [10, 18, 18, 35]
    """
    carried = STAGE_CHANNELS[0]
    layers: list[nn.Module] = [
        nn.Sequential(convolution(input_shape[0], carried, 3), norm_layer(norm, carried), nn.ReLU())
    ]
    for stage, (blocks, channels) in enumerate(zip(blocks_per_stage, STAGE_CHANNELS, strict=True)):
        for position in range(blocks):
            stride = 2 if stage > 0 and position == 0 else 1
            layers.append(block(carried, channels, stride=stride, norm=norm))
            carried = channels * block.expansion
    return nn.Sequential(*layers, classifier(carried, classes))


resnet18 = partial(resnet, BasicBlock, (2, 2, 2, 2))
resnet34 = partial(resnet, BasicBlock, (3, 4, 6, 3))
resnet50 = partial(resnet, Bottleneck, (3, 4, 6, 3))
resnet101 = partial(resnet, Bottleneck, (3, 4, 23, 3))
