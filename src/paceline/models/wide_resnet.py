"""Wide ResNet: Zagoruyko and Komodakis 2016, "Wide residual networks".

    block(x) = conv(ReLU(norm(conv(ReLU(norm(x)))))) + x

Three stages of blocks at 16k, 32k and 64k channels; WRN-d-k has (d - 4) / 6 blocks in each.

The data fine-pruning paper trains WRN-10, WRN-16 and WRN-22 and does not say how wide. We take k = 8: the
authors' own table has WRN-16-8 and WRN-22-8. No dropout, as in that table.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from paceline.models.layers import classifier, convolution, norm_layer

WIDEN_FACTOR = 8


class WideBlock(nn.Module):
    """Normalisation and ReLU come before each of two 3x3 convolutions.

    Where the shape changes, the input that is carried around is the activated one, through a 1x1 convolution.

    >>> import torch
    >>> WideBlock(4, 8, stride=2, norm="group")(torch.zeros(1, 4, 6, 6)).shape
    torch.Size([1, 8, 3, 3])
    """

    def __init__(self, channels_in: int, channels: int, *, stride: int, norm: str) -> None:
        super().__init__()
        self.changes_shape = stride != 1 or channels_in != channels
        self.activation = nn.Sequential(norm_layer(norm, channels_in), nn.ReLU())
        self.residual = nn.Sequential(
            convolution(channels_in, channels, 3, stride=stride),
            norm_layer(norm, channels),
            nn.ReLU(),
            convolution(channels, channels, 3),
        )
        self.shortcut = convolution(channels_in, channels, 1, stride=stride) if self.changes_shape else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        activated = self.activation(images)
        carried: Tensor = self.shortcut(activated if self.changes_shape else images)
        residual: Tensor = self.residual(activated)
        return carried + residual


def wide_resnet(
    depth: int,
    widen_factor: int = WIDEN_FACTOR,
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    norm: str = "batch",
) -> nn.Sequential:
    """Build WRN-depth-widen_factor.

    >>> [len(build(input_shape=(1, 8, 8), classes=10)) for build in (wrn10, wrn16, wrn22)]
    [6, 9, 12]
    """
    if depth < 10 or depth % 6 != 4:
        raise ValueError(f"depth must be 6n + 4 with n of at least 1 (depth={depth}); take 10, 16, 22, 28, ...")
    carried = 16
    layers: list[nn.Module] = [convolution(input_shape[0], carried, 3)]
    for stage, channels in enumerate(base * widen_factor for base in (16, 32, 64)):
        for position in range((depth - 4) // 6):
            stride = 2 if stage > 0 and position == 0 else 1
            layers.append(WideBlock(carried, channels, stride=stride, norm=norm))
            carried = channels
    last_activation = nn.Sequential(norm_layer(norm, carried), nn.ReLU())
    return nn.Sequential(*layers, last_activation, classifier(carried, classes))


wrn10, wrn16, wrn22 = (partial(wide_resnet, depth) for depth in (10, 16, 22))
