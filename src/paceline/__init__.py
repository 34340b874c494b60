"""paceline: train at the pace of the pack, not of its slowest rider.

    >>> from paceline import Recipe, simulate
    >>> result = simulate(Recipe(rounds=20))
    >>> result.rounds
    20

Public names are imported when they are first used, so that the command line starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paceline.recipes import Race, Recipe, RecipeError, Result, simulate
    from paceline.strategies import LGC, STRATEGIES, Async, FastestK, Full

_HOMES = {
    "Race": "recipes",
    "Recipe": "recipes",
    "RecipeError": "recipes",
    "Result": "recipes",
    "simulate": "recipes",
    "LGC": "strategies",
    "STRATEGIES": "strategies",
    "Async": "strategies",
    "FastestK": "strategies",
    "Full": "strategies",
}

__all__ = ["LGC", "STRATEGIES", "Async", "FastestK", "Full", "Race", "Recipe", "RecipeError", "Result", "simulate"]

if not TYPE_CHECKING:  # mypy reads the imports above instead, and so still sees a misspelt name

    def __getattr__(name: str) -> object:
        """Import a public name's package when the name is first used."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
