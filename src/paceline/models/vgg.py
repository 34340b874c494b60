"""VGG: Simonyan and Zisserman 2015, "Very deep convolutional networks for large-scale image recognition".

Five stages of 3x3 convolutions, each ended by a 2x2 max pooling; the maps double up to 512.

Where we differ: one linear layer instead of three and no dropout, as is customary for CIFAR and as the LGC
paper has it; normalisation after every convolution (norm="none" is the original). The convolutions keep their
bias beside the normalisation, so that the parameters are as many as others count.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from paceline.models.layers import classifier, convolution, norm_layer

STAGE_CHANNELS = (64, 128, 256, 512, 512)


def vgg(
    convolutions_per_stage: tuple[int, ...], *, input_shape: tuple[int, int, int], classes: int, norm: str = "batch"
) -> nn.Sequential:
    """Build a VGG with so many convolutions in each of its five stages.

    >>> [len(build(input_shape=(1, 8, 8), classes=10)) for build in (vgg11, vgg13, vgg16, vgg19)]
    [14, 16, 19, 22]
    """
    layers: list[nn.Module] = []
    channels = input_shape[0]
    for convolutions, wide in zip(convolutions_per_stage, STAGE_CHANNELS, strict=True):
        for _ in range(convolutions):
            layers.append(nn.Sequential(convolution(channels, wide, 3, bias=True), norm_layer(norm, wide), nn.ReLU()))
            channels = wide
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    return nn.Sequential(*layers, classifier(channels, classes))


vgg11 = partial(vgg, (1, 1, 2, 2, 2))
vgg13 = partial(vgg, (2, 2, 2, 2, 2))
vgg16 = partial(vgg, (2, 2, 3, 3, 3))
vgg19 = partial(vgg, (2, 2, 4, 4, 4))
