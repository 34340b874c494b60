"""The networks are as large as others' are: counts for 3x32x32 images in ten classes."""

import pytest
import torch
from torch import nn

from paceline.models import MODELS, build_model, count_parameters
from paceline.models.layers import group_count
from paceline.models.wide_resnet import wide_resnet

# Those of the customary CIFAR networks.
CUSTOMARY = {
    "lenet": 62_006,
    "vgg11": 9_231_114,
    "vgg13": 9_416_010,
    "vgg16": 14_728_266,
    "vgg19": 20_040_522,
    "resnet18": 11_173_962,
    "resnet34": 21_282_122,
    "resnet50": 23_520_842,
    "resnet101": 42_512_970,
    "googlenet": 6_166_250,
    "densenet121": 6_956_298,
    "mobilenetv2": 2_296_922,
}
# Those that are this project's own choice of width.
OURS = {
    "mlp": 411_146,
    "wrn10": 4_764_634,
    "wrn16": 10_961_370,
    "wrn22": 17_158_106,
    "alexnet": 7_561_610,
    "alexnet-bn": 7_562_986,
}


@pytest.mark.parametrize(("name", "count"), [*CUSTOMARY.items(), *OURS.items()])
def test_known_counts(name, count):
    with torch.device("meta"):
        assert count_parameters(build_model(name, input_shape=(3, 32, 32), classes=10)) == count


@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if "none" in entry.norms])
def test_without_normalisation_its_scales_and_shifts_are_missing_and_nothing_else(name):
    with torch.device("meta"):
        plain, normed = (
            build_model(name, input_shape=(3, 32, 32), classes=10, norm=norm) for norm in ("none", "batch")
        )
    scales = sum(count_parameters(layer) for layer in normed.modules() if isinstance(layer, nn.BatchNorm2d))
    assert 0 < count_parameters(normed) - count_parameters(plain) == scales


def test_every_network_is_counted():
    assert CUSTOMARY.keys() | OURS.keys() == MODELS.keys()


@pytest.mark.parametrize(("depth", "widen", "millions"), [(16, 8, 11.0), (22, 8, 17.2), (28, 10, 36.5)])
def test_wide_resnets_are_as_large_as_in_their_paper(depth, widen, millions):
    with torch.device("meta"):
        count = count_parameters(wide_resnet(depth, widen, input_shape=(3, 32, 32), classes=10))
    assert round(count / 1e6, 1) == millions


@pytest.mark.parametrize("depth", [4, 11, -2])
def test_wide_resnets_refuse_other_depths(depth):
    with pytest.raises(ValueError, match=rf"depth must be 6n \+ 4 .*depth={depth}"):
        wide_resnet(depth, 8, input_shape=(3, 32, 32), classes=10)


def test_lenet_sees_28_pixels_as_lecun_did():
    with torch.device("meta"):
        model = build_model("lenet", input_shape=(1, 28, 28), classes=10)
    assert count_parameters(model) == 61_706


def test_groups_always_divide_the_channels():
    for channels in range(1, 2049):
        groups = group_count(channels)
        assert 1 <= groups <= 32
        assert channels % groups == 0
        assert groups == 1 or channels // groups >= 4


def test_a_shared_layer_is_counted_once():
    layer = nn.Linear(3, 2)
    assert count_parameters(nn.Sequential(layer, nn.ReLU(), layer)) == 8
