"""A trainee that is saved and loaded goes on as if nothing had happened, to the last bit."""

import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.events import Share, Step
from paceline.training import TrainState, fingerprint
from paceline.training.plain import with_tensors, without_tensors

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def make(name):
    module = network()
    optimizer = OPTIMIZERS[name](module.parameters())
    return TrainState(module, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5]))


def steps(trainee, versions):
    for version in versions:
        generator = torch.Generator().manual_seed(version)
        gradient = torch.randn(trainee.model.parameters.numel(), generator=generator)
        change = torch.rand(trainee.model.buffers.numel(), generator=generator)
        shares = (Share(worker=0, version=version, weight=1.0),)
        previous = 0.25 if version else 0.0
        step = Step(version=version, fresh=shares, previous_mean_weight=previous)
        assert trainee.take(step, lambda share, found=gradient: found, [change])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saved_and_loaded_goes_on_to_the_last_bit(name):
    undisturbed, stopped, resumed = make(name), make(name), make(name)
    steps(undisturbed, range(8))
    steps(stopped, range(4))
    plain, tensors = stopped.state()
    plain, tensors = json.loads(json.dumps(plain)), {key: value.clone() for key, value in tensors.items()}
    resumed.load_state(plain, tensors)
    steps(resumed, range(4, 8))
    assert torch.equal(undisturbed.model.parameters, resumed.model.parameters)
    assert torch.equal(undisturbed.model.buffers, resumed.model.buffers)
    assert resumed.version == 8


def test_an_update_that_is_not_finite_changes_nothing():
    trainee = make("sgd")
    before = trainee.model.parameters.clone()
    for bad in (float("nan"), float("inf")):
        step = Step(version=0, fresh=(Share(worker=0, version=0, weight=1.0),))
        assert not trainee.take(step, lambda share, value=bad: torch.full((before.numel(),), value), [])
    assert torch.equal(before, trainee.model.parameters)
    assert trainee.version == 0


def test_a_state_of_another_model_is_refused_and_loses_nothing():
    trainee, other = make("sgd"), nn.Linear(2, 2)
    plain, tensors = TrainState(other, torch.optim.SGD(other.parameters(), lr=0.1)).state()
    before = trainee.model.parameters.clone()
    with pytest.raises(ValueError, match="another model"):
        trainee.load_state(plain, tensors)
    assert torch.equal(before, trainee.model.parameters)


@given(st.integers(0, 30), st.integers(0, 31))
def test_a_fingerprint_sees_every_bit(index, bit):
    vector = torch.randn(31, generator=torch.Generator().manual_seed(1))
    changed = vector.clone()
    word = changed.view(torch.int32)
    word[index] = word[index] ^ (-(2**31) if bit == 31 else 2**bit)
    assert fingerprint(vector) != fingerprint(changed)


plain_values = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text()
nested = st.recursive(
    plain_values | st.builds(torch.tensor, st.lists(st.floats(width=32, allow_nan=False), max_size=3)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers(0, 9) | st.text(max_size=5) | st.just("=tensor"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(nested)
def test_any_nested_state_comes_back_as_it_was(value):
    tensors = {}
    plain = json.loads(json.dumps(without_tensors(copy.deepcopy(value), "state", tensors)))
    assert same(with_tensors(plain, tensors), value)


def same(one, other):
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in other)
    if isinstance(other, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other and type(one) is type(other)


def test_what_a_checkpoint_cannot_hold_is_named():
    with pytest.raises(TypeError, match=r"optimizer\.hook is a function"):
        without_tensors({"hook": same}, "optimizer", {})
