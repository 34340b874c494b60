"""LARS is algorithm 1 of the paper; without trust it is torch's SGD; and its three ways are one."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import LARS
from paceline.optim import DECAY_FROM
from paceline.optim.schedules import warmup_poly
from tests.optim.lars_cases import SHAPES, WAYS, assert_close, assert_equal, numbers, run, written_down
from tests.oracles import strategies as reference

STEPS = 100
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
PLAIN = {
    "lr": 2.0, "momentum": 0.9, "weight_decay": 5e-4, "trust_coefficient": 0.001, "clip": False, "nesterov": False,
    "maximize": False, "exclude_bias_and_norm": True,
}  # fmt: skip


def gradients_of(shapes, steps, *, scale=1.0):
    return [numbers(shapes, seed=1 + step, scale=scale) for step in range(steps)]


# -- the paper ------------------------------------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("warmup", [0, 20])
@pytest.mark.parametrize("decay_from", DECAY_FROM)
def test_a_hundred_steps_are_those_of_algorithm_1(way, dtype, warmup, decay_from):
    start, gradients = numbers(SHAPES, scale=0.5), gradients_of(SHAPES, STEPS, scale=3.0)
    paper = {"lr": 7.0, "momentum": 0.9, "weight_decay": 5e-4, "trust_coefficient": 0.001}
    flat = [[layer.flatten().tolist() for layer in each] for each in gradients]
    course = {"warmup": warmup, "decay_from": decay_from}
    expected = reference.lars([layer.flatten().tolist() for layer in start], flat, **paper, **course)
    found, _ = run(
        start, gradients, dtype=dtype, exclude_bias_and_norm=False, **paper, **way,
        schedule=lambda optimizer: warmup_poly(optimizer, warmup, STEPS, decay_from=decay_from),
    )  # fmt: skip
    expected = [torch.tensor(layer, dtype=torch.float64) for layer in expected]
    assert_close([layer.flatten() for layer in found], expected, rtol=1e-6, atol=1e-6)
    moved = [(layer - one.flatten()).norm() / one.norm() for layer, one in zip(expected, start, strict=True)]
    assert min(moved) > 0.01  # or nothing would be compared


shapes = st.lists(st.lists(st.integers(1, 4), max_size=4).map(tuple), min_size=1, max_size=4)
choices = st.fixed_dictionaries({
    "lr": st.floats(1e-4, 30),
    "momentum": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    "weight_decay": st.sampled_from([0.0, 5e-4, 0.3]),
    "trust_coefficient": st.floats(1e-5, 1),
    "clip": st.booleans(),
    "nesterov": st.booleans(),
    "maximize": st.booleans(),
    "exclude_bias_and_norm": st.booleans(),
})  # fmt: skip


@settings(max_examples=40)
@given(shapes=shapes, chosen=choices, scale=st.sampled_from([1e-3, 1.0, 1e3]), way=st.sampled_from([*WAYS.values()]))
def test_any_layers_and_settings_move_as_the_formula_says(shapes, chosen, scale, way):
    chosen = chosen | {"nesterov": chosen["nesterov"] and chosen["momentum"] > 0}
    start, gradients = numbers(shapes), gradients_of(shapes, 4, scale=scale)
    expected = written_down(start, gradients, **chosen)
    found, _ = run(start, gradients, **chosen, **way)
    largest = max(float(layer.abs().max()) for layer in expected)
    assert_close(found, expected, rtol=1e-9, atol=1e-9 * (1 + largest))


@ways
def test_a_layer_moves_by_its_share_whatever_the_length_of_its_gradient(way):
    start = numbers([(6, 5)])
    for scale in (1e-12, 1.0, 1e12):
        found, _ = run(
            start, gradients_of([(6, 5)], 1, scale=scale), lr=3.0, weight_decay=0.0, trust_coefficient=0.01, **way
        )
        assert float((found[0].detach() - start[0]).norm() / start[0].norm()) == pytest.approx(0.03)


@ways
def test_with_clip_a_layer_never_takes_more_than_lr(way):
    """LARC: the smaller of the two rates. Small gradients are those whose own rate would be large."""
    for scale, share in ((1e-3, "lr"), (1e3, "local")):
        start, gradients = numbers([(4, 4)]), gradients_of([(4, 4)], 1, scale=scale)
        found, _ = run(start, gradients, lr=0.1, weight_decay=0.0, clip=True, **way)
        moved, length = float((found[0].detach() - start[0]).norm()), float(gradients[0][0].norm())
        assert moved == pytest.approx(0.1 * length if share == "lr" else 0.001 * float(start[0].norm()))


# -- torch's SGD ----------------------------------------------------------------------------------------------------

SGD_SETTINGS = {
    "plain": {"momentum": 0.0, "weight_decay": 0.0},
    "momentum": {"momentum": 0.9, "weight_decay": 0.0},
    "decay": {"momentum": 0.9, "weight_decay": 0.05},
    "nesterov": {"momentum": 0.9, "weight_decay": 0.05, "nesterov": True},
    "maximize": {"momentum": 0.5, "weight_decay": 0.05, "maximize": True},
}
SGD_WAYS = WAYS | {"as it likes": {}}


@pytest.mark.parametrize("way", SGD_WAYS.values(), ids=SGD_WAYS)
@pytest.mark.parametrize("chosen", SGD_SETTINGS.values(), ids=SGD_SETTINGS)
def test_without_trust_it_is_torchs_sgd_to_the_last_bit(way, chosen):
    start, gradients = numbers(SHAPES), gradients_of(SHAPES, 12)
    common = {"lr": 0.3, "schedule": lambda optimizer: warmup_poly(optimizer, 3, 12), **chosen, **way}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        found, ours = run(start, gradients, dtype=dtype, trust_coefficient=None, **common)
        if (
            dtype is torch.bfloat16
        ):  # torch's fused kernel on the CPU is wrong in half precision, and ours leaves it out
            common["fused"] = False
        expected, theirs = run(start, gradients, dtype=dtype, make=torch.optim.SGD, **common)
        assert_equal(found, expected)
        for one, other in zip(found, expected, strict=True):
            assert ours.state[one].keys() == theirs.state[other].keys()


def test_where_nothing_is_scaled_the_path_is_that_of_sgd():
    """Its velocity holds the rate of its own step, SGD's is multiplied by that of today: alike while the rate stays."""
    start, gradients = numbers([(4,), (3,)]), gradients_of([(4,), (3,)], 9)
    for chosen in SGD_SETTINGS.values():
        expected, _ = run(start, gradients, make=torch.optim.SGD, lr=0.3, **chosen)
        for way in WAYS.values():
            found, _ = run(start, gradients, lr=0.3, **chosen, **way)
            assert_close(found, expected)


