"""A disk that takes nothing: what was found is printed, the error is told in one line, and the exit code is not 0."""

from __future__ import annotations

import errno
import json
import os
import resource
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import paceline
from paceline.cli.main import OTHER_ERROR, main
from paceline.drivers.served.run import RunOutcome
from paceline.recipes import Recipe
from paceline.runs import cluster, training

MODEL = ("--model.name", "mlp", "--data.name", "synthetic")
COMMANDS = {
    "race": ("race", "--timing-only", "--rounds", "3", "--workers", "3", "--k", "2"),
    "simulate": ("simulate", "--timing-only", "--rounds", "3", "--workers", "3", "--k", "2"),
    "inspect": ("inspect", "rates", *MODEL, "--steps", "1"),
    "plan": ("plan", "pipeline", *MODEL, "--stages", "2", "--repeats", "3"),
    "bench": ("bench", "codecs", "--codecs", "identity", "--size", "1000", "--repeats", "1"),
}


@contextmanager
def files_of_at_most(size):
    """No file of this process grows beyond so many bytes: as on a full disk, a write ends with an OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("command", COMMANDS)
def test_results_that_no_disk_takes_are_printed_and_the_command_fails(command, tmp_path, capsys):
    with files_of_at_most(100):
        code = main([*COMMANDS[command], "--out", str(tmp_path / "out"), "--json"])
    printed, told = capsys.readouterr()
    assert code == OTHER_ERROR, told
    assert json.loads(printed)
    assert f"paceline: error: cannot write to {tmp_path / 'out'}: {os.strerror(errno.EFBIG)}" in told


@pytest.mark.parametrize("size", [100, 10_000], ids=["not even the journal's first line", "no checkpoint"])
def test_a_disk_that_cannot_take_checkpoint_0_is_refused_before_anybody_computes(size, tmp_path):
    def opened(port):
        raise AssertionError("workers could come, though nothing can be kept")

    model = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        files_of_at_most(size),
        pytest.raises(OSError, match=r"cannot write .*File too large.*the run has not begun: make room there, or give"),
    ):
        paceline.serve(model, optimizer, workers=1, listen="127.0.0.1:0", out=tmp_path / "run", on_open=opened)
    assert os.listdir(tmp_path) == []  # free for a run that has room


def test_a_run_that_is_not_on_the_disk_fails_though_all_rounds_are_done(tmp_path, capsys, monkeypatch):
    lost = "the model after step 3 is in no checkpoint"
    recipe = Recipe().with_settings(cluster={"workers": 3}, strategy={"k": 2}, rounds=3)
    result = paceline.simulate(recipe, timing_only=True)

    def train(recipe, *, out, **_):
        outcome = RunOutcome(reason="all rounds are done", finished=True, diverged=False, errors=(lost,), lost=(lost,))
        return cluster.Trained(outcome=outcome, result=result, folder=out)

    monkeypatch.setattr(training, "train_recipe", train)
    assert main(["train", "--out", str(tmp_path / "run"), "--json"]) == OTHER_ERROR
    printed, told = capsys.readouterr()
    assert json.loads(printed)
    assert f"error: {lost}" in told
    assert f"not all of the run is in {tmp_path / 'run'}" in told
