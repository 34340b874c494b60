"""The laws that torch holds its own optimisers to, by its own helpers: direction, agreement of ways, rates, errors."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch

from paceline import LARS
from paceline.optim import lars
from tests.optim.lars_cases import WAYS, assert_close, assert_equal, numbers, parameters
from tests.optim.of_torch import equal_to, helpers, inputs, lars_info

pytestmark = pytest.mark.xdist_group("torch-optim")


def without(given, *names):
    return {name: value for name, value in copy.deepcopy(given.kwargs).items() if name not in names}


# -- what it is made of ---------------------------------------------------------------------------------------------


def test_what_torch_refuses_for_every_optimiser_is_refused_in_the_same_words():
    found = lars_info().optim_error_inputs_func("cpu", torch.float32)
    assert len(found) >= 6
    for each in found:
        given, expected = each.optimizer_error_input, each.error_type
        refused = pytest.warns if issubclass(expected, Warning) else pytest.raises
        with refused(expected, match=each.error_regex):
            LARS(given.params, **given.kwargs)


def test_the_inputs_are_those_of_every_way():
    names = ("foreach", "fused", "differentiable")
    ways = {tuple(name for name in names if given.kwargs.get(name)) for given in inputs()}
    assert ways == {(), ("foreach",), ("fused",), ("differentiable",)}
    for given in inputs():
        assert "LARS" in repr(LARS(parameters(numbers([(2, 2)])), **given.kwargs))


def test_on_the_cpu_the_default_is_one_pass_and_what_is_asked_for_is_done(monkeypatch):
    called = []
    for name in ("one_pass", "many_at_once", "one_by_one"):
        monkeypatch.setattr(lars, name, lambda layers, step, name=name: called.append(name))

    class Own(torch.Tensor):
        """A tensor with arithmetic of its own may be, on which no fused kernel works."""

    plain, own = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2).as_subclass(Own).requires_grad_()
    table = [
        (plain, {}, "one_pass"),
        (plain, {"foreach": True}, "many_at_once"),
        (plain, {"foreach": False}, "one_by_one"),
        (plain, {"fused": True}, "one_pass"),
        (plain, {"fused": False}, "one_by_one"),
        (plain, {"differentiable": True}, "one_by_one"),
        (own, {}, "one_by_one"),
    ]
    for layer, chosen, _ in table:
        layer.grad = torch.ones(2, 2)
        LARS([layer], lr=0.1, **chosen).step()
    assert called == [expected for _, _, expected in table]


# -- the right direction --------------------------------------------------------------------------------------------


def losses(shapes, given, *, schedules=(), steps=15, contiguous=True):
    """The loss before and after; its gradients come from a closure, as LBFGS wants them too."""
    torch.manual_seed(3)
    weight, bias = (torch.randn(*shape, 2)[..., 0] for shape in shapes)
    if contiguous:
        weight, bias = weight.contiguous(), bias.contiguous()
    weight, bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    assert weight.is_contiguous() == contiguous
    sample = torch.randn(weight.shape[-1])
    optimizer = LARS([weight, bias], **given)
    made = [schedule(optimizer) for schedule in schedules]

    def closure():
        optimizer.zero_grad()
        loss = (weight @ sample + bias).square().sum()
        loss.backward()
        return loss

    first = closure().detach()
    for _ in range(steps):
        returned = optimizer.step(closure)
        assert isinstance(returned, torch.Tensor)
        for schedule in made:
            schedule.step()
    return float(first), float(closure().detach())


PLACES = {"matrix": (((10, 5), (10,)), True), "not contiguous, of four dimensions": (((2, 3, 4, 5), (2, 3, 4)), False)}


@pytest.mark.parametrize(("shapes", "contiguous"), PLACES.values(), ids=PLACES)
def test_steps_go_the_right_way(shapes, contiguous):
    for given in inputs(skip=("differentiable",)):
        before, after = losses(shapes, copy.deepcopy(given.kwargs), contiguous=contiguous)
        assert (after > before) if given.kwargs.get("maximize") else (after < before), given.desc


def test_steps_go_the_right_way_under_a_schedule():
    for schedules, given in itertools.product(lars_info().scheduler_inputs, inputs(ways=False)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "LARS has weight_decay")
            before, after = losses(((10, 5), (10,)), copy.deepcopy(given.kwargs), schedules=schedules)
        assert (after > before) if given.kwargs.get("maximize") else (after < before), given.desc


# -- its rate -------------------------------------------------------------------------------------------------------

MIXED = [((5, 3), torch.float64), ((4,), torch.float32), ((3, 2, 2, 2), torch.float32), ((), torch.float64)]


def mixed_layers(seed=0, dtypes=MIXED):
    return parameters([numbers([shape], seed=seed + n)[0].to(dtype) for n, (shape, dtype) in enumerate(dtypes)])


def steps(layers, given, *, count=5, kept=None, after=None, message=""):
    """Take steps; every layer and its momentum is kept, or compared with what was."""
    optimizer = LARS(layers, **given)
    for step in range(count):
        for n, layer in enumerate(layers):
            layer.grad = None if step == 2 and n == 1 else numbers([layer.shape], seed=10 * step + n)[0].to(layer.dtype)
        if step == 0:
            layers[0].grad = None
        optimizer.step()
        for tensor in (value for layer in layers for value in (layer, *optimizer.state.get(layer, {}).values())):
            if kept is not None:
                kept.add(tensor)
            else:
                equal_to(after, tensor, f"{message}, step {step}")
    return optimizer


@pytest.mark.parametrize("shape", [(), (1,)], ids=["no dimension", "one"])
def test_a_rate_in_a_tensor_is_a_rate(shape):
    for given in inputs():
        rest = without(given, "lr")
        expected, found = mixed_layers(), mixed_layers()
        ours, theirs = torch.full(shape, 0.05, dtype=torch.float64), 0.05
        made = [LARS(found, lr=ours, **rest), LARS(expected, lr=theirs, **rest)]
        for layers, optimizer in zip((found, expected), made, strict=True):
            if rest.get("differentiable"):
                layers[:] = [layer.detach() for layer in layers]
                optimizer.param_groups[0]["params"] = layers
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            for step in range(3):
                for n, layer in enumerate(layers):
                    layer.grad = numbers([layer.shape], seed=10 * step + n)[0].to(layer.dtype)
                optimizer.step()
                schedule.step()
        assert made[0].param_groups[0]["lr"] is ours  # schedules change it in place
        assert float(ours) == pytest.approx(made[1].param_groups[0]["lr"])
        assert_close(found, expected, rtol=1e-6, atol=1e-6, message=given.desc)


def test_a_group_may_have_a_rate_and_a_weight_decay_of_its_own():
    gradient, start = numbers([(3, 2)], seed=1)[0], numbers([(3, 2)])
    for way in (*WAYS.values(), {}):
        layers = parameters(start * 3)
        groups = [{"params": layers[0]}, {"params": [layers[1]], "lr": 0.5}, {"params": layers[2], "weight_decay": 0.5}]
        optimizer = LARS(groups, lr=0.1, weight_decay=0.0, **way)
        for layer in layers:
            layer.grad = gradient.clone()
        optimizer.step()
        alone = [{"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.5, "weight_decay": 0.0}, {"lr": 0.1, "weight_decay": 0.5}]
        for layer, chosen in zip(layers, alone, strict=True):
            (expected,) = parameters(start)
            expected.grad = gradient.clone()
            LARS([expected], **chosen, **way).step()
            assert_equal([layer], [expected])


# -- one by one is the measure of the other ways --------------------------------------------------------------------


@pytest.mark.parametrize("way", [WAYS["many at once"], WAYS["one pass"], {}], ids=["foreach", "fused", "default"])
def test_every_way_matches_the_plain_loop_step_by_step(way):
    """Types mixed, gradients missing for a step, for the first, and for all of them (an optimiser of nothing)."""
    for given in inputs(ways=False):
        rest, kept = without(given), helpers().TensorTracker({"rtol": 1e-5, "atol": 1e-6})
        steps(mixed_layers(), {**rest, "foreach": False}, kept=kept)
        steps(mixed_layers(), {**rest, **way}, after=kept, message=given.desc)
        assert kept.all_popped()


@pytest.mark.parametrize("way", [WAYS["many at once"], WAYS["one pass"]], ids=["foreach", "fused"])
def test_a_large_batch_of_layers_of_every_type_matches_too(way):
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    many = [((n % 7, 5) if n % 3 else (n,), dtypes[n % 4]) for n in range(120)]
    kept = helpers().TensorTracker({"rtol": 0.02, "atol": 0.01})
    steps(mixed_layers(dtypes=many), {"lr": 0.1, "trust_coefficient": 0.01, "foreach": False}, count=2, kept=kept)
    steps(mixed_layers(dtypes=many), {"lr": 0.1, "trust_coefficient": 0.01, **way}, count=2, after=kept, message="many")
    assert kept.all_popped()


def test_a_default_of_double_precision_changes_nothing():
    for way in WAYS.values():
        kept, given = helpers().TensorTracker(), {"lr": 0.1, **way}
        steps(mixed_layers(), given, kept=kept)
        torch.set_default_dtype(torch.float64)
        try:
            steps(mixed_layers(), given, after=kept, message="default dtype")
        finally:
            torch.set_default_dtype(torch.float32)


# -- nothing to do --------------------------------------------------------------------------------------------------


def test_without_gradients_or_with_none_but_zeros_a_step_changes_nothing():
    for given in inputs():
        rest = without(given, "weight_decay")
        for gradient in (None, 0.0):
            layers = [layer.detach() for layer in mixed_layers()]
            before = copy.deepcopy(layers)
            optimizer = LARS(layers, weight_decay=0.0, **rest)
            for layer in layers:
                layer.grad = None if gradient is None else torch.zeros_like(layer)
            optimizer.step()
            assert_equal(layers, before)
            assert bool(optimizer.state) == (gradient is not None and rest.get("momentum") != 0)
