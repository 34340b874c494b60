"""A recorded run of a recipe, replayed and held against what was recorded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.recipes.assembly import (
    Given,
    load_data,
    make_member,
    make_strategy,
    make_training,
    recorded_recipe,
)
from paceline.recipes.extension import Extension
from paceline.recipes.recipe import Recipe
from paceline.runs.cluster import WorkerOptions, recipe_of_run
from paceline.runs.ranks import RECIPE, rounds_in

if TYPE_CHECKING:
    from paceline.drivers.replayed import RoundsReplay, Verdict
    from paceline.traces.checkpoints import Checkpoint
    from paceline.traces.journal import JournalRecord
    from paceline.training import Batches, Training

OnEnd = Callable[["Batches", "Training", torch.nn.Module], None]
NEARLY = 1e-4  # of the weights' length: training makes roundings grow, but not beyond this
NEARLY_16_BITS = 1e-2  # where every hop of a ring rounds to 16 bits


def replay(
    folder: str | Path,
    options: WorkerOptions | None = None,
    *,
    data: Any = None,
    model: Any = None,
    loss: Any = None,
    on_step: Callable[[int, int], None] = lambda step, steps: None,
    on_end: OnEnd = lambda batches, training, module: None,
) -> Verdict:
    """Recompute a run from its trace, and say whether it came out the same to the last bit, and what was compared.

    Every step of the trace is compared, and the weights of the newest checkpoint where the replay passes its step. A
    run that was killed, or whose trace or last checkpoint is not whole, is not identical: the verdict says what is
    missing. Where records are missing in the trace, the replay ends.

    `options` brings what no folder may name: code of your own, and where the data lies; `data`, `model` and `loss` are
    the objects that the run was given, if it was. `on_step` is called with
    the steps, or averages, that are done and the number of all; `on_end` with the batches that the workers drew from,
    and the model, as they are at the end.
    """
    given = Given(data=data, model=model, loss=loss)
    names: dict[str, Any] = {"data": data, "model": model, "loss": loss}
    names = {name: value for name, value in names.items() if isinstance(value, str)}
    given, options = given.objects(), options or WorkerOptions()
    folder, options = Path(folder), replace(options, given=given if given else options.given, **names)
    given = options.given
    from paceline.drivers.replayed import Replay, RoundsReplay
    from paceline.traces.checkpoints import read_newest
    from paceline.traces.holes import before_the_first_hole
    from paceline.traces.journal import TRACE, StepRecord
    from paceline.traces.journal_files import read_journal

    if (folder / RECIPE).is_file() and not (folder / TRACE).is_file():
        return _replay_averaging(folder, options, on_step, on_end)
    journal = read_journal(folder / TRACE)
    recipe = _recipe(folder, journal.began.recipe, options)
    dataset = load_data(recipe, given)
    training, strategy = make_training(recipe, dataset, given), make_strategy(recipe)
    on_ranks = journal.began.on == "ranks"
    checkpoint, refused = _newest_of_ranks(folder, training) if on_ranks else read_newest(folder)
    records, hole = before_the_first_hole(journal.records)
    steps = sum(isinstance(record, StepRecord) for record in records)
    replayed = (RoundsReplay if on_ranks else Replay)(
        records,
        training,
        strategy,
        snapshot_version=None if checkpoint is None else checkpoint.version,
        extend=lambda record: make_training(
            Extension(rounds=record.rounds, changes=record.changes).of(recipe), dataset, given
        ),
    )
    for taken in replayed:
        on_step(taken, steps)
    on_end(replayed.batches, training, replayed.train_state.model.module)
    if replayed.verdict.difference is not None:
        return replayed.verdict
    missing = hole or _missing(journal.records[-1], replayed.train_state.version, checkpoint, refused)
    if checkpoint is None or replayed.snapshot is None:
        return replace(replayed.verdict, missing=missing)
    if isinstance(replayed, RoundsReplay) and replayed.inexact_since is not None:
        return replace(_nearly(replayed, checkpoint), checkpoint=checkpoint.version, missing=missing)
    for name, found in replayed.snapshot.items():
        stored = checkpoint.tensors.get(name)
        if stored is None or stored.dtype != found.dtype or not torch.equal(stored, found):
            difference = f"the {name} after step {checkpoint.version} are not those of its checkpoint"
            return replace(replayed.verdict, difference=difference)
    return replace(replayed.verdict, checkpoint=checkpoint.version, missing=missing)


def _newest_of_ranks(folder: Path, training: Training) -> tuple[Checkpoint | None, list[str]]:
    """Return rank 0's newest checkpoint that can be read, in the form of a server's: all ranks hold the same model."""
    from paceline.drivers.ranks.checkpoints import RankCheckpoints
    from paceline.traces.checkpoints import Checkpoint
    from paceline.training.saved_state import check_model, refusing
    from paceline.workers.flat import FlatModel

    checkpoints = RankCheckpoints(folder, rank=0)
    held = checkpoints.held()
    if not held:
        return None, []
    module = copy.deepcopy(training.module)
    with refusing(f"the checkpoint of round {held[0]} in {checkpoints.folder}"):
        state = checkpoints.read(held[0])
        check_model("model", state["model"], module.state_dict())
        module.load_state_dict(state["model"])
    model = FlatModel(module)
    return Checkpoint(version=held[0], tensors={"parameters": model.parameters, "buffers": model.buffers}, state={}), []


def _nearly(replayed: RoundsReplay, checkpoint: Checkpoint) -> Verdict:
    """Return the verdict on a run that another version of torch has added up: how far its weights are from these."""
    assert replayed.snapshot is not None
    apart = _apart(replayed.snapshot["parameters"], checkpoint.tensors["parameters"])
    difference = f"the weights after step {checkpoint.version} differ by {apart:.1e} of their length"
    why = f"recorded with torch {replayed.other_torch}, and this is {torch.__version__}"
    nearly = f"{difference} ({why})" if apart <= NEARLY else ""
    return replace(replayed.verdict, difference=f"{difference} ({why})", nearly=nearly)


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))


def _missing(last: JournalRecord, version: int, checkpoint: Checkpoint | None, refused: Sequence[str]) -> str:
    """Return what a folder lacks of a whole run whose trace comes to step `version` and ends with the record `last`."""
    from paceline.traces.journal import RunEnded

    why = f" ({refused[0]})" if refused else ""
    if checkpoint is None:
        return f"there is no whole checkpoint to compare with{why}"
    if checkpoint.version > version:
        return f"the trace ends after step {version}; checkpoint {checkpoint.version} was not compared"
    if not isinstance(last, RunEnded):
        ending = "the run was killed or goes on, or the trace was cut"
        return f"the trace ends after step {version} without the run's end: {ending}"
    if checkpoint.version < version and not last.diverged:
        return f"there is no whole checkpoint of the last step, {version}{why}"
    return ""


def _replay_averaging(
    folder: Path, options: WorkerOptions, on_average: Callable[[int, int], None], on_end: OnEnd
) -> Verdict:
    """Replay a run of ranks that averaged: their windows, in one process, up to the newest checkpoint."""
    from paceline.drivers.averaging.job import windows_from
    from paceline.drivers.ranks.checkpoints import RankCheckpoints
    from paceline.drivers.replayed import Verdict
    from paceline.drivers.replayed.averaged_run import replay_averages
    from paceline.exchanges.plans import ALL_REDUCE

    checkpoints = RankCheckpoints(folder, rank=0)
    held = checkpoints.held()
    if not held:
        raise ValueError(f"{folder} has no checkpoint of rank 0: there is nothing to hold a replay against")
    state = checkpoints.read(held[0])
    if Recipe.from_document(state["recipe"]).pipeline.on:
        raise ValueError(
            f"{folder} is a run of a pipeline; runs with a server and of ranks that average can be replayed"
        )
    recipe = _recipe(folder, recorded_recipe(state["recipe"]).to_document(), options)
    training = make_training(recipe, load_data(recipe, options.given), options.given)
    windows = windows_from(state["story"]["windows"])
    if len(windows) < (recorded := state["story"].get("recorded", 0)):
        raise ValueError(
            f"{folder} keeps the windows of the first {len(windows):,} of {recorded:,} averages: "
            "a run as long as this one cannot be replayed"
        )
    workers = replay_averages(windows, training, make_member(recipe), on_average=on_average)
    on_end(workers.batches, training, workers.module)
    found = workers.parameters
    expected = state["sync"]["replica"].get("shared")
    if expected is None:  # ssgd: the parameters themselves are shared
        trained = [name for name, parameter in training.module.named_parameters() if parameter.requires_grad]
        expected = torch.cat([state["model"][name].reshape(-1) for name in trained])
    steps = sum(window.brought for average in windows for window in average)
    total = rounds_in(folder) or recipe.rounds
    missing = "" if held[0] >= total else f"rank 0's newest checkpoint is of round {held[0]} of {total}"
    if torch.equal(found, expected):
        return Verdict(steps=steps, difference=None, checkpoint=held[0], missing=missing)
    apart = _apart(found, expected)
    difference = f"the final weights differ by {apart:.1e} of their length"
    in_any_order = recipe.cluster.workers <= 2 or workers.plan != ALL_REDUCE
    rounds_on_the_way = recipe.codec.name in ("bfloat16", "float16")
    why = "more than two ranks add up in an order of gloo's own"
    why += ", and 16 bits are rounded at every hop" if rounds_on_the_way else ""
    nearly = "" if in_any_order or apart > (NEARLY_16_BITS if rounds_on_the_way else NEARLY) else f"{difference}: {why}"
    return Verdict(steps=steps, difference=difference, nearly=nearly, checkpoint=held[0], missing=missing)


def _recipe(folder: Path, document: object, options: WorkerOptions) -> Recipe:
    if not isinstance(document, dict) or not document:
        raise ValueError("this run was made by a script: only runs of recipes can be replayed")
    return recipe_of_run(folder, {**document, "delay": {**document.get("delay", {}), "inject": False}}, options)
