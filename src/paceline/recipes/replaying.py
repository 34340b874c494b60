"""A recorded run of a recipe, replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.recipes.assembly import load_data, make_strategy, make_training
from paceline.recipes.cluster import Own, trusted
from paceline.recipes.recipe import Recipe

if TYPE_CHECKING:
    from paceline.drivers.replayed import Verdict


def replay(
    folder: str | Path, own: Own | None = None, *, on_step: Callable[[int, int], None] = lambda step, steps: None
) -> Verdict:
    """Recompute a run from its trace, and say whether it came out the same to the last bit.

    `own` brings what no file may name: a model that is code, and where the data lies if it has moved.
    """
    from paceline.drivers.replayed import Replay, Verdict
    from paceline.traces.checkpoints import read_newest
    from paceline.traces.journal import TRACE, Stepped
    from paceline.traces.journal_files import read_journal

    journal = read_journal(Path(folder) / TRACE)
    recipe = _recipe(journal.began.recipe, own if own is not None else Own())
    training = make_training(recipe, load_data(recipe))
    steps = sum(isinstance(record, Stepped) for record in journal.records)
    replayed = Replay(journal.records, training, make_strategy(recipe))
    for taken in replayed:
        on_step(taken, steps)
    verdict = replayed.verdict
    checkpoint, _ = read_newest(Path(folder))
    if verdict.identical and checkpoint is not None and checkpoint.version == replayed.trainee.version:
        for name, found in (
            ("parameters", replayed.trainee.model.parameters),
            ("buffers", replayed.trainee.model.buffers),
        ):
            if not torch.equal(checkpoint.tensors[name], found):
                return Verdict(steps=verdict.steps, difference=f"the final {name} are not those of the checkpoint")
    return verdict


def _recipe(document: object, own: Own) -> Recipe:
    if not isinstance(document, dict) or not document:
        raise ValueError("this run was made by a script: only runs of recipes can be replayed")
    directory = str(document.get("data", {}).get("directory", ""))
    recipe = trusted({**document, "delay": {**document.get("delay", {}), "inject": False}}, own)
    return recipe if own.data_directory else recipe.with_settings(data={"directory": directory})
