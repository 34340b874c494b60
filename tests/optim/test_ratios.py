"""Ratios of weights to gradients against a direct computation, and what becomes of parameters that have none."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.optim import OptimizerSettings, make_optimizer
from paceline.optim.ratios import LayerRatio, layer_ratios, ratio_lines
from paceline.terminal import decades

EXAMPLES = settings(max_examples=15)


def model_of(widths: list[int], *, norm: bool, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for width_in, width in itertools.pairwise(widths):
        layers += [nn.Linear(width_in, width), *([nn.LayerNorm(width)] if norm else []), nn.Tanh()]
    return nn.Sequential(*layers)


def backward(model: nn.Module, width: int, scale: float = 1.0) -> None:
    model.zero_grad(set_to_none=True)
    (scale * model(torch.linspace(-1, 1, 3 * width).view(3, width)).sum()).backward()


MODELS = st.builds(
    lambda widths, norm, seed: (model_of(widths, norm=norm, seed=seed), widths[0]),
    st.lists(st.integers(1, 7), min_size=2, max_size=4),
    st.booleans(),
    st.integers(0, 1000),
)


def length(tensor: torch.Tensor) -> float:
    return math.sqrt(sum(abs(value) ** 2 for value in tensor.detach().flatten().tolist()))


# -- laws --------------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(MODELS, st.floats(1e-4, 1.0), st.floats(0.0, 0.1), st.booleans())
def test_every_row_is_what_the_formulas_say(made, trust, weight_decay, exclude) -> None:
    model, width = made
    backward(model, width)
    ratios = layer_ratios(model, trust_coefficient=trust, weight_decay=weight_decay, exclude_bias_and_norm=exclude)
    parameters = dict(model.named_parameters())
    assert [row.name for row in ratios] == list(parameters)
    for row in ratios:
        weight, gradient = length(parameters[row.name]), length(parameters[row.name].grad)
        assert (row.shape, row.count) == (tuple(parameters[row.name].shape), parameters[row.name].numel())
        assert row.weight_norm == pytest.approx(weight)
        assert row.gradient_norm == pytest.approx(gradient)
        left_out = exclude and parameters[row.name].dim() <= 1
        if weight and gradient:
            assert row.ratio == pytest.approx(weight / gradient)
            local = 1.0 if left_out else trust * weight / (gradient + weight_decay * weight)
            assert row.local_rate == pytest.approx(local)
        else:
            assert row.local_rate == 1.0


@EXAMPLES
@given(MODELS)
def test_the_limiting_row_is_the_smallest_that_is_positive(made) -> None:
    model, width = made
    backward(model, width)
    ratios = layer_ratios(model)
    positive = [row.ratio for row in ratios if row.ratio is not None and 0 < row.ratio < math.inf]
    assert ratios.limiting.ratio == min(positive)
    assert ratios.spread == max(positive) / min(positive)


@EXAMPLES
@given(MODELS, st.sampled_from([0.125, 3.0, 1000.0]))
def test_a_loss_times_c_has_ratios_over_c(made, c) -> None:
    model, width = made
    backward(model, width)
    plain = layer_ratios(model)
    backward(model, width, scale=c)
    scaled = layer_ratios(model)
    for before, after in zip(plain, scaled, strict=True):
        # Where a gradient is nothing but rounding errors, scaling makes other ones.
        if before.counts and before.gradient_norm > 1e-5 * before.weight_norm:
            assert after.ratio == pytest.approx(before.ratio / c, rel=1e-3)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("exclude", [True, False])
def test_a_step_of_lars_moves_each_row_at_its_local_rate(exclude, clip) -> None:
    model = model_of([4, 6, 3], norm=True, seed=3)
    backward(model, 4)
    before = copy.deepcopy(dict(model.named_parameters()))
    settings = {"weight_decay": 0.02, "trust_coefficient": 0.01, "exclude_bias_and_norm": exclude, "clip": clip}
    ratios, lr = layer_ratios(model, **settings), 0.005 if clip else 0.5
    chosen = OptimizerSettings(name="lars", lr=lr, momentum=0.0, **settings)
    optimizer, _ = make_optimizer(chosen, model.parameters(), total_steps=10)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    for name, parameter in model.named_parameters():
        direction = gradients[name] + 0.02 * before[name]
        local = ratios[name].local_rate
        expected = before[name] - (min(lr, local) if clip else lr * local) * direction
        torch.testing.assert_close(parameter.detach(), expected.detach())
    if clip:  # some are held to their limit, and some are below it
        limits = {row.local_rate < lr for row in ratios if row.kind == "weight"}
        assert limits == {True, False}


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("exclude", [True, False])
def test_the_table_says_what_takes_the_rate_as_it_is(exclude, clip) -> None:
    model = model_of([3, 4, 2], norm=True, seed=0)
    nn.init.zeros_(model[0].bias)
    backward(model, 3)
    ratios = layer_ratios(model, exclude_bias_and_norm=exclude, clip=clip)
    heading, *lines = str(ratios).splitlines()
    assert ("LARS limit" in heading, "LARS rate" in heading) == (clip, not clip)
    as_it_is = {row.name for row in ratios if not row.weight_norm or (exclude and row.kind != "weight")}
    assert "0.bias" in as_it_is
    assert {row.name for row in ratios if not row.scaled} == as_it_is
    assert {line[2:].split()[0] for line in lines if " as it is " in f"{line} "} == as_it_is
    assert not any(" inf" in line for line in lines)


# -- which rows there are ----------------------------------------------------------------------------------------------


def test_kinds_are_told_by_dimension_and_by_who_holds_them() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2), nn.PReLU())
    model(torch.randn(3, 1, 2, 2)).sum().backward()
    assert {row.name: row.kind for row in layer_ratios(model)} == {
        "0.weight": "weight", "0.bias": "bias", "1.weight": "norm", "1.bias": "norm", "3.weight": "weight",
        "3.bias": "bias", "4.weight": "bias",
    }  # fmt: skip


def test_a_bias_that_starts_at_zero_never_limits() -> None:
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.bias)
    backward(model, 3)
    ratios = layer_ratios(model)
    assert (ratios["bias"].ratio, ratios["bias"].remark) == (0.0, "weights are 0")
    assert ratios.limiting.name == "weight"
    assert ratios.spread == 1.0


def test_frozen_ones_and_those_without_a_gradient_are_listed() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "frozen": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    model["used"](torch.ones(1, 2)).sum().backward()
    ratios = layer_ratios(model)
    for name, remark in (("frozen.weight", "frozen"), ("idle.bias", "no gradient")):
        row = ratios[name]
        assert (row.remark, row.ratio, row.gradient_norm, row.local_rate) == (remark, None, None, None)
        assert row.weight_norm > 0
        assert remark in str(ratios)
    assert ratios.limiting.name.startswith("used")


def test_norms_of_zero_and_nan_are_said_and_do_not_limit() -> None:
    model = nn.ParameterDict({name: torch.ones(2, 2) for name in ("plain", "still", "nothing", "broken", "endless")})
    for parameter in model.values():
        parameter.grad = torch.ones(2, 2)
    model["still"].grad.zero_()
    model["nothing"].data.zero_()
    model["nothing"].grad.zero_()
    model["broken"].grad[0, 0] = math.nan
    model["endless"].data[0, 0] = math.inf
    ratios = layer_ratios(model)
    assert {row.name: (row.ratio, row.remark) for row in ratios} == {
        "plain": (1.0, ""),
        "still": (math.inf, "gradient is 0"),
        "nothing": (None, "both are 0"),
        "broken": (None, "not finite"),
        "endless": (None, "not finite"),
    }
    assert {row.name for row in ratios if row.local_rate is None} == {"broken", "endless"}
    assert ratios["still"].local_rate == ratios["nothing"].local_rate == 1.0
    assert ratios.limiting.name == "plain"
    assert str(ratios).count("not finite") == 2


def test_where_no_ratio_counts_nothing_limits() -> None:
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    backward(model, 2)
    ratios = layer_ratios(model)
    assert ratios.limiting is None
    assert ratios.spread is None
    assert "weights are 0" in str(ratios)


def test_a_shared_parameter_is_one_row() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    backward(model, 3)
    assert [row.name for row in layer_ratios(model)] == ["0.weight"]


def test_wrapped_in_ddp_names_and_ratios_are_the_same() -> None:
    model = model_of([3, 4, 2], norm=False, seed=0)
    backward(model, 3)
    plain = layer_ratios(model)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)  # no network, nobody waits
    try:
        assert layer_ratios(nn.parallel.DistributedDataParallel(model)) == plain
    finally:
        torch.distributed.destroy_process_group()
    assert layer_ratios(nn.DataParallel(model)) == plain


def test_bfloat16_is_added_up_in_more_than_its_own_digits() -> None:
    model = nn.Linear(4096, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    model(torch.full((1, 4096), 1e-3, dtype=torch.bfloat16)).sum().backward()
    (row,) = layer_ratios(model)
    assert row.weight_norm == 64.0  # a sum of ones in bfloat16 gets no further than 256
    assert row.gradient_norm == pytest.approx(64 * float(torch.tensor(1e-3, dtype=torch.bfloat16)))


def test_complex_weights_and_sparse_gradients_have_lengths_too() -> None:
    model = nn.ModuleDict({"sparse": nn.Embedding(5, 2, sparse=True), "dense": nn.Embedding(5, 2)})
    model["dense"].load_state_dict(model["sparse"].state_dict())
    model["phase"] = nn.Linear(2, 2, bias=False, dtype=torch.complex64)
    places = torch.tensor([1, 3, 1])  # one place twice: its two entries are one gradient
    for name in ("sparse", "dense"):
        model[name](places).sum().backward()
    model["phase"](torch.tensor([[1 + 2j, 3j]])).abs().sum().backward()
    ratios = layer_ratios(model)
    assert ratios["sparse.weight"].ratio == pytest.approx(ratios["dense.weight"].ratio)
    assert ratios["phase.weight"].ratio == pytest.approx(
        length(model["phase"].weight) / length(model["phase"].weight.grad)
    )


# -- what is refused ---------------------------------------------------------------------------------------------------


def lazy() -> nn.Module:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "lazy": nn.LazyLinear(2)})
    model["used"](torch.ones(1, 2)).sum().backward()
    return model


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        (nn.Linear(2, 2), {}, "no parameter has a gradient: call backward first"),
        (nn.Linear(2, 2).requires_grad_(False), {}, "every parameter of the model is frozen"),
        (nn.ReLU(), {}, "the model has no parameters"),
        (lazy(), {}, "lazy.weight has no shape yet: call forward and backward first"),
        (
            nn.Linear(2, 2),
            {"trust_coefficient": 0.0},
            r"trust_coefficient must be above 0 and finite \(trust_coefficient=0.0\)",
        ),
        (nn.Linear(2, 2), {"weight_decay": -1.0}, r"weight_decay must be at least 0 and finite \(weight_decay=-1.0\)"),
    ],
)
def test_what_cannot_be_told_is_refused(model, given, said) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        layer_ratios(model, **given)


def test_other_mistakes_are_told_for_what_they_are() -> None:
    with pytest.raises(TypeError, match=r"takes an nn\.Module, not a list"):
        layer_ratios([])
    model = nn.Linear(2, 2)
    backward(model, 2)
    with pytest.raises(KeyError, match="did you mean 'weight'"):
        layer_ratios(model)["weigth"]
    with pytest.raises(ValueError, match="unknown kind 'weights'; did you mean 'weight'"):
        layer_ratios(model).only("weights")


# -- the table ---------------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(st.none(), st.just(0.0), st.just(math.inf), st.floats(1e-30, 1e30))


@EXAMPLES
@given(st.lists(st.tuples(st.text("ab.", min_size=1, max_size=60), NUMBERS, NUMBERS), min_size=1, max_size=6))
def test_a_table_never_needs_more_than_eighty_columns(found) -> None:
    rows = [
        LayerRatio(name=f"{number}{name}", shape=(2,), kind="bias", weight_norm=1.0, gradient_norm=ratio, ratio=ratio,
                   local_rate=later, remark="" if ratio else "gradient is 0")
        for number, (name, ratio, later) in enumerate(found)
    ]  # fmt: skip
    later = {row.name: row.local_rate for row in rows}
    for more in ({}, {"rate_heading": "LARS limit"}, {"later": later, "later_heading": "step 1000"}):
        lines = ratio_lines(rows, limiting=rows[-1], **more)
        assert len(lines) == len(rows) + 1
        assert max(map(len, lines)) <= 80
        assert [line[0] for line in lines].count(">") == 1
        assert lines[-1].startswith(">")


def test_a_longer_bar_is_a_larger_ratio() -> None:
    rows = [
        LayerRatio(name=str(power), shape=(2, 2), kind=kind, weight_norm=1.0, gradient_norm=1.0, ratio=10.0**power)
        for power in range(-2, 4)
        for kind in ("weight", "bias")
    ]
    lines = ratio_lines(rows, limiting=rows[0])[1:]
    weights, biases = [line.count("█") for line in lines[::2]], [line.count("▒") for line in lines[1::2]]
    assert weights == sorted(set(weights))
    assert biases == weights
    assert decades([row.ratio for row in rows]) == (-3, 3)


def test_a_notebook_shows_the_same_table() -> None:
    model = nn.Sequential()
    model.add_module("<b>", nn.Linear(2, 2))
    backward(model, 2)
    assert "&lt;b&gt;.weight" in layer_ratios(model)._repr_html_()
