"""`pruning.name` in a recipe: every policy under every strategy; what it may be; what is told of it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
import warnings
from collections import Counter

import pytest
import torch

from paceline import Race, Recipe, simulate
from paceline.cli.options import parse
from paceline.data.pruning import PASSES_STARTING_POINT, PASSES_WINDOW, PRUNINGS, PruningSettings
from paceline.data.pruning.sampler import FinePruning, InfoBatch
from paceline.drivers.simulated import learner
from paceline.recipes import RecipeError, SettingError, read_recipe
from paceline.recipes.assembly import load_data, make_training
from paceline.reports.results import TraceGroup
from paceline.reports.sentences import conditions
from paceline.runs import as_document, make_run, result_of
from paceline.strategies import STRATEGIES
from paceline.strategies.averaging import AVERAGING
from paceline.training import Batches, pruning_of
from paceline.workers.gradients import LoopGradients

ROUNDS = 16
SMALL = Recipe(rounds=ROUNDS, evaluate_every=ROUNDS, evaluation_samples=300).with_settings(
    cluster={"workers": 3, "late_work": "partial"},
    strategy={"k": 2},
    worker={"batch_size": 150, "blocks": 2},
    data={"split": "iid"},
)
BUSY = {"window": 50, "starting_point": 0, "block": 1, "count": 1}
SOME = {
    "fine-pruning": {"name": "fine-pruning", **BUSY},
    "info-batch": {"name": "info-batch", "delta": 1.0},
}
NOTHING = {"fine-pruning": {"prune": 0.0}, "info-batch": {"ratio": 0.0}}
policies = pytest.mark.parametrize("policy", PRUNINGS)


@pytest.fixture(scope="module")
def dataset():
    return load_data(SMALL)


def run_of(recipe, dataset):
    run = make_run(recipe, dataset=dataset)
    for _ in run:
        pass
    return run


@policies
@pytest.mark.parametrize("strategy", [*STRATEGIES, *AVERAGING])
def test_every_policy_trains_and_prunes_under_every_strategy(strategy, policy, dataset):
    recipe = SMALL.with_strategy(strategy).with_settings(pruning=SOME[policy])
    run = run_of(recipe, dataset)
    trace = run.trace
    assert not trace.diverged
    assert trace.evaluations[-1].loss < 0.8 * trace.evaluations[0].loss
    assert 0.05 < trace.pruned.share_pruned < 0.5
    assert len(trace.pruned.passes) == 3
    totals = pruning_of(run.batches, make_training(recipe, dataset))
    assert int(totals.times_pruned.sum()) == trace.pruned.sat_out


@pytest.mark.parametrize(("strategy", "policy"), [("lgc", "info-batch"), ("hpsgd", "fine-pruning")])
def test_the_same_run_twice_is_the_same_to_the_last_bit(strategy, policy, dataset):
    recipe = SMALL.with_strategy(strategy).with_settings(pruning=SOME[policy])
    first, second = (result_of(run_of(recipe, dataset)) for _ in range(2))
    assert first.trace == second.trace
    assert torch.equal(first.parameters, second.parameters)


@policies
@pytest.mark.parametrize("strategy", ["lgc", "async", "hpsgd"])
def test_who_prunes_nothing_trains_as_without(strategy, policy, dataset, monkeypatch):
    """To the last bit, where gradients are taken one by one: what is pruned cannot wait for the others of its round."""
    monkeypatch.setattr(learner, "make_engine", lambda module, loss: LoopGradients(copy.deepcopy(module), loss))
    plain = SMALL.with_strategy(strategy)
    pruned = plain.with_settings(pruning=SOME[policy] | NOTHING[policy])
    without, with_ = (result_of(run_of(recipe, dataset)) for recipe in (plain, pruned))
    assert torch.equal(without.parameters, with_.parameters)
    assert (without.trace.pruned, with_.trace.pruned.sat_out) == (None, 0)


@pytest.mark.parametrize("late_work", ["partial", "complete"])
def test_a_worker_judges_all_that_it_sends_also_what_nobody_uses(late_work, dataset, monkeypatch):
    judged = {worker: [] for worker in range(3)}
    monkeypatch.setattr(Batches, "judge", lambda _, *, worker, draw, losses: judged[worker].append((draw, len(losses))))
    recipe = SMALL.with_strategy("fastest-k").with_settings(
        cluster={"late_work": late_work}, delay={"persistence": 1}, pruning=SOME["fine-pruning"]
    )
    trace = run_of(recipe, dataset).trace
    assert sum(trace.dropped.values()) > 3
    for worker, told in judged.items():
        assert [draw for draw, _ in told] == list(range(len(told)))
        sent = [work for work in trace.works if work.worker == worker and work.arrived_seconds is not None]
        assert Counter(75 * work.blocks_done for work in sent) <= Counter(size for _, size in told)
        assert len(told) <= len(sent) + 1  # one may be on its way


# -- rare cases --------------------------------------------------------------------------------------------------------

RARE = SMALL.with_settings(worker={"batch_size": 20}, pruning=SOME["fine-pruning"])


def rare_and_hard(numbers=False):
    """200 samples of each of three workers, a tenth of them of a class, or a tail, that no input tells of."""
    dice = torch.Generator().manual_seed(4)
    inputs, rare = torch.rand(600, 64, generator=dice), torch.arange(600) % 10 == 0
    targets = torch.where(rare, 0.9, 0.0) + torch.rand(600, generator=dice) / 10
    targets = targets.unsqueeze(1) if numbers else rare.long()
    return (inputs, targets), (inputs[:60], targets[:60])


def told_of(recipe, run=simulate, **given):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(recipe, **given)
    return [str(each.message) for each in caught if "fine-pruning lets" in str(each.message)]


def net(input_shape, classes):
    return torch.nn.Linear(64, classes)


def squares(outputs, targets):
    return (outputs - targets).square().squeeze(1)


def test_a_class_that_loses_more_than_twice_its_share_of_a_shard_is_told_of_once():
    (told,) = told_of(RARE, data=rare_and_hard(), model=net)
    assert re.match(r"worker \d: fine-pruning lets \d+ of \d+ of class 1 sit out, and 30% of all samples", told)
    assert 'protect = "classes" takes the same share of each class; info-batch leaves out low losses' in told

    def race(recipe, **given):
        for _ in Race(recipe, strategies=["full", "lgc"], seeds=2, **given):
            pass

    assert len(told_of(RARE, run=race, data=rare_and_hard(), model=net)) == 1
    assert told_of(RARE.with_settings(pruning={"protect": "classes"}), data=rare_and_hard(), model=net) == []
    without = RARE.with_settings(pruning=dataclasses.asdict(PruningSettings(name="info-batch")))
    assert told_of(without, data=rare_and_hard(), model=net) == []


def test_a_tail_that_loses_more_than_twice_its_share_is_told_of_without_a_remedy_for_classes():
    given = {"data": rare_and_hard(numbers=True), "model": net, "loss": squares}
    (told,) = told_of(RARE, **given)
    assert "of the targets above 0." in told
    assert "protect" not in told
    with pytest.raises(ValueError, match=r"pruning\.protect = 'classes' needs .* has targets that are no classes"):
        simulate(RARE.with_settings(pruning={"protect": "classes"}), **given)


def test_a_protected_class_loses_its_share_in_every_shard(dataset):
    recipe = SMALL.with_settings(pruning=SOME["fine-pruning"] | {"protect": "classes", "prune": 0.25})
    run = run_of(recipe, dataset)
    labels = dataset.train.labels.numpy()
    for member in run.batches.pruned._members.values():
        held, policy = run.batches.training.shards[member.shard].numpy(), member.order.policy
        passes = policy.times_pruned.sum() // policy.prune_num
        assert passes > 0
        for kind in range(10):
            own = labels[held] == kind
            assert (
                0 <= policy.times_pruned[own].sum() - passes * int(own.sum() * policy.prune_num / len(held)) <= passes
            )


# -- what is written --------------------------------------------------------------------------------------------------


def test_the_section_has_every_setting_of_every_policy_and_the_samplers_defaults_but_for_the_window():
    section, counted_in_passes = PruningSettings(), {"window": PASSES_WINDOW, "starting_point": PASSES_STARTING_POINT}
    for sampler in (FinePruning, InfoBatch):
        for name, parameter in inspect.signature(sampler).parameters.items():
            if hasattr(section, name):
                assert getattr(section, name) == counted_in_passes.get(name, parameter.default)
    named = {each.name for each in dataclasses.fields(PruningSettings)}
    assert named == {"name", *(setting for entry in PRUNINGS.values() for setting in entry.settings)}


def test_what_is_written_reaches_the_training(tmp_path, dataset):
    path = tmp_path / "pruned.toml"
    path.write_text('rounds = 40\n[pruning]\nname = "fine-pruning"\nwindow = 12\nprune = 0.2\n')
    recipe = read_recipe(path, {"pruning.starting_point": "3"})
    training = make_training(recipe, dataset)
    wanted = PruningSettings(name="fine-pruning", window=12, starting_point=3, prune=0.2)
    assert (training.pruning, training.worker_draws) == (wanted, 40)
    assert Recipe.from_document(recipe.to_document()) == recipe


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Nothing of its own."""


