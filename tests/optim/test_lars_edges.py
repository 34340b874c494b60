"""LARS where its formula has nothing to say, or where numbers run out: zeros, NaN, infinity, tiny and huge, halves."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import LARS
from tests.optim.lars_cases import WAYS, assert_close, assert_equal, give, numbers, parameters, run, written_down

ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
ALL = {
    "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.001, "clip": False, "nesterov": False,
    "maximize": False, "exclude_bias_and_norm": False,
}  # fmt: skip
NOTHING, INFINITE = float("nan"), float("inf")


def velocity(optimizer, layer):
    return optimizer.state[layer]["velocity"]


# -- nothing to scale by --------------------------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("clip", [False, True])
def test_where_a_norm_is_zero_the_rate_is_lr(way, clip):
    weights, gradient = numbers([(3, 2), (3, 2)])
    zero = torch.zeros_like(weights)
    for w, g in ((zero, gradient), (weights, zero), (zero, zero)):
        found, _ = run([w], [[g]], lr=0.5, weight_decay=0.01, clip=clip, **way)
        assert_close(found, [w - 0.5 * (g + 0.01 * w)])


@ways
def test_a_layer_of_zeros_gets_going(way):
    """Its first step is SGD's; from the second on it has a length, and its own rate."""
    gradients = [numbers([(3, 2)], seed=step) for step in range(3)]
    found, _ = run([torch.zeros(3, 2, dtype=torch.float64)], gradients, lr=0.5, **ALL, **way)
    assert_close(found, written_down([torch.zeros(3, 2)], gradients, lr=0.5, **ALL))


@ways
def test_layers_without_elements_or_dimensions_are_layers(way):
    shapes = [(0,), (0, 3), (), (2, 2), (1,)]
    start, gradients = numbers(shapes), [numbers(shapes, seed=1), numbers(shapes, seed=2)]
    for excluding in (False, True):
        chosen = ALL | {"exclude_bias_and_norm": excluding}
        found, _ = run(start, gradients, lr=0.5, **chosen, **way)
        assert_close(found, written_down(start, gradients, lr=0.5, **chosen))
        assert [layer.shape for layer in found] == [torch.Size(shape) for shape in shapes]


@ways
def test_a_layer_without_a_gradient_keeps_its_weights_and_its_velocity(way):
    layers = parameters(numbers([(3, 2), (2, 2), (2, 2)]))
    layers[2].requires_grad_(False)
    optimizer = LARS(layers, lr=0.5, **way)
    optimizer.step()  # nobody has one
    assert not optimizer.state
    give(layers[:2], numbers([(3, 2), (2, 2)], seed=1))
    optimizer.step()
    assert layers[2] not in optimizer.state
    kept = [layers[0].detach().clone(), velocity(optimizer, layers[0]).clone()]
    moved = layers[1].detach().clone()
    layers[0].grad = None
    optimizer.step()
    assert_equal([layers[0], velocity(optimizer, layers[0])], kept)
    assert_equal([layers[2]], numbers([(3, 2), (2, 2), (2, 2)])[2:])
    assert not torch.equal(layers[1], moved)


@ways
def test_at_a_rate_of_zero_a_layer_moves_on_by_its_momentum_alone(way):
    layers = parameters(numbers([(3, 2), (4,)]))
    optimizer = LARS(layers, lr=0.5, momentum=0.5, **way)
    give(layers, numbers([(3, 2), (4,)], seed=1))
    optimizer.step()
    before = [(layer.detach().clone(), velocity(optimizer, layer).clone()) for layer in layers]
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert_close(layers, [w - 0.5 * v for w, v in before])
    assert_close([velocity(optimizer, layer) for layer in layers], [0.5 * v for _, v in before])


# -- not a number ---------------------------------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("clip", [False, True])
def test_a_nan_takes_its_layer_and_an_infinity_its_element_and_neither_a_neighbour(way, momentum, clip):
    start, good = numbers([(3, 2), (3, 2), (4,), (2, 2)]), numbers([(3, 2), (3, 2), (4,), (2, 2)], seed=1)
    bad = [gradient.clone() for gradient in good]
    bad[0][1, 1], bad[1][2, 0], bad[2][3] = NOTHING, INFINITE, NOTHING
    common = {"lr": 0.5, "momentum": momentum, "clip": clip, **way}
    (whole, infinite, bias, untouched), _ = run(start, [good, bad], **common)
    (_, without, of_bias, expected), _ = run(start, [good, good], **common)
    assert whole.isnan().all()
    assert infinite.isfinite().logical_not().nonzero().tolist() == [[2, 0]]
    assert bias[3].isnan()
    assert_equal([bias[:3], untouched], [of_bias[:3], expected])
    assert not torch.equal(infinite[0], without[0])  # a gradient of infinite length: what is left is momentum


