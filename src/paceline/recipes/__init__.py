"""A whole run as frozen dataclasses, read from TOML and from the command line, and the parts that it names.

Bad values are refused where they are written: one line names the place, the value and what is allowed.
"""

from paceline.recipes.reading import RecipeError, read_recipe
from paceline.recipes.recipe import Recipe
from paceline.settings import SettingError

__all__ = ["Recipe", "RecipeError", "SettingError", "read_recipe"]
