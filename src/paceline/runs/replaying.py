"""A recorded run of a recipe, replayed and held against what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.recipes.assembly import load_data, make_member, make_strategy, make_training
from paceline.recipes.recipe import Recipe
from paceline.runs.cluster import WorkerOptions, recipe_of_run
from paceline.runs.ranks import RECIPE

if TYPE_CHECKING:
    from paceline.drivers.replayed import Verdict
    from paceline.training import Batches, Training

OnEnd = Callable[["Batches", "Training", torch.nn.Module], None]
NEARLY = 1e-4  # of the weights' length: training makes roundings grow, but not beyond this


def replay(
    folder: str | Path,
    options: WorkerOptions | None = None,
    *,
    on_step: Callable[[int, int], None] = lambda step, steps: None,
    on_end: OnEnd = lambda batches, training, module: None,
) -> Verdict:
    """Recompute a run from its trace, and say whether it came out the same to the last bit.

    `options` brings what no folder may name: a model that is code, and where the data lies. `on_step` is called with
    the steps, or averages, that are done and the number of all; `on_end` with the batches that the workers drew from,
    and the model, as they are at the end.
    """
    folder, options = Path(folder), options or WorkerOptions()
    if (folder / RECIPE).is_file():
        return _replay_ranks(folder, options, on_step, on_end)
    from paceline.drivers.replayed import Replay, Verdict
    from paceline.traces.checkpoints import read_newest
    from paceline.traces.journal import TRACE, StepRecord
    from paceline.traces.journal_files import read_journal

    journal = read_journal(folder / TRACE)
    recipe = _recipe(folder, journal.began.recipe, options)
    training = make_training(recipe, load_data(recipe))
    steps = sum(isinstance(record, StepRecord) for record in journal.records)
    replayed = Replay(journal.records, training, make_strategy(recipe))
    for taken in replayed:
        on_step(taken, steps)
    on_end(replayed.batches, training, replayed.train_state.model.module)
    verdict = replayed.verdict
    checkpoint, _ = read_newest(folder)
    if verdict.identical and checkpoint is not None and checkpoint.version == replayed.train_state.version:
        for name in ("parameters", "buffers"):
            if not torch.equal(checkpoint.tensors[name], getattr(replayed.train_state.model, name)):
                return Verdict(steps=verdict.steps, difference=f"the final {name} are not those of the checkpoint")
    return verdict


def _replay_ranks(
    folder: Path, options: WorkerOptions, on_average: Callable[[int, int], None], on_end: OnEnd
) -> Verdict:
    """Replay a run of ranks that averaged: their windows, in one process, up to the newest checkpoint."""
    from paceline.drivers.averaging.job import windows_from
    from paceline.drivers.ranks.checkpoints import RankCheckpoints
    from paceline.drivers.replayed import Verdict
    from paceline.drivers.replayed.averaged_run import replay_averages

    checkpoints = RankCheckpoints(folder, rank=0)
    held = checkpoints.held()
    if not held:
        raise ValueError(f"{folder} has no checkpoint of rank 0: there is nothing to hold a replay against")
    state = checkpoints.read(held[0])
    if Recipe.from_document(state["recipe"]).pipeline.on:
        raise ValueError(
            f"{folder} is a run of a pipeline; runs with a server and of ranks that average can be replayed"
        )
    recipe = _recipe(folder, state["recipe"], options)
    training = make_training(recipe, load_data(recipe))
    windows = windows_from(state["story"]["windows"])
    workers = replay_averages(windows, training, make_member(recipe), on_average=on_average)
    on_end(workers.batches, training, workers.module)
    found = workers.parameters
    expected = state["sync"]["replica"].get("shared")
    if expected is None:  # ssgd: the parameters themselves are shared
        trained = [name for name, parameter in training.module.named_parameters() if parameter.requires_grad]
        expected = torch.cat([state["model"][name].reshape(-1) for name in trained])
    steps = sum(window.brought for average in windows for window in average)
    if torch.equal(found, expected):
        return Verdict(steps=steps, difference=None)
    apart = float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))
    difference = f"the final weights differ by {apart:.1e} of their length"
    in_any_order = recipe.cluster.workers <= 2 or recipe.codec.name != "identity"
    return Verdict(steps=steps, difference=difference, nearly="" if in_any_order or apart > NEARLY else difference)


def _recipe(folder: Path, document: object, options: WorkerOptions) -> Recipe:
    if not isinstance(document, dict) or not document:
        raise ValueError("this run was made by a script: only runs of recipes can be replayed")
    return recipe_of_run(folder, {**document, "delay": {**document.get("delay", {}), "inject": False}}, options)
