"""What LARS keeps: state that is saved and loaded, copies, hooks, groups and names, as all optimisers of torch do."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline import LARS
from paceline.optim import OptimizerSettings, make_optimizer
from paceline.optim.schedules import warmup_poly
from paceline.training.saved_state import check_optimizer
from tests.optim.lars_cases import WAYS, assert_close, assert_equal, give, numbers, parameters
from tests.optim.of_torch import inputs, lars_info

SHAPES = [(4, 3), (3,)]
of_torch = pytest.mark.xdist_group("torch-optim")


def made(given=None, *, seed=0, names=False):
    layers = parameters(numbers(SHAPES, seed=seed))
    named = [("weight", layers[0]), ("bias", layers[1])] if names else layers
    return layers, LARS(named, **{"lr": 0.3} | copy.deepcopy(given or {}))


def step(layers, optimizer, seeds):
    for seed in seeds:
        give(layers, numbers(SHAPES, seed=100 + seed))
        optimizer.step()


def same_state(one, other):
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for index, held in one["state"].items():
        assert held.keys() == other["state"][index].keys()
        assert_equal(held.values(), other["state"][index].values())


# -- saved and loaded -----------------------------------------------------------------------------------------------


@of_torch
def test_what_is_loaded_half_way_goes_on_as_if_undisturbed():
    for given in inputs(skip=("differentiable",)):
        layers, optimizer = made(given.kwargs)
        step(layers, optimizer, range(3))
        others, resumed = made(given.kwargs, seed=7)
        for other, layer in zip(others, layers, strict=True):
            other.data.copy_(layer.data)
        saved, kept = (copy.deepcopy(optimizer.state_dict()) for _ in range(2))  # torch loads tensors as they are
        resumed.load_state_dict(saved)
        same_state(saved, kept)  # to load it does not change it
        same_state(resumed.state_dict(), kept)
        step(layers, optimizer, range(3, 6))
        step(others, resumed, range(3, 6))
        assert_equal(others, layers)
        same_state(resumed.state_dict(), optimizer.state_dict())


@of_torch
def test_a_state_from_before_a_setting_was_there_can_be_loaded():
    for given in inputs(skip=("differentiable",)):
        layers, optimizer = made(given.kwargs)
        step(layers, optimizer, range(2))
        old = copy.deepcopy(optimizer.state_dict())
        for name in lars_info().not_og_supported_flags:
            for group in old["param_groups"]:
                del group[name]
        others, resumed = made(given.kwargs)
        for other, layer in zip(others, layers, strict=True):
            other.data.copy_(layer.data)
        resumed.load_state_dict(old)
        step(layers, optimizer, range(2, 4))
        step(others, resumed, range(2, 4))
        assert_equal(others, layers)


def test_a_state_goes_through_a_file_of_weights_only():
    layers, optimizer = made({"lr": torch.tensor(0.3)})
    step(layers, optimizer, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    _, resumed = made()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    same_state(resumed.state_dict(), optimizer.state_dict())


def test_a_state_takes_the_type_of_its_layers():
    layers, optimizer = made()
    step(layers, optimizer, range(2))
    half = parameters(layers, torch.bfloat16)
    resumed = LARS(half, lr=0.1)
    resumed.load_state_dict(optimizer.state_dict())
    assert {held["velocity"].dtype for held in resumed.state.values()} == {torch.bfloat16}
    give(half, numbers(SHAPES))
    resumed.step()


@of_torch
@pytest.mark.parametrize("names", [(False, True), (True, False), (True, True)], ids=str)
def test_a_state_with_names_and_one_without_fit_each_other(names):
    layers, optimizer = made(names=names[0])
    step(layers, optimizer, range(2))
    if names[0]:
        assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    _, resumed = made(names=names[1])
    resumed.load_state_dict(optimizer.state_dict())
    if names[1]:
        assert resumed.param_groups[0]["param_names"] == ["weight", "bias"]
    assert_equal(*[[held["velocity"] for held in each.state.values()] for each in (resumed, optimizer)])


# -- copies ---------------------------------------------------------------------------------------------------------


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda both: pickle.loads(pickle.dumps(both))}  # noqa: S301


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("way", [*WAYS.values(), {"trust_coefficient": None}], ids=str)
def test_a_copy_of_an_optimiser_with_its_layers_goes_the_same_way(copied, way):
    layers, optimizer = made(way)
    step(layers, optimizer, range(2))
    others, twin = copied((layers, optimizer))
    public = [{name for name in vars(each) if not name.startswith("_")} for each in (optimizer, twin)]
    assert public[0] == public[1]
    assert twin.param_groups[0]["params"][0] is others[0]
    step(layers, optimizer, range(2, 4))
    step(others, twin, range(2, 4))
    assert_equal(others, layers)
    same_state(twin.state_dict(), optimizer.state_dict())


# -- groups ---------------------------------------------------------------------------------------------------------


def test_a_group_that_comes_later_has_the_defaults_and_a_state_of_its_own():
    layers, optimizer = made({"weight_decay": 0.25})
    step(layers, optimizer, range(2))
    late = torch.nn.Parameter(torch.ones(2, 2))
    optimizer.add_param_group({"params": [late], "lr": 5.0})
    assert optimizer.param_groups[1] == {**optimizer.defaults, "params": [late], "lr": 5.0}
    late.grad = torch.ones(2, 2)
    optimizer.step()
    # 5 * 0.001 * 2 / (2 + 0.25 * 2), times 1 + 0.25
    assert_close([optimizer.state[late]["velocity"]], [torch.full((2, 2), 0.005)], rtol=1e-6)


def test_momentum_may_be_changed_by_a_schedule():
    layers, optimizer = made({"momentum": 0.8})
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=6)
    found = []
    for number in range(5):
        step(layers, optimizer, [number])
        schedule.step()
        found.append(optimizer.param_groups[0]["momentum"])
    assert len(set(found)) > 2


# -- hooks ----------------------------------------------------------------------------------------------------------


def test_hooks_are_called_around_a_step_in_their_order_and_may_be_taken_back():
    (layers, optimizer), called = made(), []
    step(layers, optimizer, [0])

    def hook(name):
        return lambda *given: called.append(name)

    handles = [
        register_optimizer_step_pre_hook(hook("global before")),
        optimizer.register_step_pre_hook(hook("before")),
        optimizer.register_step_post_hook(hook("after")),
        register_optimizer_step_post_hook(hook("global after")),
    ]
    try:
        step(layers, optimizer, [1])
    finally:
        for handle in handles:
            handle.remove()
    assert called == ["global before", "before", "after", "global after"]
    step(layers, optimizer, [2])
    assert len(called) == 4


def test_a_hook_before_a_step_may_change_what_it_is_given():
    layers, optimizer = made()
    give(layers, numbers(SHAPES))
    optimizer.register_step_pre_hook(lambda self, given, named: ((self, lambda: 41.0), named))
    assert optimizer.step(lambda: 1.0) == 41.0


def test_hooks_see_and_may_change_a_state_that_is_saved_or_loaded():
    (layers, optimizer), called = made(), []
    step(layers, optimizer, [0])
    optimizer.register_state_dict_pre_hook(lambda self: called.append("saving"))
    optimizer.register_state_dict_post_hook(lambda self, saved: saved | {"by": "hook"})
    optimizer.register_load_state_dict_pre_hook(lambda self, saved: {k: v for k, v in saved.items() if k != "by"})
    optimizer.register_load_state_dict_post_hook(lambda self: called.append("loaded"))
    saved = optimizer.state_dict()
    assert saved["by"] == "hook"
    optimizer.load_state_dict(saved)
    assert called == ["saving", "loaded"]


def test_a_closure_runs_with_gradients_on_and_its_loss_is_returned():
    layers, optimizer = made({"lr": 0.02})

    def closure():
        optimizer.zero_grad()
        loss = sum(layer.square().sum() for layer in layers)
        loss.backward()
        return loss

    with torch.no_grad():
        losses = [float(optimizer.step(closure)) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_its_schedule_is_saved_and_loaded_beside_it():
    (layers, optimizer), (others, resumed) = made(), made()
    schedules = [warmup_poly(each, 3, 8) for each in (optimizer, resumed)]
    for number in range(5):
        step(layers, optimizer, [number])
        schedules[0].step()
    for other, layer in zip(others, layers, strict=True):
        other.data.copy_(layer.data)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    schedules[1].load_state_dict(schedules[0].state_dict())
    for number in range(5, 8):
        for pair in ((layers, optimizer, schedules[0]), (others, resumed, schedules[1])):
            step(pair[0], pair[1], [number])
            pair[2].step()
    assert_equal(others, layers)


# -- momentum of another kind ---------------------------------------------------------------------------------------


def test_the_state_of_torchs_sgd_is_refused_and_nothing_is_changed():
    """Its momentum has no rate in it: taken over, it would throw every layer away."""
    layers = parameters(numbers([(4, 4)]))
    give(layers, numbers([(4, 4)], seed=1))
    sgd = torch.optim.SGD(layers, lr=0.01, momentum=0.9)
    sgd.step()
    optimizer = LARS(layers, lr=2.0)
    with pytest.raises(ValueError, match=r"not that of LARS: its groups have no 'trust_coefficient'"):
        optimizer.load_state_dict(sgd.state_dict())
    assert optimizer.param_groups[0]["lr"] == 2.0
    assert not optimizer.state


@pytest.mark.parametrize("there", [{}, {"velocity": None}], ids=str)
def test_a_layer_that_is_scaled_from_now_on_begins_without_velocity(there):
    (layer,) = parameters(numbers([(4, 4)]))
    optimizer = LARS([layer], lr=0.01, trust_coefficient=None)
    give([layer], numbers([(4, 4)], seed=1, scale=100.0))
    optimizer.step()
    before = layer.detach().clone()
    optimizer.state[layer].update(there)
    optimizer.param_groups[0]["trust_coefficient"] = 0.001
    optimizer.step()
    assert (layer - before).norm() <= 0.01 * 0.001 * before.norm() * (1 + 1e-9)


def old_names(group):
    return {"trust" if name == "trust_coefficient" else name: value for name, value in group.items()}


def test_states_with_the_old_name_of_the_trust_coefficient_load():
    layer = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = LARS([layer], lr=0.1, trust_coefficient=0.25, weight_decay=0.0)
    layer.grad = torch.ones(3, 2)
    optimizer.step()
    kept = optimizer.state_dict()
    kept = {**kept, "param_groups": [old_names(group) for group in kept["param_groups"]]}
    check_optimizer(kept, optimizer)
    fresh = LARS([layer], lr=1.0, weight_decay=0.0)
    fresh.load_state_dict(kept)
    assert fresh.param_groups[0]["trust_coefficient"] == 0.25
    assert "trust" not in fresh.param_groups[0]
    pickled = optimizer.__getstate__()
    pickled |= {
        "defaults": old_names(pickled["defaults"]),
        "param_groups": [old_names(group) for group in pickled["param_groups"]],
    }
    fresh.__setstate__(pickled)
    assert fresh.defaults["trust_coefficient"] == fresh.param_groups[0]["trust_coefficient"] == 0.25
    fresh.step()


def test_trust_is_the_old_name_and_weight_decay_wants_to_be_given():
    layers = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(3)]
    with pytest.warns(DeprecationWarning, match="trust is called trust_coefficient now"):
        optimizer = LARS(layers[:1], lr=0.1, trust=None, weight_decay=0.0)
    assert optimizer.defaults["trust_coefficient"] is None
    with pytest.warns(DeprecationWarning, match="trust is called trust_coefficient now"):
        optimizer.add_param_group({"params": layers[1:2], "trust": 0.5})
    assert optimizer.param_groups[1]["trust_coefficient"] == 0.5
    with pytest.warns(FutureWarning, match="give weight_decay=0.0005 to keep it") as warned:
        assert LARS(layers[:1], lr=0.1).param_groups[0]["weight_decay"] == 5e-4
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LARS(iter(layers), lr=0.1, weight_decay=0.0)
        LARS([{"params": layers, "weight_decay": 5e-4}], lr=0.1)
        make_optimizer(OptimizerSettings(name="lars"), layers, total_steps=9)
