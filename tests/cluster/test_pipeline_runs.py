"""`paceline train` with stages: a model that one device cannot hold, through a death, to the losses of one process."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch

import paceline
from paceline.cli.main import main
from paceline.drivers.ranks.checkpoints import RankCheckpoints
from paceline.optim import make_optimizer
from paceline.recipes.assembly import load_data, make_training
from paceline.runs.ranks import read_recipe_of
from paceline.training import Batches, measure
from paceline.training.replica import local_gradient
from tests.cluster.test_ranks import NAMED_WITHIN_SECONDS, ended, ranks_of, said, started, wait_for_checkpoints

RECIPE = """
rounds = 40
evaluate_every = 15
[data]
name = "synthetic"
samples = 600
channels = 1
size = 8
[strategy]
name = "full"
[delay]
name = "shifted-exponential"
shift_seconds = 0.05
mean_seconds = 0.0
inject = true
[pipeline]
stages = 2
memory_mb = 0.28
[optimizer]
warmup = 0.25
schedule = "poly"
[server]
checkpoint_every = 10
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "pipeline.toml"
    path.write_text(RECIPE)
    return path


def in_one_process(recipe):
    """What is measured, and the weights, of a plain loop over the batches of the recipe's only worker."""
    training = make_training(recipe, load_data(recipe))
    optimizer, schedule = make_optimizer(training.optimizer, training.module.parameters(), total_steps=recipe.rounds)
    batches = Batches(training)
    for draw in range(recipe.rounds):
        local_gradient(training.module, batches, worker=0, draw=draw)
        optimizer.step()
        schedule.step()
    return measure(training.module, training), training.module.state_dict()


def test_a_rank_that_dies_is_named_and_the_run_goes_on_to_what_one_process_comes_to(recipe, tmp_path):
    folder = tmp_path / "run"
    run = started("paceline", "train", recipe, "--out", folder, tmp_path=tmp_path)
    try:
        wait_for_checkpoints(run, folder, tmp_path)
        os.kill(ranks_of(run)[1], signal.SIGKILL)
        assert ended(run, tmp_path, within=NAMED_WITHIN_SECONDS) == 1
    finally:
        run.kill()
    assert "pipeline: mlp: 6 layers on 2 devices, 4 micro-batches of 8 samples, 1f1b" in said(tmp_path)
    assert "stage 1 (rank 1) is gone" in said(tmp_path)  # what rank 0 found out by itself
    assert f"paceline train --resume {folder}" in said(tmp_path)
    plan = (folder / "plan.json").read_bytes()

    again = started("paceline", "train", "--resume", folder, tmp_path=tmp_path)
    assert ended(again, tmp_path) == 0, said(tmp_path)
    assert (folder / "plan.json").read_bytes() == plan
    (result,) = json.loads((folder / "results.json").read_text())["results"]
    assert (result["strategy"], result["rounds"], result["used"]) == ("full", 40, 40)
    measured, weights = in_one_process(read_recipe_of(folder))
    assert result["loss"] == pytest.approx(measured.loss, rel=1e-4)
    assert result["test_loss"] == pytest.approx(measured.test_loss, rel=1e-4)
    assert result["accuracy"] == pytest.approx(measured.accuracy, abs=0.02)
    held = [RankCheckpoints(folder, rank).read(40)["model"] for rank in range(2)]
    assert not held[0].keys() & held[1].keys()
    for name, weight in weights.items():
        torch.testing.assert_close({**held[0], **held[1]}[name], weight, rtol=1e-4, atol=1e-5)
    assert [round_ for round_, *_ in RankCheckpoints(folder, 0).read(40)["story"]["evaluations"]] == [0, 15, 30]
    with pytest.raises(ValueError, match="is a run of a pipeline; runs with a server"):
        paceline.replay(folder)


def test_a_model_that_one_device_cannot_hold_is_refused_in_one_line(recipe, tmp_path, capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "PACELINE_STORE": str(tmp_path / "store")}.items():
        monkeypatch.setenv(name, value)
    out = ["--out", str(tmp_path / "run")]
    assert main(["train", str(recipe), *out]) == 2
    assert "a pipeline of 2 stages needs 2 ranks, or a multiple of it (ranks=1)" in capsys.readouterr().err
    assert main(["train", str(recipe), *out, "--stages", "1"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "280.0 kB" in line
