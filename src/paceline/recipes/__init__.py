"""A whole run as frozen dataclasses, read from TOML and from the command line, and how it is carried out.

Bad values are refused where they are written: one line names the place, the value and what is allowed.
"""

from paceline.recipes.reading import RecipeError, read_recipe
from paceline.recipes.recipe import Recipe
from paceline.runs.race import Race, check_strategies
from paceline.runs.simulation import Result, as_document, make_run, result_of, simulate
from paceline.settings import SettingError

__all__ = [
    "Race",
    "Recipe",
    "RecipeError",
    "Result",
    "SettingError",
    "as_document",
    "check_strategies",
    "make_run",
    "read_recipe",
    "result_of",
    "simulate",
]
