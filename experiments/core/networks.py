"""Small networks that two cores can train, by the names that settings give them; other names are those of paceline.

small-cnn           two convolutions that halve each side, three linear layers: a small AlexNet
small-cnn-bn        the same with batch normalisation after each convolution
two-linear-cnn      the same convolutions, two linear layers; torch's own initial weights
one-linear-cnn-bn   the same convolutions with batch normalisation, one linear layer; torch's own initial weights
pooled-cnn          three convolutions with batch normalisation, each with a pooling, and one linear layer
small-googlenet     a stem that halves each side, three inception modules, no normalisation
plain-googlenet     GoogLeNet without normalisation
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from paceline.models import build_model
from paceline.models.googlenet import Inception, Widths, googlenet
from paceline.models.layers import classifier, convolution, initialise

Shape = tuple[int, int, int]


def build_network(name: str, *, input_shape: Shape, classes: int, seed: int) -> nn.Module:
    """Build one of ours or one of paceline's by its name, its weights in the layout that is fast on a CPU.

    >>> type(build_network("lenet", input_shape=(1, 8, 8), classes=10, seed=0)).__name__
    'Sequential'
    """
    model = build_model(network_location(name), input_shape=input_shape, classes=classes, seed=seed)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def network_location(name: str) -> str:
    """Return what `build_model` and recipes call one of ours; other names are their own.

    >>> network_location("small-cnn"), network_location("lenet")
    ('experiments.core.networks:small_cnn', 'lenet')
    """
    own = NETWORKS.get(name)
    return f"{own.__module__}:{own.__name__}" if own else name


def small_cnn(*, input_shape: Shape, classes: int) -> nn.Module:
    """Build a small AlexNet.

    >>> len(list(small_cnn(input_shape=(1, 14, 14), classes=10).parameters()))
    10
    """
    model = _strided(input_shape, (64, 64, classes), normalised=False)
    initialise(model)
    return model


def small_cnn_bn(*, input_shape: Shape, classes: int) -> nn.Module:
    """Build a small AlexNet-BN, whose convolutions have no bias.

    >>> len(list(small_cnn_bn(input_shape=(1, 14, 14), classes=10).parameters()))
    12
    """
    model = _strided(input_shape, (64, 64, classes), normalised=True)
    initialise(model)
    return model


def two_linear_cnn(*, input_shape: Shape, classes: int) -> nn.Module:
    """Build the two convolutions with two linear layers: a third of LeNet's time, which pools in between."""
    return _strided(input_shape, (64, classes), normalised=False)


def one_linear_cnn_bn(*, input_shape: Shape, classes: int) -> nn.Module:
    """Build the two convolutions with batch normalisation and one linear layer.

    >>> len(one_linear_cnn_bn(input_shape=(1, 8, 8), classes=10))
    8
    """
    return _strided(input_shape, (classes,), normalised=True)


def _strided(input_shape: Shape, linear: Sequence[int], *, normalised: bool) -> nn.Sequential:
    channels, height, width = input_shape
    layers: list[nn.Module] = []
    for kernel, wide in ((5, 8), (3, 16)):
        layers += [
            nn.Conv2d(channels, wide, kernel, stride=2, padding=kernel // 2, bias=not normalised),
            nn.BatchNorm2d(wide) if normalised else nn.Identity(),
            nn.ReLU(),
        ]
        channels = wide
    layers.append(nn.Flatten())
    features = channels * math.ceil(height / 4) * math.ceil(width / 4)
    for wide in linear:
        layers += [nn.Linear(features, wide), nn.ReLU()]
        features = wide
    return nn.Sequential(*layers[:-1])


def pooled_cnn(*, input_shape: Shape, classes: int) -> nn.Module:
    """Build three convolutions with batch normalisation, each followed by a pooling, and one linear layer."""
    channels, height, width = input_shape
    layers: list[nn.Module] = []
    for wide in (16, 32, 64):
        layers += [
            nn.Conv2d(channels, wide, 3, padding=1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
        ]
        channels, height, width = wide, math.ceil(height / 2), math.ceil(width / 2)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, classes))
    initialise(model)
    return model


def small_googlenet(*, input_shape: Shape, classes: int) -> nn.Module:
    """Build a small GoogLeNet without normalisation.

    >>> small_googlenet(input_shape=(1, 14, 14), classes=10)(torch.zeros(2, 1, 14, 14)).shape
    torch.Size([2, 10])
    """
    widths = (Widths(8, 8, 12, 4, 6, 6), Widths(12, 8, 16, 4, 8, 8), Widths(16, 12, 24, 6, 12, 12))
    layers: list[nn.Module] = [nn.Sequential(convolution(input_shape[0], 16, 5, stride=2, bias=True), nn.ReLU())]
    channels = 16
    for index, width in enumerate(widths):
        if index == 1:
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
        layers.append(Inception(channels, width, norm="none"))
        channels = width.total
    model = nn.Sequential(*layers, classifier(channels, classes))
    initialise(model)
    return model


def plain_googlenet(*, input_shape: Shape, classes: int) -> nn.Module:
    """Build GoogLeNet without normalisation, which the LARS paper's table 6 trains.

    >>> len(plain_googlenet(input_shape=(1, 8, 8), classes=10))
    13
    """
    model = googlenet(input_shape=input_shape, classes=classes, norm="none")
    initialise(model)
    return model


NETWORKS = {
    "small-cnn": small_cnn,
    "small-cnn-bn": small_cnn_bn,
    "two-linear-cnn": two_linear_cnn,
    "one-linear-cnn-bn": one_linear_cnn_bn,
    "pooled-cnn": pooled_cnn,
    "small-googlenet": small_googlenet,
    "plain-googlenet": plain_googlenet,
}
