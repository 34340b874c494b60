"""A job that most experiments have: a recipe, simulated, and what its trace says in plain figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.recipes import Recipe
from paceline.reproduce.experiment import Job
from paceline.runs.simulation import Result, simulate
from paceline.traces import Evaluation, Trace


def run_recipe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Simulate the recipe in `settings`; with `timing_only`, nothing is trained.

    >>> run_recipe({"recipe": {"rounds": 3}, "timing_only": True})["rounds"]
    3
    """
    recipe = Recipe.from_document(settings["recipe"])
    return figures(simulate(recipe, timing_only=bool(settings.get("timing_only", False))))


def figures(result: Result) -> dict[str, Any]:
    """Return a run's figures and its curve as plain values; what is not finite is None."""
    summary = {name: _finite(value) for name, value in dataclasses.asdict(result.summary).items()}
    curve = [
        {name: _finite(value) for name, value in dataclasses.asdict(point).items()}
        for point in result.trace.evaluations
    ]
    return {**summary, "diverged": result.trace.diverged, "curve": curve}


def recipe_job(name: str, recipe: Recipe, *, seconds: float = 1.0, timing_only: bool = False) -> Job:
    """Return the job that simulates a recipe.

    >>> recipe_job("lgc", Recipe(rounds=3)).settings["recipe"]["rounds"]
    3
    """
    settings = {"recipe": recipe.to_document(), **({"timing_only": True} if timing_only else {})}
    return Job(name=name, run=run_recipe, settings=settings, seconds=seconds)


# -- seconds to an accuracy, and where they went ----------------------------------------------------------------------
# What `paceline.traces` says of a trace takes their place where it says the same.

SPLIT = ("computing", "waiting", "network")


def seconds_to_accuracy(curve: Sequence[Evaluation], target: float) -> float | None:
    """Return when the test accuracy first reached a target, between evaluations on a straight line; None if never.

    >>> curve = [Evaluation(round=0, seconds=0.0, loss=2.3, accuracy=0.0),
    ...          Evaluation(round=9, seconds=8.0, loss=1.0, accuracy=0.5)]
    >>> seconds_to_accuracy(curve, 0.4), seconds_to_accuracy(curve, 0.8)
    (6.4, None)
    """
    before: tuple[float, float] | None = None
    for point in curve:
        accuracy = 0.0 if point.accuracy is None else point.accuracy
        if accuracy >= target:
            if before is None:
                return point.seconds
            share = (target - before[1]) / (accuracy - before[1])
            return before[0] + share * (point.seconds - before[0])
        before = point.seconds, accuracy
    return None


def time_split(trace: Trace, until_seconds: float) -> dict[str, float]:
    """Return the seconds up to a moment in which a worker computed, waited for others, or for the network alone.

    They are means over the workers, and add up to the moment. What goes on while a worker computes costs it nothing:
    an average that is under way beside a window of local steps counts as neither waiting nor network.

        worker 0   |####|..|~~~|####|      # computing   . waiting for the last one in   ~ network
        worker 1   |######|~~~|####|

    >>> from paceline.traces import Work
    >>> works = [Work(worker=worker, version=0, started_seconds=0.0, finished_seconds=end, arrived_seconds=5.0,
    ...               sent_seconds=3.0) for worker, end in enumerate((2.0, 3.0))]
    >>> time_split(Trace(strategy="ssgd", seed=0, workers=2, recipe={}, rounds_done=1, seconds=5.0, works=works), 5.0)
    {'computing': 2.5, 'waiting': 0.5, 'network': 2.0}
    """
    totals = dict.fromkeys(SPLIT, 0.0)
    for worker in range(trace.workers):
        own = [work for work in trace.works if work.worker == worker and work.arrived_seconds is not None]
        computing = _merged((work.started_seconds, work.finished_seconds) for work in own)
        sending = _merged(
            (work.finished_seconds if work.sent_seconds is None else work.sent_seconds, work.arrived_seconds or 0.0)
            for work in own
        )
        busy = _length(computing, until_seconds)
        either = _length(_merged((*computing, *sending)), until_seconds)
        totals["computing"] += busy
        totals["network"] += either - busy
        totals["waiting"] += until_seconds - either
    return {name: seconds / trace.workers for name, seconds in totals.items()}


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the same stretches of time, in order, with none in another."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _length(spans: Sequence[tuple[float, float]], until: float) -> float:
    return math.fsum(max(0.0, min(end, until) - begin) for begin, end in spans)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
