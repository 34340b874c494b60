"""A profile: what it counts is what autograd keeps, and measuring leaves no trace in the model."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from torch import nn

from paceline.pipeline.graph import ModelGraph, cut_pieces
from paceline.pipeline.measuring import measure, measure_two_sizes
from tests.pipeline.zoo import ZOO, as_tuple, mlp, model_and_inputs

pytestmark = pytest.mark.slow


@functools.cache
def measured(name):
    model, inputs = model_and_inputs(name)
    graph = ModelGraph(model, inputs)
    return model, inputs, graph, measure(model, inputs, graph=graph, repeats=3)


def kept_bytes(module, inputs):
    """What autograd keeps for backward, besides the module's own weights and its inputs."""
    own = [*module.parameters(), *module.buffers(), *inputs]
    own += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = as_tuple(module(*inputs))
    return sum(size for pointer, size in kept.items() if pointer not in known), outputs


@pytest.mark.parametrize("name", [name for name in ZOO if not name.endswith("-row")])
def test_the_layers_bytes_are_what_autograd_keeps(name):
    _model, inputs, graph, profile = measured(name)
    (whole,) = cut_pieces(graph, [])
    torch.manual_seed(0)
    found, _ = kept_bytes(whole.module, inputs)
    assert sum(layer.activation_bytes for layer in profile.layers) == found


@pytest.mark.parametrize("name", ["mlp", "residual", "unrolled"])
def test_a_piece_keeps_no_more_than_its_layers_say(name):
    """What a piece keeps is made by its own layers, or received: so memory can be added up layer by layer."""
    _model, inputs, graph, profile = measured(name)
    cuts = sorted(random.Random(3).sample(range(1, len(graph.layers)), 3))
    values = inputs
    for piece in cut_pieces(graph, cuts):
        taken = [value.detach().requires_grad_(value.requires_grad) for value in values]
        found, values = kept_bytes(piece.module, taken)
        assert found <= sum(layer.activation_bytes for layer in profile.layers[piece.begin : piece.end])


def test_measuring_leaves_no_trace():
    model, inputs = model_and_inputs("residual")
    model[1].norm.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    numbers = torch.random.get_rng_state()
    measure(model, inputs, repeats=3)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), numbers)


class Overwriting(nn.Module):
    def forward(self, x):
        x[:, 0] = 0
        return torch.relu(x)


def test_a_sample_is_not_overwritten():
    sample = torch.ones(4, 3)
    profile = measure(Overwriting(), (sample,), repeats=3)
    assert profile.evaluates
    assert torch.equal(sample, torch.ones(4, 3))


def test_every_layer_and_tensor_is_told():
    _, _, graph, profile = measured("residual")
    assert [layer.name for layer in profile.layers] == [layer.name for layer in graph.layers]
    assert all(layer.forward_seconds > 0 for layer in profile.layers)
    heavy = next(layer for layer in profile.layers if layer.name == "1.first")
    assert heavy.input_seconds > 0
    for cut in range(1, len(graph.layers)):
        assert profile.crossing_bytes(cut) == sum(value.bytes for value in graph.crossing(cut))


def test_rounds_are_told_to_the_end():
    told = []
    model, inputs = model_and_inputs("mlp")
    measure_two_sizes(
        model,
        inputs,
        graph=ModelGraph(model, inputs),
        repeats=3,
        seconds=0.0,
        on_round=lambda done, of: told.append((done, of)),
    )
    assert told[-1][0] == told[-1][1]
    assert told == sorted(told)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = mlp()

    def forward(self, x):
        return self.inside(x) if self.training else self.inside(x) * 2


def test_a_model_that_evaluates_otherwise_is_found_out():
    profile = measure(Branch(), (torch.ones(2, 4),), repeats=3)
    assert not profile.evaluates
    assert any("in eval mode" in note for note in profile.notes)
    assert measured("residual")[3].evaluates


def test_one_sample_has_no_half_and_all_of_its_time_is_fixed():
    model, inputs = mlp(), (torch.ones(1, 4),)
    profile = measure_two_sizes(model, inputs, graph=ModelGraph(model, inputs), repeats=3)
    assert all(layer.fixed_seconds == layer.seconds for layer in profile.layers)
