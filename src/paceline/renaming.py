"""Parameters and settings that were renamed or got another default, and what was recorded before that.

An old name is accepted for one release, with a line of warning. What was recorded with an old name, or without a
setting whose default is another one now (recipes in journals, checkpoints and folders of runs), is read as it was
meant, without a word.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

RENAMED_SETTINGS = {("optimizer", "trust"): ("optimizer", "trust_coefficient")}
"""A setting of a recipe by its old name -> by its new one, each with its section."""

OLD_DEFAULTS = {("strategy", "scale_partial"): True}
"""A setting whose default was changed -> what a recorded recipe means that does not say it."""


def with_new_names(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's document with settings by their new names.

    >>> with_new_names({"seed": 3, "optimizer": {"lr": 2.0, "trust": 0.01}})
    {'seed': 3, 'optimizer': {'lr': 2.0, 'trust_coefficient': 0.01}}
    """
    return {
        section: {RENAMED_SETTINGS.get((section, name), (section, name))[1]: entry for name, entry in value.items()}
        if isinstance(value, Mapping)
        else value
        for section, value in document.items()
    }


def with_old_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of recipes with the old ones of settings whose default is another now.

    >>> with_old_defaults({"seed": 0, "strategy": {"name": "lgc", "scale_partial": "auto"}})
    {'seed': 0, 'strategy': {'name': 'lgc', 'scale_partial': True}}
    """
    found = dict(defaults)
    for (section, name), value in OLD_DEFAULTS.items():
        if name in found.get(section, {}):
            found[section] = {**found[section], name: value}
    return found


def as_recorded(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded recipe with settings by their new names, and with the old defaults of those it does not say.

    An empty document is that of a script, which has no recipe, and stays empty.

    >>> as_recorded({"strategy": {"name": "lgc"}}), as_recorded({"strategy": {"scale_partial": "samples"}})
    ({'strategy': {'scale_partial': True, 'name': 'lgc'}}, {'strategy': {'scale_partial': 'samples'}})
    """
    found = with_new_names(document)
    if not found:
        return found
    for (section, name), value in OLD_DEFAULTS.items():
        held = found.get(section, {})
        if isinstance(held, Mapping):
            found[section] = {name: value, **held}
    return found


def renamed(old_name: str, old: Any, new_name: str, new: Any, *, stacklevel: int = 3) -> Any:
    """Return the value of a parameter that may have been given by its old name; None if it was given by neither.

    `stacklevel` is that of `warnings.warn`: 3 points at the caller of the function that has the parameter.

    >>> renamed("folder", None, "out", "runs/mine")
    'runs/mine'
    >>> renamed("folder", "runs/old", "out", "runs/mine")
    Traceback (most recent call last):
    TypeError: folder is the old name of out: give out alone
    """
    if old is None:
        return new
    if new is not None:
        raise TypeError(f"{old_name} is the old name of {new_name}: give {new_name} alone")
    warnings.warn(
        f"{old_name} is called {new_name} now; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
    return old
