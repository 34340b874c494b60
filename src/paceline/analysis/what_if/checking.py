"""A remedy run for real on this machine, to hold its prediction against.

The recorded times are injected: a file of delays, a column for each worker, in which every draw takes at least as long
as it took in the record. So a check shows whether the simulator plays the remedy as real processes do; what a faster
link would do cannot be had here without shaping this machine's network, and is not checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.analysis.what_if.answer import Answer, PredictedRemedy
from paceline.analysis.what_if.measured_run import MeasuredRun, WhatIfError, measured_run
from paceline.recipes.recipe import Recipe
from paceline.runs.cluster import WorkerOptions, recipe_of_run
from paceline.runs.training import train_recipe
from paceline.traces.history import write_recorded
from paceline.traces.recorded_run import read_run

DELAYS = "delays.csv"
MOST_NUMBERS = 1_000_000  # in a file of delays
DISTURBED = 0.03  # of the time of batches
TIMES_OVER = 3  # a worker that is no longer held up draws more often than in the record


def why_not(answer: Answer, prediction: PredictedRemedy) -> str:
    """Return why a remedy cannot be run for real here; empty if it can."""
    if answer.run.recipe is None:
        return "the run was a script's, and no recipe says how to start it"
    if prediction.remedy.settings is None:
        return "links are not shaped here"
    return ""


def check(
    answer: Answer,
    prediction: PredictedRemedy,
    folder: Path,
    options: WorkerOptions | None = None,
    *,
    on_round: Callable[[int, int], None] = lambda done, rounds: None,
) -> PredictedRemedy:
    """Run a remedy for real in a new folder; return its prediction with the seconds that it took."""
    reason = why_not(answer, prediction)
    if reason:
        return dataclasses.replace(prediction, check_note=reason)
    run = prediction.remedy.run
    recipe = _recipe(answer, prediction, options or WorkerOptions())
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / DELAYS
    write_recorded(file, delay_rows(run))
    recipe = recipe.with_settings(delay={"name": "recorded", "file": str(file.resolve()), "inject": True})
    trained = train_recipe(
        recipe, out=folder / "run", on_standing=lambda standing: on_round(standing.round, run.rounds)
    )
    if not trained.outcome.finished:
        raise KeyboardInterrupt
    measured = measured_run(read_run(folder / "run"))
    return dataclasses.replace(prediction, measured_seconds=measured.seconds, check_note=_disturbance(run, measured))


def _disturbance(run: MeasuredRun, checked: MeasuredRun) -> str:
    """Return that the machine had other work during a check, if batches took much longer than they were to take.

    Injected delays are the least that a batch takes, so what is beyond them is a core that was not free.
    """
    pairs = [
        (draw.seconds, wanted[number % len(wanted)].seconds)
        for wanted, column in zip(run.draws, checked.draws, strict=False)
        for number, draw in enumerate(column)
        if draw.mark == "measured"
    ]
    beyond = sum(max(0.0, took - wanted) for took, wanted in pairs) / max(1e-9, sum(wanted for _, wanted in pairs))
    return f"other work on this machine: batches took {beyond:.0%} longer than recorded" if beyond > DISTURBED else ""


def delay_rows(run: MeasuredRun) -> list[list[float]]:
    """Return the draws of a run as a file of delays has them: each worker's own, again from the top when they end."""
    rows = min(TIMES_OVER * max(map(len, run.draws)), max(1, MOST_NUMBERS // run.workers))
    return [[column[row % len(column)].seconds for column in run.draws] for row in range(rows)]


def _recipe(answer: Answer, prediction: PredictedRemedy, options: WorkerOptions) -> Recipe:
    document = answer.run.recipe
    if document is None:
        raise WhatIfError(f"{answer.folder} was a script's: no recipe says how to start it")
    if options.delay_file == "":
        options = dataclasses.replace(options, delay_file="not read")  # the check has a file of its own
    recipe = recipe_of_run(answer.folder, document, options)
    run = prediction.remedy.run
    settings: dict[str, Any] = {name: dict(values) for name, values in (prediction.remedy.settings or {}).items()}
    settings["cluster"] = {**settings.get("cluster", {}), "workers": run.workers, "late_blocks": None}
    settings["worker"] = {**settings.get("worker", {}), "shares": "equal"}  # recorded delays are of the sizes they were
    if "strategy" in settings and "name" in settings["strategy"]:
        settings["strategy"] = {"on": "server", "period": "auto", **settings["strategy"]}
    return recipe.with_settings(rounds=run.rounds, target_loss=None, **settings)
