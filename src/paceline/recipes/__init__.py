"""A whole run as frozen dataclasses, read from TOML and from the command line, and the parts that it names.

Bad values are refused where they are written: one line names the place, the value and what is allowed.
"""

import importlib
import warnings

from paceline.recipes.reading import RecipeError, read_recipe
from paceline.recipes.recipe import Recipe
from paceline.settings import SettingError

__all__ = ["Recipe", "RecipeError", "SettingError", "read_recipe"]

_MOVED = ("Race", "Result", "simulate")  # until 0.1; what carries recipes out stands above them now


def __getattr__(name: str) -> object:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"paceline.recipes.{name} is paceline.{name} now", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module("paceline"), name)


def __dir__() -> list[str]:
    return __all__
