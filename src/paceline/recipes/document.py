"""Results as one machine-readable document."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.recipes.recipe import Recipe
from paceline.runs.simulation import Result

FROM_TRACE = ("late_work", "clock", "diverged", "sent_bytes", "received_bytes")


def as_document(recipe: Recipe, results: Sequence[Result]) -> dict[str, object]:
    """The machine-readable form of results; what cannot be written in JSON (infinite bandwidth) becomes null.

    >>> sorted(as_document(Recipe(), []))
    ['recipe', 'results']
    """
    return {
        "recipe": recipe.to_document(),
        "results": [
            dataclasses.asdict(result.summary)
            | {name: getattr(result.trace, name) for name in FROM_TRACE}
            | ({"pruned": dataclasses.asdict(result.trace.pruned)} if result.trace.pruned else {})
            for result in results
        ],
    }
