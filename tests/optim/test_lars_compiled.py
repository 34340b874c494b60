"""LARS under torch.compile, on a device that cannot be read (no step waits for it), and autograd through a step."""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import LARS
from tests.optim.lars_cases import assert_close, give, numbers, parameters

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("torch-optim")]  # torch's compiler takes seconds to load: once
SHAPES = [(4, 3), (4,), (2, 3, 2, 2)]


# -- torch.compile --------------------------------------------------------------------------------------------------


def stepped(make, lr, *, backend, **settings):
    layers = parameters(numbers(SHAPES, dtype=torch.float32))
    give(layers, numbers(SHAPES, seed=1))
    optimizer = make(layers, lr=lr(), **settings)
    step = torch.compile(optimizer.step, backend=backend) if backend else optimizer.step
    for _ in range(2):
        step()
    return layers


def breaks_of(make, lr, **settings):
    """How many reasons torch's compiler had to break off a step's graph, and the layers after it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layers = stepped(make, lr, backend="eager", **settings)
    return len(torch._dynamo.utils.counters["graph_break"]), layers


LR = {"a number": lambda: 0.1, "a tensor": lambda: torch.tensor(0.1)}
COMPILED = {"as it likes": ("a number", {}), "tensor lr": ("a tensor", {}), "fused": ("a number", {"fused": True})}


@pytest.mark.parametrize(("lr", "way"), COMPILED.values(), ids=COMPILED)
def test_a_compiled_step_is_the_step_and_is_as_much_of_a_piece_as_that_of_sgd(lr, way):
    found, layers = breaks_of(LARS, LR[lr], **way)
    assert_close(layers, stepped(LARS, LR[lr], backend=None, **way), rtol=1e-6, atol=1e-6)
    assert found <= breaks_of(torch.optim.SGD, LR[lr], momentum=0.9, **way)[0]


def test_so_it_is_one_by_one_and_when_its_graph_is_lowered():
    chosen = {"clip": True, "nesterov": True, "maximize": True, "foreach": False}
    torch._dynamo.reset()
    found = stepped(LARS, LR["a tensor"], backend="aot_eager", **chosen)
    assert_close(found, stepped(LARS, LR["a tensor"], backend=None, **chosen), rtol=1e-6, atol=1e-6)


def test_a_rate_that_changes_is_followed_and_not_compiled_anew_each_time():
    graphs = {}
    for make in (LARS, torch.optim.SGD):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        by_way = []
        for backend in ("eager", None):
            layers = parameters(numbers(SHAPES, dtype=torch.float32))
            give(layers, numbers(SHAPES, seed=1))
            optimizer = make(layers, lr=1.0, momentum=0.9)
            step = torch.compile(optimizer.step, backend=backend) if backend else optimizer.step
            for lr in (1.0, 0.5, 0.3, 0.2, 0.1, 0.05):
                optimizer.param_groups[0]["lr"] = lr
                step()
            by_way.append(layers)
        assert_close(by_way[0], by_way[1], rtol=1e-6, atol=1e-6)
        graphs[make] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < graphs[LARS] <= graphs[torch.optim.SGD]


# -- no step waits for its device -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [{}, {"foreach": False}, {"foreach": True}], ids=str)
def test_a_rate_on_the_cpu_is_not_copied_to_the_device(way):
    """`mul` and `minimum` take a scalar of the CPU as a number. `where` would copy it, and wait."""

    class Watch(TorchDispatchMode):
        mixed: ClassVar[set] = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            tensors = [
                each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
            ]
            if len({each.device for each in tensors}) > 1:
                self.mixed.add(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    for clip in (False, True):
        layers = parameters([torch.ones(shape, device="meta") for shape in SHAPES])
        for layer in layers:
            layer.grad = torch.ones_like(layer)
        optimizer = LARS(layers, lr=torch.tensor(0.1), clip=clip, **way)
        with Watch() as watch:
            optimizer.step()
    assert watch.mixed
    assert watch.mixed <= {"mul", "minimum", "_foreach_mul", "_foreach_mul_"}


@pytest.mark.parametrize("way", [{}, {"foreach": False}, {"foreach": True}], ids=str)
def test_a_step_reads_no_number_back(way):
    """Tensors of the meta device have no numbers: whatever asks for one raises an error."""
    with pytest.raises(RuntimeError, match="meta"):
        torch.ones(1, device="meta").item()
    rates = [0.1, torch.tensor(0.1), torch.tensor([0.1])]
    for lr, (clip, maximize, momentum) in itertools.product(
        rates, [(False, False, 0.9), (True, True, 0.0), (True, False, 0.9)]
    ):
        layers = parameters([torch.ones(shape, device="meta") for shape in SHAPES])
        layers.append(torch.nn.Parameter(torch.ones(3, 2, device="meta", dtype=torch.bfloat16)))
        optimizer = LARS(
            layers, lr=lr, clip=clip, maximize=maximize, momentum=momentum, nesterov=momentum > 0 and clip, **way
        )
        for layer in layers:
            layer.grad = torch.ones_like(layer)
        for _ in range(2):
            optimizer.step()
        assert all(layer.is_meta for layer in layers)


# -- autograd through a step ----------------------------------------------------------------------------------------

THROUGH = {
    "plain": {},
    "clip": {"clip": True},
    "nesterov": {"nesterov": True},
    "maximize": {"maximize": True, "weight_decay": 0.0},
    "no momentum": {"momentum": 0.0},
    "unscaled": {
        "trust_coefficient": None,
        "momentum": 0.0,
    },  # torch's SGD changes in place the momentum that autograd keeps
}


def after_two_steps(lr, weights, gradient, later, **settings):
    """The layer after two steps: parameters that are no leaves, for a leaf cannot be changed in place."""
    layer = weights.clone()
    optimizer = LARS([layer], lr=0.1, differentiable=True, **settings)
    optimizer.param_groups[0]["lr"] = lr
    for each in (gradient, later):
        layer.grad = each
        optimizer.step()
    return layer


@pytest.mark.parametrize("chosen", THROUGH.values(), ids=THROUGH)
def test_the_gradient_of_a_step_is_right(chosen):
    inputs = [torch.tensor(0.3, dtype=torch.float64), *numbers([(3, 2), (3, 2), (3, 2)], seed=4)]
    chosen = {"trust_coefficient": 0.2, "weight_decay": 0.01} | chosen
    inputs = [each.requires_grad_() for each in inputs]
    assert torch.autograd.gradcheck(lambda *given: after_two_steps(*given, **chosen), inputs)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("zero", ["weights", "gradient", "both"])
def test_a_layer_of_length_zero_has_a_gradient_without_nan(zero, clip):
    lr, weights, gradient = torch.tensor(0.3, dtype=torch.float64), *numbers([(3, 2), (3, 2)])
    if zero in ("weights", "both"):
        weights = torch.zeros_like(weights)
    if zero in ("gradient", "both"):
        gradient = torch.zeros_like(gradient)
    inputs = [each.requires_grad_() for each in (lr, weights, gradient)]
    layer = after_two_steps(*inputs, numbers([(3, 2)], seed=3)[0], trust_coefficient=0.2, clip=clip)
    for found in torch.autograd.grad(layer.square().sum(), inputs):
        assert found.isfinite().all()


def test_a_rate_can_be_learned():
    """The loss after a step falls along the gradient of the step's rate."""

    def loss(rate):
        layer = numbers([(4, 4)])[0].clone()
        optimizer = LARS([layer], lr=0.1, differentiable=True)
        optimizer.param_groups[0]["lr"] = rate
        layer.grad = 2 * layer.detach()
        optimizer.step()
        return layer.square().sum()

    rate = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    before = loss(rate)
    (slope,) = torch.autograd.grad(before, rate)
    assert slope < 0
    assert loss(rate.detach() - 10 * slope) < before
