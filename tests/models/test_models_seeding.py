"""The same name, shape and seed give the same parameters, and torch's own random numbers are left alone."""

import subprocess
import sys

import pytest
import torch

from paceline.models import build_model

# One of each family: the others draw as their sisters do, and take longer.
ONE_OF_EACH = [
    "mlp",
    "lenet",
    "vgg11",
    "resnet18",
    "wrn10",
    "alexnet",
    "alexnet-bn",
    "googlenet",
    "densenet121",
    "mobilenetv2",
]


def parameters_of(name, **changed):
    settings = {"input_shape": (1, 8, 8), "classes": 10, "seed": 7} | changed
    return build_model(name, **settings).state_dict()


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_same_seed_same_bits_and_the_global_generator_is_untouched(name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = parameters_of(name)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = parameters_of(name)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["mlp", "lenet", "mobilenetv2"])
def test_another_seed_draws_other_weights(name):
    first, second = parameters_of(name), parameters_of(name, seed=8)
    assert all(not torch.equal(first[key], second[key]) for key in first if first[key].dim() > 1)


def test_biases_start_at_zero_and_weights_keep_the_size_of_activations():
    state = parameters_of("mlp", input_shape=(3, 32, 32))
    assert all(float(value.abs().max()) == 0 for key, value in state.items() if key.endswith("bias"))
    assert float(state["3.weight"].std()) == pytest.approx((2 / 128) ** 0.5, rel=0.05)
    assert float(state["5.weight"].std()) == pytest.approx((1 / 128) ** 0.5, rel=0.1)


def test_importing_the_package_does_not_import_torch():
    check = "import sys, paceline.models as m; m.MODELS['vgg11'].norms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
