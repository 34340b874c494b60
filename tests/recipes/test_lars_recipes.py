"""`optimizer.name = "lars"` in a recipe: with a server, without one, saved half-way; one worker is a plain loop."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline import LARS, Recipe, simulate
from paceline.cli.main import main
from paceline.data import BatchOrder
from paceline.events import Share, Step
from paceline.optim import OptimizerSettings, make_optimizer
from paceline.optim.schedules import warmup_poly
from paceline.recipes import read_recipe
from paceline.recipes.assembly import load_data, make_training
from paceline.runs.simulation import make_run
from paceline.strategies import STRATEGIES
from paceline.strategies.averaging import AVERAGING
from paceline.training import TrainState

ROUNDS = 8
LARGE = {
    "name": "lars",
    "lr": 0.1,
    "trust_coefficient": 0.05,
    "schedule": "poly",
    "warmup": 0.25,
    "exclude_bias_and_norm": False,
}
SMALL = Recipe(rounds=ROUNDS, evaluate_every=ROUNDS).with_settings(
    cluster={"workers": 3},
    strategy={"k": 2},
    optimizer=LARGE,
    worker={"batch_size": 16, "blocks": 2},
    data={"split": "iid"},
)


@pytest.mark.parametrize("strategy", [*STRATEGIES, *AVERAGING])
def test_lars_trains_with_a_server_and_among_averaging_workers(strategy):
    recipe = SMALL.with_strategy(strategy)
    if strategy in AVERAGING:
        recipe = recipe.with_settings(strategy={"period": 1} if strategy not in ("psgd", "ssgd") else {})
    result = simulate(recipe)
    assert not result.trace.diverged
    assert result.loss < simulate(recipe.with_settings(optimizer={"lr": 1e-9})).loss  # which has learned nothing


def test_full_with_one_worker_is_a_plain_loop_with_lars_and_its_schedule():
    recipe = SMALL.with_strategy("full").with_settings(cluster={"workers": 1})
    dataset = load_data(recipe)
    training = make_training(recipe, dataset)
    run = make_run(recipe, dataset=dataset)
    for _ in run:
        pass

    module, order = training.module, BatchOrder(training.shards[0], 16, seed=recipe.seed, worker=0)
    optimizer = LARS(module.parameters(), lr=0.1, trust_coefficient=0.05, exclude_bias_and_norm=False)
    schedule = warmup_poly(optimizer, 2, ROUNDS)
    for _ in range(ROUNDS):
        indices = order.next()
        optimizer.zero_grad()
        F.cross_entropy(module(dataset.train.inputs[indices]), dataset.train.targets[indices]).backward()
        optimizer.step()
        schedule.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    torch.testing.assert_close(run.learner.parameters, expected, rtol=0, atol=1e-6)


def test_a_recipe_on_paper_reaches_the_optimiser(tmp_path):
    path = tmp_path / "large.toml"
    path.write_text(
        '[optimizer]\nname = "lars"\nlr = 12.5\ntrust_coefficient = 0.005\nclip = true\n'
        'schedule = "poly"\nwarmup = 0.1\n'
    )
    section = read_recipe(path).optimizer
    assert (section.name, section.lr, section.trust_coefficient, section.clip) == ("lars", 12.5, 0.005, True)
    assert (section.schedule, section.warmup, section.power) == ("poly", 0.1, 2.0)


# -- saved half-way -------------------------------------------------------------------------------------------------


def trainee(settings):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer, schedule = make_optimizer(settings, module.parameters(), total_steps=10)
    return TrainState(module, optimizer, schedule), optimizer


def take(made, versions):
    for version in versions:
        gradient = torch.randn(made.model.parameters.numel(), generator=torch.Generator().manual_seed(version))
        step = Step(version=version, fresh=(Share(worker=0, version=version, weight=1.0),))
        assert made.take(step, lambda share, found=gradient: found, [])


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 9], ids="after {} steps".format)
@pytest.mark.parametrize("chosen", [{"schedule": "poly"}, {"decay_at": (0.5, 0.8)}], ids=["poly", "steps"])
def test_a_server_that_is_saved_and_loaded_goes_on_to_the_last_bit(chosen, stop):
    """Before, at and after the end of the warm-up, where one schedule inside another takes over."""
    settings = OptimizerSettings(name="lars", lr=3.0, warmup=0.4, nesterov=True, **chosen)
    (undisturbed, _), (stopped, _), (resumed, optimizer) = (trainee(settings) for _ in range(3))
    take(undisturbed, range(10))
    take(stopped, range(stop))
    plain, tensors = stopped.state()
    assert sum(name.endswith("velocity") for name in tensors) == 6
    resumed.load_state(json.loads(json.dumps(plain)), {name: tensor.clone() for name, tensor in tensors.items()})
    take(resumed, range(stop, 10))
    assert torch.equal(undisturbed.model.parameters, resumed.model.parameters)
    if settings.schedule == "poly":
        assert optimizer.param_groups[0]["lr"] == 0


def test_trust_is_the_old_name_of_trust_coefficient_in_files_options_and_documents(tmp_path, capsys):
    path = tmp_path / "old.toml"
    path.write_text('[optimizer]\nname = "lars"\ntrust = 0.005\n')
    with pytest.warns(FutureWarning, match=r"old\.toml:3: optimizer\.trust is called trust_coefficient now"):
        assert read_recipe(path).optimizer.trust_coefficient == 0.005
    with pytest.warns(FutureWarning, match=r"old\.toml:3"):
        assert read_recipe(path, {"optimizer.trust_coefficient": "0.5"}).optimizer.trust_coefficient == 0.5
    document = Recipe().with_settings(optimizer={"trust_coefficient": 0.25}).to_document()
    assert "trust" not in document["optimizer"]
    old = document | {"optimizer": {"trust": document["optimizer"].pop("trust_coefficient"), **document["optimizer"]}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Recipe.from_document(old).optimizer.trust_coefficient == 0.25
    with pytest.warns(FutureWarning, match=r"optimizer\.trust is called trust_coefficient now") as warned:
        assert (
            Recipe().with_settings(optimizer={"trust": 0.25}).to_document() == Recipe.from_document(old).to_document()
        )
    assert warned[0].filename == __file__
    command = ["simulate", str(path), "--rounds", "1", "--timing-only", "--json", "--out", str(tmp_path / "run")]
    assert main([*command, "--optimizer.trust", "0.5"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["recipe"]["optimizer"]["trust_coefficient"] == 0.5
    assert "--optimizer.trust is now --optimizer.trust-coefficient" in said.err
    assert f"paceline: warning: {path}:3: optimizer.trust is called trust_coefficient now" in said.err
