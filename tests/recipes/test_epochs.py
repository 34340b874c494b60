"""Recipes whose budget is epochs: passes of every worker over its shard."""

from __future__ import annotations

import math

import pytest
import torch

from paceline import Recipe, simulate
from paceline.recipes import RecipeError, SettingError, read_recipe
from paceline.recipes.assembly import load_data, make_training, resolved, sized, with_rounds
from paceline.recipes.extension import Extension
from paceline.runs import Race, make_run, result_of
from paceline.strategies import STRATEGIES
from paceline.strategies.averaging import AVERAGING

EPOCHS, BATCH = 10, 50
SMALL = Recipe(epochs=EPOCHS, evaluate_every=1000, evaluation_samples=200).with_settings(
    cluster={"workers": 3, "late_work": "partial"},
    strategy={"k": 2},
    worker={"batch_size": BATCH, "blocks": 2},
    data={"split": "iid"},
)
SOME = {
    "fine-pruning": {"name": "fine-pruning", "window": 6, "starting_point": 1, "block": 2, "count": 1},
    "info-batch": {"name": "info-batch"},
}
WHOLE = EPOCHS * 500 // BATCH  # rounds of three shards of 500


@pytest.fixture(scope="module")
def dataset():
    return load_data(SMALL)


def run_of(recipe, dataset):
    run = make_run(recipe, dataset=dataset)
    for _ in run:
        pass
    return run


@pytest.mark.parametrize("strategy", ["lgc", "hpsgd"])
def test_without_pruning_epochs_are_a_number_of_rounds(strategy, dataset):
    by_epochs = result_of(run_of(SMALL.with_strategy(strategy), dataset))
    by_rounds = result_of(run_of(SMALL.with_strategy(strategy).with_settings(epochs=None, rounds=WHOLE), dataset))
    assert by_epochs.trace.recipe["rounds"] == WHOLE
    assert torch.equal(by_epochs.parameters, by_rounds.parameters)
    assert by_epochs.seconds == by_rounds.seconds


@pytest.mark.parametrize("policy", SOME)
@pytest.mark.parametrize("strategy", [*STRATEGIES, *AVERAGING])
def test_pruning_saves_rounds_and_every_worker_makes_its_passes(strategy, policy, dataset):
    recipe = SMALL.with_strategy(strategy).with_settings(pruning=SOME[policy])
    trace = run_of(recipe, dataset).trace
    assert min(trace.pruned.passes) == EPOCHS
    assert trace.rounds_done < 0.95 * WHOLE
    assert trace.evaluations[-1].round == trace.rounds_done
    saved = 1 - trace.rounds_done / WHOLE
    assert saved == pytest.approx(trace.pruned.share_pruned, abs=0.06)


def test_fine_pruning_takes_the_rounds_that_its_plan_says_and_the_schedule_is_laid_out_over_them(dataset):
    recipe = SMALL.with_strategy("full").with_settings(pruning=SOME["fine-pruning"])
    pruned = 4  # of the passes 2, 4, 8, 10; in the sixth a window begins
    planned = math.ceil((EPOCHS * 500 - pruned * 150) / BATCH)
    assert make_training(recipe, dataset).total_steps == planned
    assert run_of(recipe, dataset).trace.rounds_done == planned
    info = SMALL.with_strategy("full").with_settings(pruning=SOME["info-batch"])
    assert make_training(info, dataset).total_steps == WHOLE


def test_a_run_ends_with_the_first_round_after_which_all_passes_are_made(dataset):
    run = make_run(SMALL.with_strategy("full").with_settings(pruning=SOME["info-batch"]), dataset=dataset)
    made = [run.batches.pruned.passes for _ in run]
    assert min(made[-2]) == EPOCHS - 1
    assert min(made[-1]) == EPOCHS


def test_info_batch_leaves_nobody_out_in_the_last_passes(dataset):
    recipe = SMALL.with_strategy("full").with_settings(pruning=SOME["info-batch"] | {"delta": 0.5})
    run = make_run(recipe, dataset=dataset)
    sat_out = {}
    for _ in run:
        order = run.batches.pruned._members.get(0)
        if order is not None:
            sat_out[order.order.whole_passes] = order.order.sat_out
    assert sat_out[5] > 0
    assert sat_out[EPOCHS] == sat_out[5], "from half of the passes on everybody takes part"


def test_unequal_shards_wait_for_the_largest(dataset):
    recipe = SMALL.with_settings(data={"split": "dirichlet", "alpha": 1.0}, worker={"batch_size": 10})
    training = make_training(recipe, dataset)
    largest = max(map(len, training.shards))
    assert with_rounds(recipe, dataset).rounds == math.ceil(EPOCHS * largest / 10)
    trace = run_of(recipe.with_settings(pruning=SOME["fine-pruning"]), dataset).trace
    assert min(trace.pruned.passes) == EPOCHS
    assert max(trace.pruned.passes) > EPOCHS


def test_other_seeds_of_a_race_have_shards_and_rounds_of_their_own(dataset):
    race = Race(SMALL.with_settings(data={"split": "dirichlet"}), ["full"], seeds=2)
    for _ in race:
        pass
    assert race.rounds == max(result.rounds for result in race.results)


# -- what may be said -----------------------------------------------------------------------------------------------


def test_rounds_and_epochs_are_not_given_together(dataset, tmp_path):
    with pytest.raises(ValueError, match=rf"not both \(rounds=7; epochs={EPOCHS} are {WHOLE} rounds\)"):
        simulate(SMALL.with_settings(rounds=7))
    file = tmp_path / "both.toml"
    file.write_text("rounds = 7\nepochs = 3\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"both\.toml:2: give rounds or epochs, not both"):
        read_recipe(file)
    file.write_text("epochs = 3\n", encoding="utf-8")
    assert read_recipe(file).epochs == 3
    found = read_recipe(file, {"rounds": "7"})
    assert (found.rounds, found.epochs) == (7, None), "the command line stands in place of the file"
    file.write_text("rounds = 7\n", encoding="utf-8")
    found = read_recipe(file, {"epochs": "3"})
    assert (found.rounds, found.epochs) == (300, 3)


def test_a_recorded_recipe_has_both_and_is_read(dataset):
    recipe = with_rounds(SMALL, dataset)
    again = Recipe.from_document(recipe.to_document())
    assert (again.epochs, again.rounds) == (EPOCHS, WHOLE)
    assert with_rounds(again, dataset) == sized(recipe, dataset)
    assert Recipe.from_document({"rounds": 20}).epochs is None


def test_where_epochs_cannot_be(dataset):
    with pytest.raises(ValueError, match="timing only knows no shards"):
        simulate(SMALL, timing_only=True)
    with pytest.raises(SettingError, match="the budget of a pipeline is rounds"):
        Recipe(epochs=3).with_settings(pipeline={"stages": 2}, strategy={"name": "full"})
    with pytest.raises(ValueError, match="a real run that prunes has no budget of epochs"):
        resolved(SMALL.with_settings(pruning=SOME["info-batch"]), dataset)


def test_a_real_run_without_pruning_has_the_rounds_of_its_epochs(dataset):
    assert resolved(SMALL, dataset).rounds == WHOLE
    extended = Extension(rounds=640).of(resolved(SMALL, dataset))
    assert (extended.rounds, extended.epochs) == (640, None)
