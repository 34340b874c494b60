"""A run's total number of rounds, changed when it is resumed; and the settings that depend on that total.

A schedule of the learning rate and pruning are laid out over the whole run: half of 300 rounds is not half of 640. So
they are not stretched in silence: whoever changes the total says again what they are to be.

    --resume DIR --rounds 640                                  a constant rate: nothing depends on the total
    --resume DIR --rounds 640 --optimizer.schedule poly        from here on as poly over 640 rounds would be
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import PacelineError
from paceline.recipes.reading import read_recipe, with_typed
from paceline.recipes.recipe import Recipe

SCHEDULE = ("schedule", "warmup", "power", "decay_from", "decay", "decay_at")
Changes = dict[str, dict[str, Any]]


class ExtensionError(PacelineError, ValueError):
    """A run that cannot be extended as it was asked for.

    >>> raise ExtensionError("rounds must be at least 300, which are done (rounds=200)")
    Traceback (most recent call last):
    paceline.recipes.extension.ExtensionError: rounds must be at least 300, which are done (rounds=200)
    """


@dataclass(frozen=True, kw_only=True)
class Extension:
    """Another total for a run, and the settings that were given again with it, by section.

    >>> Extension(rounds=640, changes={"optimizer": {"schedule": "poly"}}).of(Recipe()).optimizer.schedule
    'poly'
    """

    rounds: int
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for section, values in self.changes.items():  # they may come from a file, which must not name code or paths
            names = values if isinstance(values, Mapping) else [type(values).__name__]
            for name in names:
                if not may_be_restated(f"{section}.{name}"):
                    raise ExtensionError(f"an extension of a run cannot change {section}.{name}")

    def of(self, recipe: Recipe) -> Recipe:
        """Return the recipe that a run has now, from that of its beginning."""
        document = recipe.to_document()
        for section, values in self.changes.items():
            document[section] = {**document[section], **values}
        return Recipe.from_document({**document, "rounds": self.rounds, "epochs": None})  # another total is in rounds

    def followed_by(self, rounds: int, changes: Mapping[str, Mapping[str, Any]]) -> Extension:
        """Return this one and another that comes after it, as one."""
        sections = {*self.changes, *changes}
        merged = {name: {**self.changes.get(name, {}), **changes.get(name, {})} for name in sections}
        return Extension(rounds=rounds, changes=merged)


def may_be_restated(dotted: str) -> bool:
    """Tell whether a setting may be given again when a run is extended.

    >>> may_be_restated("optimizer.schedule"), may_be_restated("optimizer.lr")
    (True, False)
    """
    section, _, name = dotted.partition(".")
    return section == "pruning" or (section == "optimizer" and name in SCHEDULE)


def restated(recipe: Recipe, overrides: Mapping[str, str]) -> Changes:
    """Return settings that were typed as values of a recipe's document, by section; they are checked beside its own.

    >>> restated(Recipe(), {"optimizer.schedule": "poly", "optimizer.power": "1"})
    {'optimizer': {'schedule': 'poly', 'power': 1.0}}
    """
    document = with_typed(recipe, overrides).to_document()
    found: Changes = {}
    for dotted in overrides:
        section, _, name = dotted.partition(".")
        found.setdefault(section, {})[name] = document[section][name]
    return found


def check_restated(recipe: Recipe, rounds: int, changes: Mapping[str, Any]) -> None:
    """Raise ExtensionError if something in a recipe depends on its rounds and is not given again.

    >>> check_restated(Recipe(), 640, {})
    >>> check_restated(Recipe().with_settings(optimizer={"schedule": "poly"}), 640, {})
    Traceback (most recent call last):
    paceline.recipes.extension.ExtensionError: the learning rate's schedule is laid out over 300 rounds; for ...
    """
    was = recipe.rounds
    given = set(changes.get("optimizer", {}))
    if _schedule_follows_total(recipe) and not given & {"schedule", "warmup", "decay_at"}:
        raise ExtensionError(
            f"the learning rate's schedule is laid out over {was} rounds; for {rounds}, say again what it is to be: "
            f"--optimizer.schedule {recipe.optimizer.schedule} (or --optimizer.warmup, --optimizer.decay-at, ...)"
        )
    if recipe.pruning.on and "pruning" not in changes:
        raise ExtensionError(
            f"pruning is laid out over {was} rounds; for {rounds}, say again what it is to be: "
            f"--pruning.name {recipe.pruning.name}"
        )
    if "pruning" in changes and recipe.with_settings(pruning=changes["pruning"]).pruning.on != recipe.pruning.on:
        raise ExtensionError(
            f"pruning can be neither begun nor ended when a run is extended (pruning.name was {recipe.pruning.name}): "
            "start a new run"
        )


def _schedule_follows_total(recipe: Recipe) -> bool:
    optimizer = recipe.optimizer
    return optimizer.schedule == "poly" or bool(optimizer.decay_at) or optimizer.warmup > 0


def check_extendable(recipe: Recipe) -> None:
    """Raise ExtensionError if something in a recipe of ranks depends on its rounds: ranks cannot change it.

    >>> check_extendable(Recipe().with_strategy("hpsgd"))
    """
    for name, follows in (
        ("the learning rate's schedule", _schedule_follows_total(recipe)),
        ("pruning", recipe.pruning.on),
    ):
        if follows:
            raise ExtensionError(
                f"{name} is laid out over {recipe.rounds} rounds, and ranks keep theirs: such a run cannot be extended"
            )


def extend(recipe: Recipe, before: Extension | None, typed: Mapping[str, str]) -> Extension | None:
    """Return the extension that was typed beside --resume, after one that the run may have had before.

    >>> extend(Recipe(), None, {"rounds": "640"}).rounds
    640
    >>> extend(Recipe(), None, {}) is None
    True
    """
    if "rounds" not in typed:
        return before
    now = recipe if before is None else before.of(recipe)
    rounds = read_recipe(None, {"rounds": typed["rounds"]}).rounds
    changes = restated(now, {name: text for name, text in typed.items() if may_be_restated(name)})
    if rounds == now.rounds and not changes:
        return before
    check_restated(now, rounds, changes)
    found = (before or Extension(rounds=rounds)).followed_by(rounds, changes)
    found.of(recipe)  # settings that do not go together are said now
    return found
