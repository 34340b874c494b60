"""Pieces laid one behind the other are the model: outputs, gradients, buffers and names, wherever it is cut."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import re

import pytest
import torch
from torch import nn

from paceline.pipeline import PipelineError
from paceline.pipeline.graph import ModelGraph, cut_pieces, hand_on
from tests.pipeline.zoo import ZOO, Undecided, Views, as_tuple, mlp, model_and_inputs, residual_net

pytestmark = pytest.mark.slow


@functools.cache
def traced(name):
    """A model, its inputs and its graph; whoever changes the model takes a copy and traces again."""
    model, inputs = model_and_inputs(name)
    return model, inputs, ModelGraph(model, inputs)


def cuts_of(graph, seed):
    """One random cut in each, few and many."""
    layers = len(graph.layers)
    generator = random.Random(seed)
    return sorted(generator.sample(range(1, layers), generator.randint(1, min(5, layers - 1))))


def play(pieces, inputs):
    values = inputs
    for piece in pieces:
        values = as_tuple(piece.module(*values))
    return values


def total(outputs):
    return sum((output * torch.arange(output.numel()).reshape(output.shape)).sum() for output in outputs)


def every_cut(graph):
    """No cut, each cut by itself, all of them, and some random ones."""
    layers = len(graph.layers)
    yield from ([], *([cut] for cut in range(1, layers)), list(range(1, layers)))
    yield from (cuts_of(graph, seed) for seed in range(3))


@pytest.mark.parametrize("name", ZOO)
def test_pieces_are_the_model_wherever_it_is_cut(name):
    model, inputs, graph = traced(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    single = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = as_tuple(single(*inputs))
    total(expected).backward()
    for cuts in every_cut(graph):
        model.load_state_dict(before)
        model.zero_grad()
        torch.manual_seed(1)
        found = play(cut_pieces(graph, cuts), inputs)
        total(found).backward()
        assert len(found) == len(expected)
        for mine, its in zip(found, expected, strict=True):
            assert mine.dtype == its.dtype
            assert torch.allclose(mine, its, rtol=1e-5, atol=1e-6), cuts
        for (key, mine), its in zip(model.named_parameters(), single.parameters(), strict=True):
            assert (mine.grad is None) == (its.grad is None), (cuts, key)
            assert its.grad is None or torch.allclose(mine.grad, its.grad, rtol=1e-4, atol=1e-5), (cuts, key)
        for (key, mine), its in zip(model.named_buffers(), single.buffers(), strict=True):
            assert torch.equal(mine, its), (cuts, key)
    model.load_state_dict(before)


@pytest.mark.parametrize("name", ZOO)
def test_pieces_evaluate_as_the_model_does(name):
    model, inputs, graph = traced(name)
    modes = {module: module.training for module in model.modules()}
    pieces = cut_pieces(graph, cuts_of(graph, 7))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for piece in pieces:
        piece.module.eval()
    with torch.no_grad():
        found = play(pieces, inputs)
        after = {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(before)
        expected = as_tuple(model.eval()(*inputs))
    assert len(found) == len(expected)
    for mine, its in zip(found, expected, strict=True):  # torch has a quicker way through an encoder that evaluates
        assert torch.allclose(mine, its, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(value, after[key]) for key, value in model.state_dict().items())
    assert name == "memory" or all(torch.equal(value, before[key]) for key, value in after.items())
    model.load_state_dict(before)
    for module, training in modes.items():
        module.training = training


@pytest.mark.parametrize("name", ZOO)
def test_what_a_piece_gives_is_what_the_next_takes(name):
    model, _, graph = traced(name)
    pieces = cut_pieces(graph, range(1, len(graph.layers)))
    for piece, behind in itertools.pairwise(pieces):
        assert [value.name for value in piece.gives] == [value.name for value in behind.takes]
    held = {key for piece in pieces for key in piece.module.state_dict()}
    unused = {note.split()[0] for note in graph.notes if note.endswith("is not used by the model's forward")}
    tied = {"tied": {"table.weight", "out.weight"}, "tied-row": {"2.weight", "2.bias"}}.get(name, set())
    assert held | unused | tied == set(model.state_dict())  # a weight with two names is held under one
    assert unused == ({"norm.num_batches_tracked"} if name == "frozen" else set())


def test_every_trained_weight_is_the_models_own():
    model, _, graph = traced("residual")
    for piece in cut_pieces(graph, [3]):
        for key, parameter in piece.module.named_parameters():
            assert parameter is model.get_parameter(key)


def test_layers_that_overwrite_can_be_cut_from_those_before():
    """ReLU(inplace=True) and += are told as layers of their own, and nothing in a piece overwrites what it received."""
    _, inputs, graph = traced("residual")
    names = [layer.name for layer in graph.layers]
    assert "1.activation" in names
    assert "1.activation@1" in names
    assert not graph.notes
    given = [tensor.clone() for tensor in inputs]
    play(cut_pieces(graph, range(1, len(graph.layers))), inputs)
    assert all(torch.equal(mine, its) for mine, its in zip(given, inputs, strict=True))


def test_what_cannot_be_parted_is_one_layer_and_says_why():
    _, _, graph = traced("views")
    assert any("overwritten in place" in note for note in graph.notes)
    assert any(re.search(r"norm\.running_\w+ is a buffer that they share", note) for note in graph.notes)


def test_the_same_reason_in_every_block_is_one_note():
    alone = ModelGraph(Views(), (torch.randn(6, 4),)).notes
    of_six = ModelGraph(nn.Sequential(*(Views() for _ in range(6))), (torch.randn(6, 4),)).notes
    assert len(of_six) == len(alone)
    assert not any("more such groups" in note for note in alone)
    assert all(", and 5 more such groups, stay together: " in note for note in of_six)


def test_another_micro_batch_has_the_same_fingerprint_and_another_model_has_not():
    model, inputs, graph = traced("residual")
    assert ModelGraph(model, tuple(each[:2] for each in inputs)).fingerprint == graph.fingerprint
    assert ModelGraph(residual_net(norm=False), inputs).fingerprint != graph.fingerprint


def test_tracing_leaves_modes_as_they_were():
    model = mlp()
    model[1].eval()
    ModelGraph(model, (torch.ones(2, 4),))
    assert [module.training for module in model] == [True, False, True, True, True]


class Told(nn.Module):
    def forward(self, x):
        return {"out": x}


class And(nn.Module):
    def __init__(self, more):
        super().__init__()
        self.more = more

    def forward(self, x):
        return torch.relu(x), self.more


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Undecided(), "torch.export cannot trace Undecided"),
        (Told(), "must return a tensor or a tuple of tensors"),
        (And(None), r"must return a tensor or a tuple of tensors.*None"),
        (And(3), r"must return a tensor or a tuple of tensors.*3"),
        (nn.Sequential(nn.LSTM(4, 4), Undecided()), "module 0 of the nn.Sequential must return a tensor"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_in_one_line(model, words, capfd):
    with pytest.raises(PipelineError, match=words):
        ModelGraph(model, (torch.ones(2, 4),))
    told = capfd.readouterr()
    assert told.out + told.err == ""


def test_a_row_has_gradients_whoever_asks_for_it():
    with torch.no_grad():
        model, inputs = model_and_inputs("undecided-row")
        graph = ModelGraph(model, inputs)
    assert [value.needs_gradient for value in graph.values] == [False, True, True, True]


def test_a_row_that_cannot_be_traced_is_cut_between_its_modules():
    _, _, graph = traced("undecided-row")
    assert [layer.name for layer in graph.layers] == ["0", "1", "2", "3"]
    assert "the modules of the nn.Sequential are taken whole" in graph.notes[0]


def test_what_is_handed_on_is_no_view_and_no_copy():
    leaf = torch.randn(4, 6, requires_grad=True)
    seen = hand_on((leaf * 2)[1:3])
    assert not seen._is_view()
    assert seen.is_contiguous()
    base = leaf * 2
    assert hand_on(base).data_ptr() == base.data_ptr()
    seen.sum().backward()
    assert torch.equal(leaf.grad, torch.tensor([0.0, 2.0, 2.0, 0.0])[:, None].expand(4, 6))
