"""A user's own network, named 'module:factory', from a module in the current directory."""

import sys

import pytest
import torch

from paceline.models import build_model

SOURCE = """
import torch
from torch import nn

not_callable = 3

def both(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], classes))

def only_classes(classes, width=4):
    return nn.Linear(width, classes)

def nothing():
    return nn.Linear(2, 2)

def anything(**settings):
    return nn.Linear(settings["classes"], 1)

class Net(nn.Module):
    def __init__(self, *, classes):
        super().__init__()
        self.out = nn.Linear(2, classes)

def late_import(classes):
    import {helper}
    return {helper}.make()

def too_much(input_shape, width):
    return nn.Linear(width, 1)

def positional_only(classes, /):
    return nn.Linear(classes, 1)

def no_network():
    return [1, 2]

def broken():
    raise RuntimeError("the user's own trouble")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of a module that lies in the current directory and nowhere else."""
    name, helper = "paceline_test_own_networks", "paceline_test_own_helper"
    (tmp_path / f"{name}.py").write_text(SOURCE.format(helper=helper))
    (tmp_path / f"{helper}.py").write_text("from torch import nn\ndef make():\n    return nn.Identity()\n")
    monkeypatch.chdir(tmp_path)
    yield name
    for module in [key for key in sys.modules if key.startswith("paceline_test_own")]:
        del sys.modules[module]


def build(name, **changed):
    return build_model(name, **({"input_shape": (1, 4, 4), "classes": 3} | changed))


@pytest.mark.parametrize(
    ("factory", "shape"),
    [
        ("both", (3, 16)),
        ("only_classes", (3, 4)),
        ("nothing", (2, 2)),
        ("anything", (1, 3)),
        ("Net", (3, 2)),
    ],
)
def test_the_factory_is_given_what_it_takes(own, factory, shape):
    path, random_state = list(sys.path), torch.get_rng_state()
    first, second, other = (build(f"{own}:{factory}", seed=seed) for seed in (0, 0, 1))
    weights = [next(iter(model.parameters())) for model in (first, second, other)]
    assert weights[0].shape == shape
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert sys.path == path
    assert torch.equal(torch.get_rng_state(), random_state)


def test_the_factory_may_import_its_neighbours_late(own):
    assert isinstance(build(f"{own}:late_import"), torch.nn.Identity)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{own}:bothe", r"unknown factory in module '{own}': 'bothe'; did you mean 'both'\?"),
        ("{own}:not_callable", r"names a int; name a function or class"),
        ("{own}:too_much", r"cannot be built with input_shape and classes alone \(.*'width'.*defaults"),
        ("{own}:positional_only", r"cannot be built with input_shape and classes alone"),
        ("{own}:no_network", r"returned list; its factory must return a torch.nn.Module"),
        ("no_such_place:net", r"module 'no_such_place' of model 'no_such_place:net' was not found; run from"),
        ("torch.no_such:net", r"module 'torch.no_such' of model .* was not found"),
        ("{own}.deeper:net", r"module '{own}.deeper' of model .* was not found"),
        (":net", r"model ':net' must be 'module:factory'"),
        ("{own}:", r"must be 'module:factory', such as 'my_models:small_net'"),
        ("{own}:a:b", r"must be 'module:factory'"),
        ("../{own}:both", r"must be 'module:factory'"),
    ],
)
def test_what_is_not_found_is_named(own, name, message):
    path = list(sys.path)
    with pytest.raises(ValueError, match=message.format(own=own)) as caught:
        build(name.format(own=own))
    assert "\n" not in str(caught.value)
    assert sys.path == path


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import no_such_dependency",
            r"could not be imported; mend its ModuleNotFoundError: No module named",
        ),
        ("def f(:", r"could not be imported; mend its SyntaxError"),
        ("raise OSError('first\\nsecond')", r"could not be imported; mend its OSError: first second"),
        ("x = 1", r"has no 'net', nor any function or class"),
    ],
)
def test_a_module_that_does_not_import_says_why(own, tmp_path, source, message):
    (tmp_path / "paceline_test_own_bad.py").write_text(source)
    with pytest.raises(ValueError, match=message) as caught:
        build("paceline_test_own_bad:net")
    assert "\n" not in str(caught.value)


def test_trouble_inside_the_factory_is_left_as_it_is(own):
    path = list(sys.path)
    with pytest.raises(RuntimeError, match="the user's own trouble"):
        build(f"{own}:broken")
    assert sys.path == path
