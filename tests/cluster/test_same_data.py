"""Processes that each load data by name train on nothing if what they loaded is not the same."""

from __future__ import annotations

import functools
import json
import os

import pytest

from paceline.data.sketch import sketch_of
from paceline.drivers.served.messages import encode
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data
from paceline.runs.cluster import WorkerOptions, work_for
from tests import warm
from tests.cluster.harness import PACELINE
from tests.cluster.peers import FakeServer, welcome
from tests.launches import free_port, place, run_all

SPLIT = """
import os
import numpy as np

def load():  # another split in each process: this generator is seeded by nobody
    x, y = np.random.default_rng(0).normal(size=(200, 8)).astype("float32"), np.arange(200) % 4
    order = np.random.default_rng({seed}).permutation(200)
    return (x[order[:150]], y[order[:150]]), (x[order[150:]], y[order[150:]])
"""
SMALL = ["--data", "split_of_ours:load", "--workers", "2", "--batch-size", "8", "--rounds", "30", "--data.split", "iid"]


@pytest.fixture
def split(tmp_path):
    def write(seed):
        (tmp_path / "split_of_ours.py").write_text(SPLIT.format(seed=seed))
        return tmp_path

    return write


def settings_in(folder, **environment):
    return {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(folder), **environment}}


def test_a_worker_meets_a_server_that_has_other_data():
    recipe = Recipe()
    theirs = json.loads(json.dumps(sketch_of(load_data(recipe))))
    theirs["test"]["targets"].reverse()
    with (
        FakeServer(encode(welcome(recipe=recipe.to_document(), data=theirs))) as server,
        pytest.raises(ValueError, match=r"data set 'digits' has other targets in .* test samples that were compared"),
    ):
        work_for(server.address, WorkerOptions())


@pytest.mark.parametrize(
    "how",
    [
        ["--strategy", "hpsgd"],
        ["--strategy", "full", "--on", "ranks"],
        ["--strategy", "full", "--pipeline.stages", "2"],
    ],
)
def test_ranks_of_a_launch_with_another_split_train_on_nothing(how, split):
    folder, port = split("int(os.environ['RANK'])"), free_port()
    workers = [] if how[-2] != "--pipeline.stages" else ["--workers", "1"]
    command = [*PACELINE, "train", *SMALL, *workers, *how, "--out", "run"]
    logs = [folder / f"rank-{rank}.txt" for rank in range(2)]

    def start(rank):
        with logs[rank].open("wb") as log:
            return warm.Popen(command, stdout=log, stderr=log, **settings_in(folder, **place(rank, 2, port)))

    ranks = run_all([functools.partial(start, rank) for rank in range(2)], seconds=120)
    for rank, log in zip(ranks, logs, strict=True):
        said = log.read_text()
        assert rank.returncode == 2, said
        assert "other targets in" in said
        assert "on rank 1, and" in said
        assert "on rank 0: every process must load the same" in said


def test_a_split_that_numpy_draws_is_one_for_all(split, monkeypatch):
    """As scikit-learn's train_test_split does: what it draws from numpy's own generator is seeded."""
    folder = split("0")
    text = (
        (folder / "split_of_ours.py")
        .read_text()
        .replace("np.random.default_rng(0).permutation", "np.random.permutation")
    )
    (folder / "split_of_ours.py").write_text(text)
    monkeypatch.chdir(folder)
    recipe = Recipe().with_settings(data={"name": "split_of_ours:load"})
    assert sketch_of(load_data(recipe)) == sketch_of(load_data(recipe))
    assert sketch_of(load_data(recipe)) != sketch_of(load_data(recipe.with_seed(1)))
