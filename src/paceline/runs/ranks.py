"""A recipe carried out by ranks that average, or take rounds, among themselves: one rank's side of it.

folder/recipe.json    the recipe that runs here, with every `auto` written out, and its checksum; resuming reads it
folder/rounds         the rounds in all, if the run was extended: the recipe stays that of its beginning
folder/rank-0/        a rank's checkpoints; the last one is the end of the run
folder/trace.jsonl    where ranks take rounds: the journal, which rank 0 writes as a server does

Nothing is written before all ranks have agreed that they may: the folder may hold another run.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.decoding import parse_object
from paceline.drivers.ranks.launch import STORE
from paceline.files import read_plain, write_file
from paceline.recipes.assembly import (
    averages,
    codec_text_of,
    exchanges_encoded,
    load_data,
    make_member,
    make_strategy,
    make_training,
    planned,
    recorded_recipe,
    resolved,
)
from paceline.recipes.extension import Extension, ExtensionError, check_extendable
from paceline.recipes.reading import read_recipe
from paceline.recipes.recipe import Recipe
from paceline.runs.cluster import delay_of
from paceline.runs.simulation import Result, state_of
from paceline.traces import summarise

if TYPE_CHECKING:
    from paceline.data import Dataset
    from paceline.distributed.stores import StoreGather
    from paceline.drivers.averaging.job import AveragingRun
    from paceline.drivers.ranks.launch import Place
    from paceline.drivers.rounds.job import RoundsRun
    from paceline.traces.run_status import RunStatus
    from paceline.training import Training

RECIPE = "recipe.json"
ROUNDS = "rounds"
CHECKSUM = "crc"  # its last field: the CRC-32 of all others, which finds what a disk or a copy has altered
MOST_RECIPE_BYTES = 1_000_000
MEET_SECONDS = 120.0


def train_rank(
    recipe: Recipe,
    place: Place,
    *,
    folder: Path,
    resume: bool,
    rounds: int | None = None,
    training: Training | None = None,
    on_standing: Callable[[RunStatus], None] = lambda standing: None,
) -> Result | None:
    """Run one rank of a recipe to its end; rank 0 returns the result, the others None.

    With `resume` the run in `folder` goes on. Without it the folder must hold no run, except one of this same launch,
    which has restarted its processes. `rounds` is another total than the recipe's, for a run that is extended.
    `training` is what the recipe comes to, if whoever forked this rank has made it already.
    """
    import torch

    from paceline.drivers.ranks.checkpoints import RankCheckpoints, agreed_start
    from paceline.drivers.ranks.rendezvous import joined
    from paceline.workers.threads import threads_for, torch_threads

    dataset = load_data(recipe) if training is None else training.dataset
    if not resume:  # a stored recipe is used as it is: it was resolved when its run began, or is of an older version
        recipe = resolved(recipe, dataset)
    if training is None:
        training = make_training(recipe, dataset)
    recipe = planned(recipe, training)
    training = replace(training, plan=recipe.codec.plan)
    settings: dict[str, Any] = {
        "training": training,
        "rounds": rounds or recipe.rounds,
        "folder": folder,
        "evaluate_every": recipe.evaluate_every,
        "checkpoint_every": recipe.server.checkpoint_every,
        "silence_seconds": recipe.server.silence_seconds,
        "timeout_seconds": recipe.server.stall_seconds,
        "delay_seconds": delay_of(recipe),
        "recipe": recipe.to_document(),
        "describe": lambda: write_recipe(recipe, folder, rounds=rounds),
    }
    defaults = Recipe().to_document()  # for settings that did not exist yet when a run began
    if exchanges_encoded(recipe):
        defaults["codec"]["plan"] = "gather"
    size = sum(parameter.numel() for parameter in training.module.parameters())
    threads = torch.get_num_threads()
    if recipe.strategy.rounds_on_ranks and STORE in os.environ:  # ranks that were started here share its cores
        threads = max(1, threads // place.world)
    with (
        joined(place, timeout_seconds=max(MEET_SECONDS, recipe.server.stall_seconds)) as ranks,
        torch_threads(threads),
        threads_for(size),
    ):
        agree_on_data(training.dataset, ranks)
        state = agreed_start(
            RankCheckpoints(folder, place.rank), ranks, resume=resume, recipe=settings["recipe"], defaults=defaults
        )
        if rounds or (state is None and not resume):
            write_recipe(recipe, folder, rounds=rounds)
        run = _make_run(recipe, settings, ranks, on_standing)
        trace = run.run(state)
        parameters = run.parameters
        trained = state_of(run.module)
    if trace is None:
        return None
    return Result(summary=summarise(trace), trace=trace, parameters=parameters, state_dict=trained)


def agree_on_data(dataset: Dataset, ranks: StoreGather) -> None:
    """Raise DatasetError on all ranks where one has loaded other data than rank 0. All ranks must call it."""
    from paceline.data.reading import DatasetError
    from paceline.data.sketch import data_difference, refusal, sketch_of

    first, *others = ranks.gather("say which data it has", sketch_of(dataset))
    for rank, theirs in enumerate(others, start=1):
        if different := data_difference(theirs, first, here=f"on rank {rank}", there="on rank 0"):
            raise DatasetError(refusal(dataset.name, different))


def _make_run(
    recipe: Recipe, settings: Mapping[str, Any], ranks: StoreGather, on_standing: Callable[[RunStatus], None]
) -> AveragingRun | RoundsRun:
    if recipe.strategy.rounds_on_ranks:
        from paceline.drivers.rounds.job import RoundsJob, RoundsRun

        strategy, label, codec = make_strategy(recipe), recipe.strategy.label, codec_text_of(recipe)
        return RoundsRun(
            RoundsJob(strategy=strategy, label=label, codec=codec, **settings), ranks, on_standing=on_standing
        )
    from paceline.drivers.averaging.job import AveragingJob, AveragingRun

    return AveragingRun(AveragingJob(member=make_member(recipe), **settings), ranks, on_standing=on_standing)


def write_recipe(recipe: Recipe, folder: Path, *, rounds: int | None = None) -> None:
    """Write the recipe that runs in a folder, and the rounds in all if they are others.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_recipe(Recipe(rounds=7), Path(folder))
    ...     read_recipe_of(Path(folder)).rounds
    7
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = recipe.to_document()
    write_file(folder / RECIPE, json.dumps(document | {CHECKSUM: _checksum(document)}, indent=2) + "\n")
    if rounds is not None:
        write_file(folder / ROUNDS, f"{rounds} {zlib.crc32(str(rounds).encode()):08x}\n")


