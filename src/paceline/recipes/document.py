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
        "recipe": recipe.to_document(),
        "results": [
            dataclasses.asdict(result.summary)
            | {"late_work": result.trace.late_work, "clock": result.trace.clock, "diverged": result.trace.diverged}
            for result in results
        ],
    }