# -- its three ways -------------------------------------------------------------------------------------------------


def test_the_three_ways_are_one_whatever_the_options():
    start, gradients = numbers(SHAPES), gradients_of(SHAPES, 3)
    start[2] = start[2].contiguous(memory_format=torch.channels_last)
    switches = ["clip", "nesterov", "maximize", "exclude_bias_and_norm"]
    for values in itertools.product([False, True], repeat=len(switches)):
        for momentum, weight_decay in itertools.product([0.0, 0.9], [0.0, 0.01]):
            chosen = dict(zip(switches, values, strict=True)) | {"momentum": momentum, "weight_decay": weight_decay}
            if chosen["nesterov"] and not momentum:
                continue
            for dtype, close in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
                by_way = [run(start, gradients, dtype=dtype, lr=0.7, **chosen, **way) for way in WAYS.values()]
                for found, optimizer in by_way[1:]:
                    assert_close(found, by_way[0][0], rtol=close, atol=close, message=f"{chosen}\n")
                    for one, other in zip(found, by_way[0][0], strict=True):
                        velocities = [made.state[of].get("velocity") for made, of in
                                      ((optimizer, one), (by_way[0][1], other))]  # fmt: skip
                        if momentum:
                            assert_close(velocities[:1], velocities[1:], rtol=close, atol=close)
                        else:
                            assert velocities == [None, None]


LAYOUTS = {
    "plain": lambda t: t.clone(memory_format=torch.contiguous_format),
    "channels last": lambda t: t.clone(memory_format=torch.channels_last),
    "turned": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "every other": lambda t: t.repeat_interleave(2, dim=3)[..., ::2],
}


@pytest.mark.parametrize("of_gradient", [*LAYOUTS, "one number"])
@pytest.mark.parametrize("of_layer", LAYOUTS)
def test_how_a_layer_lies_in_memory_changes_nothing(of_layer, of_gradient):
    """A gradient that is set by hand may be one number, shown everywhere by strides of 0."""
    weights, gradient = numbers([(4, 3, 2, 5), (4, 3, 2, 5)])
    if of_gradient == "one number":
        gradient = torch.tensor(0.7, dtype=torch.float64).expand_as(weights)
    expected = written_down([weights], [[gradient]] * 3, **PLAIN)
    for way in WAYS.values():
        layer = torch.nn.Parameter(LAYOUTS[of_layer](weights))
        strides = layer.stride()
        optimizer = LARS([layer], lr=PLAIN["lr"], **way)
        layer.grad = LAYOUTS[of_gradient](gradient) if of_gradient in LAYOUTS else gradient
        for _ in range(3):
            optimizer.step()
        assert_close([layer], expected)
        assert layer.stride() == strides


@pytest.mark.parametrize("of_gradient", ["channels last", "turned", "one number"])
def test_nor_without_trust_where_torchs_own_fused_step_reads_the_wrong_memory(of_gradient):
    start, (gradient, plain) = numbers([(4, 3, 2, 5), (7,)]), numbers([(4, 3, 2, 5), (7,)], seed=1)
    given = LAYOUTS[of_gradient](gradient) if of_gradient in LAYOUTS else gradient[:1, :1, :1, :1].expand_as(gradient)
    common = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
    found, _ = run(start, [[given, plain]] * 2, trust_coefficient=None, fused=True, **common)
    expected, _ = run(start, [[given, plain]] * 2, make=torch.optim.SGD, **common)
    assert_equal(found, expected)


@ways
def test_the_gradient_of_a_sum_is_taken_as_it_comes(way):
    layer = torch.nn.Parameter(numbers([(3, 4)])[0])
    before = layer.detach().clone()
    optimizer = LARS([layer], lr=1.0, weight_decay=0.0, momentum=0.0, **way)
    layer.sum().backward()
    gradient = layer.grad.clone()
    optimizer.step()
    assert_close([layer], [before - 0.001 * before.norm() / 12**0.5])
    assert torch.equal(layer.grad, gradient)  # a step leaves gradients alone


def test_like_every_optimiser_of_torch_s_it_has_a_rate_where_none_is_given():
    for kind in (torch.optim.SGD, torch.optim.AdamW, LARS):
        layer = torch.nn.Linear(64, 64)
        optimizer = kind(layer.parameters(), weight_decay=0.0)
        assert optimizer.param_groups[0]["lr"] > 0
    before = layer.weight.detach().clone()
    layer(torch.ones(3, 64)).square().mean().backward()
    optimizer.step()
    moved = float(((layer.weight.detach() - before).norm() / before.norm()).item())
    assert moved == pytest.approx(0.001, rel=1e-3)  # trust_coefficient of its length: neither nothing nor a jump
