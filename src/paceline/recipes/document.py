"""Results as one machine-readable document."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.recipes.recipe import Recipe
from paceline.recipes.running import Result


def as_document(recipe: Recipe, results: Sequence[Result]) -> dict[str, object]:
    """The machine-readable form of results; what cannot be written in JSON (infinite bandwidth) becomes null.

    >>> sorted(as_document(Recipe(), []))
    ['recipe', 'results']
    """
    return {
        "recipe": _finite(recipe.to_dict()),
        "results": [
            dataclasses.asdict(result.summary)
            | {"late_work": result.trace.late_work, "clock": result.trace.clock, "diverged": result.trace.diverged}
            for result in results
        ],
    }


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return None
    return value
