"""A checkpoint whose seals fit and whose state is none is refused by name, in one line, before anything is loaded."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch

from paceline.drivers.served.run import open_run
from paceline.errors import PacelineError
from paceline.recipes import Recipe
from paceline.runs.cluster import make_served
from paceline.traces.checkpoints import Checkpoint, read_newest, write_checkpoint
from paceline.traces.journal import TRACE
from paceline.traces.journal_files import read_journal

GOLDEN = Path(__file__).parents[2] / "golden" / "served-stopped"


@pytest.fixture(scope="module")
def whole():
    checkpoint, _ = read_newest(GOLDEN)
    return checkpoint


@pytest.fixture(scope="module")
def recipe():
    return Recipe.from_document(read_journal(GOLDEN / TRACE).began.recipe)


def resumed(folder: Path, recipe: Recipe, checkpoint: Checkpoint):
    """Seal a checkpoint into a folder and resume from it."""
    shutil.copy(GOLDEN / TRACE, folder / TRACE)
    write_checkpoint(folder, checkpoint)
    return open_run(make_served(recipe, folder), resume=True)


def test_what_was_written_is_resumed(tmp_path, recipe, whole):
    run = resumed(tmp_path, recipe, whole)
    assert run.coordinator.train_state.version == whole.version
    assert torch.equal(run.coordinator.train_state.model.parameters, whole.tensors["parameters"])


def put(*path, to):
    """Return a change of one entry of a state, found by its path."""

    def change(state, tensors):
        for part in path[:-1]:
            state = state[part]
        state[path[-1]] = to

    return change


def drop(*path):
    def change(state, tensors):
        for part in path[:-1]:
            state = state[part]
        del state[path[-1]]

    return change


def tensor(name, changed):
    def change(state, tensors):
        tensors[name] = changed(tensors[name])

    return change


def with_nan(found):
    return torch.cat([found.reshape(-1)[1:], torch.tensor([float("nan")])]).view_as(found)


BUFFER = next(name for name in read_newest(GOLDEN)[0].tensors if name.startswith("optimizer."))
SENSELESS = {
    "parameters has numbers that are not finite": tensor("parameters", with_nan),
    "parameters must be float32 of shape (4,354,), not float64": tensor("parameters", torch.Tensor.double),
    "parameters must be float32 of shape (4,354,), not float32 of shape (4,353,)": tensor(
        "parameters", lambda found: found[1:].clone()
    ),
    "velocity must be of shape": tensor(BUFFER, lambda found: torch.zeros(7)),
    "velocity has numbers that are NaN": tensor(BUFFER, with_nan),
    "previous_fresh must be float32": tensor("combiner.previous_fresh", torch.Tensor.half),
    "held has numbers that are not finite": tensor("outgoing.held", with_nan),
    "its parts are not of the same step": put("trainee", "version", to=31),
    "strategy: version must be a whole number": put("strategy", "version", to=-1),
    "field 'late_scales' is missing": drop("strategy", "late_scales"),
    "late_scales must be empty": put("strategy", "late_scales", to=[[0, 1.0]]),
    "previous_fresh must be a list": put("strategy", "previous_fresh", to={"0": 1}),
    "opened_seconds must be a number": put("strategy", "opened_seconds", to="soon"),
    "strategy must be an object": put("strategy", to=[1, 2]),
    "[1] must be a whole number between 0 and": put("roster", "next_draws", to=[[0, -5]]),
    "it has no 'next_draws'": put("roster", to={}),
    "it has no 'roster'": drop("roster"),
    "it has no 'trainee'": drop("trainee"),
    "it has no 'seconds'": drop("seconds"),
    "must be a number between 0 and": put("seconds", to=10**400),
    "must be a number between 0": put("seconds", to="9.5"),
    "lr must be a number": put("trainee", "optimizer", "param_groups", 0, "lr", to="fast"),
    "lr must be 0 or more": put("trainee", "optimizer", "param_groups", 0, "lr", to=-1.0),
    "momentum must be a number": put("trainee", "optimizer", "param_groups", 0, "momentum", to=10**400),
    "has no 'weight_decay'": drop("trainee", "optimizer", "param_groups", 0, "weight_decay"),
    "is of other parameters": put("trainee", "optimizer", "param_groups", 0, "params", to=[0, 0]),
    "param_groups must be a list of 1": put("trainee", "optimizer", "param_groups", to=[]),
    "last_epoch must be a whole number": put("trainee", "schedule", "last_epoch", to=-(10**15)),
    "must be an object": put("trainee", "schedule", to=7),
    "it has no": put("trainee", "optimizer", "state", to={"=tensor": "nowhere"}),
    "it has no 'parameters'": put("trainee", "combiner", to=[{"=tensor": "parameters"}, {"=tensor": "parameters"}]),
    "it has no 'optimizer'": drop("trainee", "optimizer"),
}


@pytest.mark.parametrize("why", SENSELESS)
def test_a_sealed_state_that_is_none_is_refused_by_name(why, tmp_path, recipe, whole):
    state, tensors = copy.deepcopy(whole.state), dict(whole.tensors)
    SENSELESS[why](state, tensors)
    with pytest.raises(PacelineError) as refused:
        resumed(tmp_path, recipe, Checkpoint(version=whole.version, tensors=tensors, state=state))
    said = str(refused.value)
    assert said.startswith(f"checkpoint {whole.version} of {tmp_path} is refused: ")
    assert why.replace("4,354", str(whole.tensors["parameters"].numel())).split(" of shape (")[0] in said
    assert "\n" not in said


def test_a_checkpoint_many_times_the_model_is_not_read(tmp_path, recipe, whole):
    tensors = {**whole.tensors, "more": torch.zeros(2**26 // 4 + 10**6)}
    with pytest.raises(PacelineError, match=r"tensors.safetensors has .* bytes; at most"):
        resumed(tmp_path, recipe, Checkpoint(version=whole.version, tensors=tensors, state=whole.state))
