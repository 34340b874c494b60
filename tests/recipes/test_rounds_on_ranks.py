"""Recipes whose ranks add up the rounds themselves: read, raced, timed, refused."""

from __future__ import annotations

import pytest

from paceline import Recipe
from paceline.recipes import SettingError
from paceline.strategies.averaging import AVERAGING


def test_a_recipe_that_does_not_say_who_adds_up_means_a_server():
    document = Recipe().to_document()
    assert document["strategy"].pop("on") == "server"
    assert Recipe.from_document(document) == Recipe()


@pytest.mark.parametrize("name", AVERAGING)
def test_strategies_that_average_have_no_server_whatever_the_setting_says(name):
    recipe = Recipe().with_settings(strategy={"name": name, "on": "ranks"}, codec={"name": "qsgd"})
    assert not recipe.strategy.rounds_on_ranks
    with pytest.raises(SettingError, match="codec is qsgd"):
        recipe.with_strategy("full")
