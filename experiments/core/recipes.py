"""A job that many experiments have: a recipe, simulated, and what its trace says in plain figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from experiments.core.story import Job, plain
from paceline.recipes import Recipe
from paceline.runs.simulation import Result, simulate
from paceline.traces import Trace
from paceline.traces.time_split import time_split

SPLIT = ("computing", "waiting", "network")


def run_recipe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Simulate the recipe in `settings`; with `timing_only`, nothing is trained.

    >>> run_recipe({"recipe": {"rounds": 3}, "timing_only": True})["rounds"]
    3
    """
    recipe = Recipe.from_document(settings["recipe"])
    return figures(simulate(recipe, timing_only=bool(settings.get("timing_only", False))))


def figures(result: Result) -> dict[str, Any]:
    """Return a run's figures, its curve and where its time went as plain values; what is not finite is None."""
    split = time_split(result.trace)
    found = {
        **dataclasses.asdict(result.summary),
        "diverged": result.trace.diverged,
        "curve": [dataclasses.asdict(point) for point in result.trace.evaluations],
        "time_split": None if split is None else dataclasses.asdict(split),
    }
    figures: dict[str, Any] = plain(found)
    return figures


def recipe_job(recipe: Recipe, *, seconds: float = 1.0, timing_only: bool = False) -> Job:
    """Return the job that simulates a recipe with each seed.

    >>> recipe_job(Recipe(rounds=3)).of(7)["recipe"]["seed"]
    7
    """
    timing = {"timing_only": True} if timing_only else {}
    return Job(run_recipe, lambda seed: {"recipe": recipe.with_seed(seed).to_document(), **timing}, seconds)


def worker_split(trace: Trace, until_seconds: float = math.inf) -> dict[str, float | None]:
    """Return the seconds up to a moment in which a worker computed, waited, or was held up by the network: means.

    >>> from paceline.traces import Work
    >>> works = tuple(Work(worker=worker, version=0, started_seconds=0.0, finished_seconds=end, arrived_seconds=5.0,
    ...                    sent_seconds=3.0) for worker, end in enumerate((2.0, 3.0)))
    >>> trace = Trace(strategy="ssgd", seed=0, workers=2, recipe={}, rounds_done=1, seconds=5.0, works=works,
    ...               averaged=True)
    >>> worker_split(trace, 5.0)
    {'computing': 2.5, 'waiting': 0.5, 'network': 2.0}
    """
    split = time_split(trace, until_seconds=until_seconds)
    if split is None:
        return dict.fromkeys(SPLIT)
    seconds = split.compute_seconds, split.waiting_seconds, split.network_seconds
    return {name: each / split.workers for name, each in zip(SPLIT, seconds, strict=True)}
