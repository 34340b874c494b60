"""Recipes whose workers average among themselves: the member of the family a recipe names, and its simulated run."""

from __future__ import annotations

from typing import Any

from paceline.recipes.recipe import Recipe
from paceline.strategies.averaging import AVERAGING, Averaging, make_averaging
from paceline.strategies.averaging.members import SETTINGS


def averages(recipe: Recipe) -> bool:
    """Whether a recipe's workers average among themselves, without a server.

    >>> averages(Recipe().with_strategy("hpsgd")), averages(Recipe())
    (True, False)
    """
    return recipe.strategy.name in AVERAGING


def make_member(recipe: Recipe) -> Averaging:
    """The member of the family, with those of the section's settings that it has.

    >>> make_member(Recipe().with_settings(strategy={"name": "local-sgd", "period": 4})).period
    4
    """
    section = recipe.strategy
    chosen: dict[str, Any] = {name: getattr(section, name) for name in SETTINGS[section.name]}
    return make_averaging(section.name, **{name: value for name, value in chosen.items() if value != "auto"})