def rounds_in(folder: Path) -> int | None:
    """Return the rounds in all of a run that was extended; None if they are its recipe's.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_recipe(Recipe(), Path(folder), rounds=640)
    ...     rounds_in(Path(folder))
    640
    """
    try:
        text = read_plain(folder / ROUNDS, most_bytes=100).decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        return None
    number, _, checksum = text.partition(" ")
    if checksum != f"{zlib.crc32(number.encode()):08x}":
        raise ValueError(f"{folder / ROUNDS} was altered: its checksum does not fit")
    return read_recipe(None, {"rounds": number}).rounds


def rounds_to_train(folder: Path, recipe: Recipe, extension: Extension | None) -> int | None:
    """Return the rounds in all of a run to resume, if they are others than its recipe's."""
    now = rounds_in(folder)
    if extension is None:
        return now
    refuse_restated(f"{section}.{name}" for section, changes in extension.changes.items() for name in changes)
    if extension.rounds == (now or recipe.rounds):
        return now
    check_extendable(recipe)
    done = max((int(path.name.rpartition("-")[2]) for path in folder.glob("rank-*/checkpoint-[0-9]*")), default=0)
    if extension.rounds < done:
        raise ExtensionError(f"rounds must be at least {done}, which are done (rounds={extension.rounds})")
    return extension.rounds


def refuse_restated(names: Iterable[str]) -> None:
    """Raise ExtensionError if any setting is given again for a run of ranks."""
    for name in names:
        raise ExtensionError(f"ranks keep their schedule and pruning: leave --{name.replace('_', '-')} out")


def by_ranks(recipe: Recipe) -> bool:
    """Tell whether a recipe is carried out by ranks, without a server.

    >>> [by_ranks(Recipe().with_strategy(name)) for name in ("lgc", "lgc@ranks", "hpsgd")]
    [False, True, True]
    """
    return averages(recipe) or recipe.pipeline.on or recipe.strategy.rounds_on_ranks


def _checksum(document: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(document).encode()):08x}"


def read_recipe_of(folder: Path) -> Recipe:
    """Read the recipe that runs in a folder; ValueError if that cannot be read."""
    path = folder / RECIPE
    try:
        document = parse_object(read_plain(path, most_bytes=MOST_RECIPE_BYTES))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no recipe: {error}") from error
    checksum = document.pop(CHECKSUM, None)  # a run of before there were checksums has none
    if checksum is not None and checksum != _checksum(document):
        raise ValueError(f"{path} is not as it was written: its checksum does not fit")
    return recorded_recipe(document)
