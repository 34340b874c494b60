"""Every example recipe is short, says how it is run, and comes to what its comments say, on a run that is shortened."""

from __future__ import annotations

import json

import pytest

from paceline.cli import main
from paceline.recipes import read_recipe
from tests.examples.scripts import EXAMPLES

RECIPES = sorted(path.name for path in EXAMPLES.glob("*.toml"))


def simulated(name, folder, capsys, *options):
    assert main(["simulate", str(EXAMPLES / name), "--json", "--out", str(folder), *options]) == 0
    return json.loads(capsys.readouterr().out)["results"][0]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_short_can_be_read_and_says_how_it_is_run(name):
    read_recipe(EXAMPLES / name)
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 40
    assert f"examples/{name}" in text.partition("\n\n")[0] or name == "pipeline.toml"


def test_hpsgd_does_not_wait_for_the_network(tmp_path, capsys):
    waits, overlaps = (
        simulated("hpsgd.toml", tmp_path / strategy, capsys, "--rounds", "20", "--strategy", strategy)
        for strategy in ("ssgd", "hpsgd")
    )
    assert overlaps["seconds"] < 0.6 * waits["seconds"]


def test_lars_trains_with_a_large_batch(tmp_path, capsys):
    found = simulated("lars.toml", tmp_path / "lars", capsys)
    assert found["accuracy"] > 0.95


def test_pruning_makes_the_epochs_shorter(tmp_path, capsys):
    recipe = read_recipe(EXAMPLES / "pruning.toml")
    assert recipe.epochs == 40
    half = ("--epochs", "20", "--pruning.window-at", "6,12,16", "--pruning.starting-point", "3")
    pruned = simulated("pruning.toml", tmp_path / "pruned", capsys, *half)
    whole = simulated("pruning.toml", tmp_path / "whole", capsys, *half, "--pruning.prune", "0")
    assert pruned["pruned"]["passes"] == [20] * 4
    assert whole["rounds"] == 235
    assert pruned["rounds"] < 0.9 * whole["rounds"]
    assert pruned["seconds"] < 0.9 * whole["seconds"]
