"""What LARS refuses, and in which words: the value, and what is allowed."""

from __future__ import annotations

import pytest
import torch

from paceline import LARS

NAN, INF = float("nan"), float("inf")
REFUSED = [
    ({"lr": -0.1}, r"lr must be at least 0 and finite \(lr=-0.1\)"),
    ({"lr": NAN}, r"lr must be at least 0 and finite \(lr=nan\)"),
    ({"lr": INF}, r"lr must be at least 0 and finite \(lr=inf\)"),
    ({"lr": torch.tensor(-0.5)}, r"lr must be at least 0 and finite \(lr=-0.5\)"),
    ({"lr": torch.tensor([0.1, 0.2])}, r"Tensor lr must be 1-element \(lr has shape \(2,\)\)"),
    ({"momentum": -0.5}, r"momentum must be between 0 and 1 \(momentum=-0.5\)"),
    ({"momentum": 1.5}, r"momentum must be between 0 and 1 \(momentum=1.5\)"),
    ({"momentum": NAN}, r"momentum must be between 0 and 1 \(momentum=nan\)"),
    ({"weight_decay": -1}, r"weight_decay must be at least 0 and finite \(weight_decay=-1\)"),
    ({"weight_decay": INF}, r"weight_decay must be at least 0 and finite \(weight_decay=inf\)"),
    (
        {"trust_coefficient": 0.0},
        r"trust_coefficient must be above 0 and finite, or None for no scaling \(trust_coefficient=0.0\)",
    ),
    (
        {"trust_coefficient": -0.001},
        r"trust_coefficient must be above 0 and finite, or None for no scaling \(trust_coefficient=-0.001\)",
    ),
    (
        {"trust_coefficient": NAN},
        r"trust_coefficient must be above 0 and finite, or None for no scaling \(trust_coefficient=nan\)",
    ),
    (
        {"trust_coefficient": INF},
        r"trust_coefficient must be above 0 and finite, or None for no scaling \(trust_coefficient=inf\)",
    ),
    ({"nesterov": True, "momentum": 0}, r"nesterov needs momentum above 0 \(momentum=0\)"),
    ({"fused": True, "foreach": True}, r"choose one \(fused=True, foreach=True\)"),
    ({"differentiable": True, "fused": True}, r"neither fused nor foreach \(differentiable=True\)"),
    ({"differentiable": True, "foreach": True}, r"neither fused nor foreach \(differentiable=True\)"),
]


OF_ANOTHER_TYPE = [
    ({"lr": "a"}, r"lr must be a number \(lr='a'\)"),
    ({"lr": None}, r"lr must be a number \(lr=None\)"),
    ({"trust_coefficient": True}, r"trust_coefficient must be a number \(trust_coefficient=True\)"),
    ({"momentum": torch.tensor(0.9)}, r"momentum must be a number \(momentum=tensor"),
    ({"clip": "yes"}, r"clip must be True or False \(clip='yes'\)"),
    ({"nesterov": None}, r"nesterov must be True or False \(nesterov=None\)"),
    ({"fused": 1}, r"fused must be True or False \(fused=1\)"),
]


@pytest.mark.parametrize(("chosen", "words"), OF_ANOTHER_TYPE, ids=[str(chosen) for chosen, _ in OF_ANOTHER_TYPE])
def test_a_value_of_another_type_is_refused(chosen, words):
    with pytest.raises(TypeError, match=words):
        LARS([layer()], **{"lr": 0.1} | chosen)


def layer(dtype=torch.float32, **more):
    return torch.zeros(2, 2, dtype=dtype, requires_grad=dtype.is_floating_point, **more)


@pytest.mark.parametrize(("chosen", "words"), REFUSED, ids=[str(chosen) for chosen, _ in REFUSED])
def test_a_value_out_of_range_is_refused_at_construction_and_in_every_group(chosen, words):
    with pytest.raises(ValueError, match=words):
        LARS([layer()], **{"lr": 0.1} | chosen)
    with pytest.raises(ValueError, match=words):
        LARS([{"params": [layer()]}, {"params": [layer()], **chosen}], lr=0.1)
    optimizer = LARS([layer()], lr=0.1)
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": [layer()], **chosen})
    assert len(optimizer.param_groups) == 1


def test_the_ends_of_every_range_are_allowed():
    for chosen in (
        {"lr": 0},
        {"momentum": 0},
        {"momentum": 1},
        {"weight_decay": 0},
        {"trust_coefficient": 1e-30},
        {"trust_coefficient": None},
    ):
        (of_group,) = LARS([layer()], **{"lr": 0.1} | chosen).param_groups
        assert {name: of_group[name] for name in chosen} == chosen


@pytest.mark.parametrize(("dtype", "kind"), [(torch.complex64, "complex"), (torch.int64, "not floating-point")])
def test_a_parameter_that_is_no_real_number_is_refused_and_the_optimiser_stays_whole(dtype, kind):
    bad = torch.zeros(2, 2, dtype=dtype)
    words = rf"real floating-point parameters; one is {kind} \({dtype}\)"
    with pytest.raises(TypeError, match=words):
        LARS([layer(), bad], lr=0.1)
    optimizer = LARS([layer()], lr=0.1)
    with pytest.raises(TypeError, match=words):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1


def test_fused_is_for_the_cpu():
    with pytest.raises(
        TypeError, match=r"fused=True takes plain tensors on the CPU only; one is a Tensor on meta: leave fused out"
    ):
        LARS([layer(device="meta")], lr=0.1, fused=True)


@pytest.mark.parametrize("chosen", [{}, {"foreach": True}, {"foreach": False}, {"trust_coefficient": None}], ids=str)
def test_a_sparse_gradient_is_refused_with_what_to_do(chosen):
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"dense gradients .* build Embedding\(sparse=False\)"):
        LARS(embedding.parameters(), lr=0.1, **chosen).step()
    assert torch.equal(embedding.weight, before)


def test_a_misspelt_setting_of_a_group_is_kept_like_any_other_optimisers_and_one_of_the_optimiser_refused():
    with pytest.raises(TypeError, match="wieght_decay"):
        LARS([layer()], lr=0.1, wieght_decay=0.1)