# -- tiny and huge --------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(exponent=st.floats(-12, -4), nesterov=st.booleans(), maximize=st.booleans())
def test_one_pass_is_as_exact_below_the_rate_at_which_it_turns_to_plain_arithmetic(exponent, nesterov, maximize):
    """At 1e-8 one way ends and the other begins; large gradients make the difference visible."""
    chosen = ALL | {"lr": 10**exponent, "nesterov": nesterov, "maximize": maximize, "exclude_bias_and_norm": True}
    start, gradients = numbers([(6,)]), [numbers([(6,)], seed=seed, scale=1 / chosen["lr"]) for seed in (1, 2, 3)]
    for dtype, close in ((torch.float32, 2e-6), (torch.float64, 1e-12)):
        rounded = [[each[0].to(dtype)] for each in gradients]
        found, _ = run(start, rounded, dtype=dtype, fused=True, **chosen)
        assert_close(found, written_down(start, rounded, **chosen), rtol=close, atol=close)


@ways
def test_lengths_whose_squares_float32_cannot_hold(way):
    start = numbers([(4, 4)], dtype=torch.float32)
    share = start[0].norm() * 0.002
    for scale in (1e25, 1e-25):
        gradient = numbers([(4, 4)], seed=1, scale=scale, dtype=torch.float32)
        (layer,), _ = run(start, [gradient], lr=2.0, weight_decay=0.0, **way)
        expected = start[0] - share * (gradient[0] / scale) / (gradient[0] / scale).norm()
        assert_close([layer], [expected], rtol=1e-5, atol=1e-6)


@ways
def test_a_gradient_may_be_of_another_type_than_its_layer(way):
    """Its length is taken in a type that can hold it: in float16 that of 90,000 times 300 is infinite."""
    layer = torch.nn.Parameter(torch.ones(300, 300))
    layer.grad_dtype = None
    layer.grad = torch.full((300, 300), 300.0, dtype=torch.float16)
    LARS([layer], lr=2.0, weight_decay=0.0, **way).step()
    assert_close([layer], [torch.full((300, 300), 1 - 0.002)], rtol=1e-6)


# -- half precision -------------------------------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_length_of_a_layer_in_half_precision_does_not_overflow(way, dtype):
    """70,000 of them: the squares of ones add up to more than float16 has, and so is the length of a gradient of 300s.

    An overflow would be a rate of 0. Nor may torch's fused kernel be asked, which leaves long vectors of halves alone.
    """
    ones = torch.ones(70, 1000)
    (layer,), optimizer = run(
        [ones], [[300 * ones]], dtype=dtype, lr=20.0, weight_decay=0.0, trust_coefficient=0.01, **way
    )
    assert layer.dtype is velocity(optimizer, layer).dtype is dtype
    assert_close([layer], [0.8 * ones], rtol=0, atol=4e-3)


@ways
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_precision_a_run_stays_near_that_in_double(way, dtype):
    shapes = [(6, 5), (5,)]
    start, gradients = numbers(shapes), [numbers(shapes, seed=step) for step in range(1, 9)]
    for nesterov in (False, True):
        chosen = ALL | {"lr": 10.0, "trust_coefficient": 0.01, "nesterov": nesterov}
        found, _ = run(start, gradients, dtype=dtype, **chosen, **way)
        expected = written_down(start, gradients, **chosen)
        close = 60 * torch.finfo(dtype).eps
        assert_close(found, expected, rtol=close, atol=close / 4)
        assert max(float((layer - of).norm() / of.norm()) for layer, of in zip(expected, start, strict=True)) > close


# -- mixed precision ------------------------------------------------------------------------------------------------


@ways
def test_a_grad_scaler_leaves_out_the_step_of_an_infinite_gradient_and_changes_no_other(way):
    """Powers of two scale exactly: what is left is the run without a scaler, to the last bit."""
    start, inputs = numbers([(4, 3), (3,)], dtype=torch.float32), numbers([(5, 4)] * 6, seed=1, dtype=torch.float32)
    inputs[3][0, 0] = INFINITE

    def trained(scaler):
        weights, bias = layers = parameters(start)
        optimizer = LARS(layers, lr=2.0, **way)
        for each in inputs:
            optimizer.zero_grad()
            loss = (each @ weights + bias).square().mean()
            if scaler is None:
                if each.isfinite().all():
                    loss.backward()
                    optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return layers

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert_equal(trained(scaler), trained(None))
    assert scaler.get_scale() == 2.0**9  # it did see the infinite one


@ways
def test_autocast_and_a_scaler_train(way):
    torch.manual_seed(0)
    model, scaler = torch.nn.Linear(6, 2), torch.amp.GradScaler("cpu")
    optimizer, inputs = LARS(model.parameters(), lr=0.05, trust_coefficient=1.0, **way), torch.randn(16, 6)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(inputs).float() - inputs[:, :2]).square().mean()
        losses.append(float(loss.detach()))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
