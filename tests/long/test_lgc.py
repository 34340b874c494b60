"""What the experiments on LGC take for granted of a training."""

from __future__ import annotations

from experiments.core.recipes import run_recipe
from experiments.papers.lgc.setting import base_recipe
from tests.experiments.telling import TOY


def test_what_full_learns_does_not_depend_on_how_long_stragglers_last():
    recipe = base_recipe(TOY).with_strategy("full")
    losses = {
        run_recipe({"recipe": recipe.with_settings(delay={"persistence": h}).to_document()})["loss"] for h in (1, 10)
    }
    assert len(losses) == 1