def test_the_command_line_has_it_by_a_short_name():
    _, given = parse(NoOptions, ["--pruning", "info-batch", "--pruning.ratio", "0.25"])
    assert read_recipe(overrides=given).pruning == PruningSettings(name="info-batch", ratio=0.25)


def test_a_document_of_a_run_from_before_prunes_nothing():
    document = Recipe().to_document()
    del document["pruning"]
    assert Recipe.from_document(document) == Recipe()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"name": "coarse"}, "unknown pruning 'coarse'; choose from none, fine-pruning, info-batch"),
        ({"ratio": 0.3}, "ratio is a setting of info-batch, and the pruning is none"),
        (
            {"name": "fine-pruning", "delta": 0.3},
            "delta is a setting of info-batch, and the pruning is fine-pruning",
        ),
        ({"name": "info-batch", "window": 9}, "window is a setting of fine-pruning, and the pruning is info-batch"),
        ({"name": "fine-pruning", "prune": 1.0}, "must be at least 0 and below 1 (prune=1.0)"),
        ({"name": "fine-pruning", "prune": -0.1}, "prune must be between 0 and 1 (prune=-0.1)"),
        ({"name": "fine-pruning", "window": 70_000}, "window must be between 1 and 65,535 (window=70000)"),
        ({"name": "fine-pruning", "window": 5}, "(starting_point=10, window=5)"),
        ({"name": "fine-pruning", "count": 5}, "count must be between 0 and block (count=5, block=4)"),
        (
            {"name": "fine-pruning", "attenuation": float("inf")},
            "attenuation must be between 1 and 1e+06 (attenuation=inf)",
        ),
        ({"name": "fine-pruning", "tolerance": float("nan")}, "tolerance must be between 0 and 1e+06 (tolerance=nan)"),
        ({"name": "info-batch", "ratio": 1.0}, "ratio must be at least 0 and below 1 (ratio=1.0)"),
        ({"name": "info-batch", "delta": 1.1}, "delta must be between 0 and 1 (delta=1.1)"),
        ({"name": "fine-pruning", "window": 2.5}, "window must be a whole number"),
    ],
)
def test_what_cannot_be_is_refused_with_the_value_and_what_is_allowed(settings, complaint):
    with pytest.raises(SettingError) as refused:
        Recipe().with_settings(pruning=settings)
    assert complaint in str(refused.value)


