"""Two runs never share a folder, whatever writes them: one law for all commands and for scripts."""

from __future__ import annotations

import fcntl
import json
import os

import pytest
import torch
from torch import nn

import paceline
from paceline.cli.main import USER_ERROR, main
from paceline.ray.training import train_on_ray
from paceline.recipes import Recipe
from paceline.traces.run_folder import take_folder
from tests.cli.test_full_disk import COMMANDS

RACE = COMMANDS["race"]
ALL = COMMANDS | {"train": ("train",), "ranks": ("train", "--strategy", "hpsgd"), "serve": ("serve",)}
MARKS = (
    "trace.jsonl",
    "results.json",
    "checkpoint-00000050/state.json",
    "rank-0/launch",
    "rank-1/checkpoint-00000050/x",
)
LAUNCH = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def put(folder, mark):
    path = folder / mark
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("somebody's")


def files_in(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("command", ALL)
def test_a_folder_that_holds_a_run_or_results_is_refused_before_anything_is_computed(command, mark, tmp_path, capsys):
    put(tmp_path / "mine", mark)
    before = files_in(tmp_path)
    assert main([*ALL[command], "--out", str(tmp_path / "mine")]) == USER_ERROR
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    what = "results" if mark == "results.json" else "a run"
    assert f"{tmp_path / 'mine'} holds {what} ({mark.removesuffix('/state.json').removesuffix('/x')})" in told
    assert "give another folder" in told
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("mark", ["trace.jsonl", "results.json"])
def test_so_is_it_by_the_ranks_of_a_launch(mark, tmp_path, capsys, monkeypatch):
    for name, value in (LAUNCH | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    put(tmp_path, mark)
    assert main([*ALL["ranks"], "--out", str(tmp_path)]) == USER_ERROR
    assert f"{tmp_path} holds" in capsys.readouterr().err


@pytest.mark.parametrize("mark", MARKS)
def test_so_is_it_by_scripts(mark, tmp_path):
    put(tmp_path, mark)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="holds"):
        paceline.serve(model, optimizer, workers=1, listen="127.0.0.1:0", out=tmp_path)
    with pytest.raises(ValueError, match="holds"):
        paceline.train(Recipe(), out=tmp_path)
    assert list(files_in(tmp_path).values()) == [b"somebody's"]


@pytest.mark.parametrize(
    ("asked", "because"),
    [({"out": ""}, "out is empty"), ({"out": "", "resume": True}, "out is empty"), ({"resume": ""}, "True or False")],
)
@pytest.mark.parametrize("function", ["train", "serve", "ray", "watch"])
def test_a_script_whose_folder_has_no_name_is_refused(function, asked, because, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = {
        "train": lambda: paceline.train(Recipe(), **asked),
        "serve": lambda: paceline.serve(model, optimizer, workers=1, listen="127.0.0.1:0", **asked),
        "ray": lambda: train_on_ray(Recipe(), **asked),
        "watch": lambda: paceline.watch(model, out=""),
    }
    with pytest.raises(ValueError, match="out is empty" if function == "watch" else because):
        calls[function]()
    assert list(tmp_path.iterdir()) == []


def test_without_a_name_the_next_free_folder_is_taken_and_with_one_the_second_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [main([*RACE, "--json"]) for _ in range(3)] == [0, 0, 0]
    assert sorted(os.listdir("runs")) == ["race", "race-2", "race-3"]
    assert main([*RACE, "--out", "mine"]) == 0
    before = files_in(tmp_path / "mine")
    assert main([*RACE, "--out", "mine", "--rounds", "4"]) == USER_ERROR
    assert files_in(tmp_path / "mine") == before
    assert len(json.loads(before[next(path for path in before if path.name == "results.json")])["results"]) > 1


def test_a_folder_that_another_process_has_taken_is_refused_though_nothing_is_in_it(tmp_path, capsys):
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert main([*RACE, "--out", str(tmp_path)]) == USER_ERROR
    assert f"another process writes to {tmp_path}; give another folder" in capsys.readouterr().err
    os.close(other)
    assert take_folder(tmp_path) == take_folder(tmp_path)  # a process may ask for its own again


def test_results_whose_folder_was_deleted_meanwhile_are_written_all_the_same(tmp_path, monkeypatch):
    from paceline.cli import simulate

    shown = simulate.show_results

    def deleted_first(recipe, results, out, *rest, **more):
        out.rmdir()
        shown(recipe, results, out, *rest, **more)

    monkeypatch.setattr(simulate, "show_results", deleted_first)
    assert main([*RACE, "--out", str(tmp_path / "mine")]) == 0
    assert sorted(os.listdir(tmp_path / "mine")) == ["report.html", "results.json", "traces.json.gz"]