def test_a_refusal_names_the_line_that_was_written(tmp_path):
    path = tmp_path / "pruned.toml"
    path.write_text('[pruning]\nname = "fine-pruning"\nwindow = 5\n')
    with pytest.raises(RecipeError, match=r"pruned\.toml:3: starting_point must be between 0 and window"):
        read_recipe(path)


# -- what is told -----------------------------------------------------------------------------------------------------


def said(trace):
    return [
        phrase for phrase in conditions([TraceGroup(label="x", strategy="x", traces=(trace,))]) if "pruning" in phrase
    ]


def test_how_many_sat_out_is_told_where_it_is_known_and_not_guessed_where_it_is_not(dataset):
    recipe = SMALL.with_settings(pruning=SOME["fine-pruning"])
    result = result_of(run_of(recipe, dataset))
    share = result.trace.pruned.share_pruned
    assert said(result.trace) == [f"pruning: fine-pruning, {100 * share:.0f} % of the samples sat out"]
    assert said(dataclasses.replace(result.trace, pruned=None)) == ["pruning: fine-pruning"]
    (document,) = as_document(recipe, [result])["results"]
    assert document["pruned"] == dataclasses.asdict(result.trace.pruned)
    plain = simulate(SMALL.with_settings(rounds=1))
    assert said(plain.trace) == []
    assert "pruned" not in as_document(SMALL, [plain])["results"][0]
