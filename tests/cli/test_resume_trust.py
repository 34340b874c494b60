"""Opening the folder of a run imports no code and reads no paths that the folder names: they are given again."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli.cluster import _command_to_resume
from paceline.recipes import Recipe
from paceline.runs.cluster import WorkerOptions, recipe_of_run
from paceline.runs.ranks import write_recipe
from paceline.traces.journal import FORMAT, TRACE, RunBegan
from paceline.traces.journal_files import JournalWriter

SERVED = Recipe().with_settings(rounds=4, cluster={"workers": 2}, strategy={"k": 1}, data={"split": "iid"})
KINDS = {
    "served": SERVED,
    "ranks": SERVED.with_strategy("hpsgd"),
    "pipeline": SERVED.with_strategy("full").with_settings(pipeline={"stages": 2}, cluster={"workers": 1}),
}


def run_folder(folder: Path, recipe: Recipe) -> Path:
    """Make the folder of a run that has only just begun."""
    if recipe.strategy.name == "hpsgd" or recipe.pipeline.on:
        write_recipe(recipe, folder)
        return folder
    with JournalWriter(folder / TRACE) as journal:
        journal.write(
            RunBegan(
                format=FORMAT,
                paceline="0.1.0",
                strategy=recipe.strategy.name,
                seed=recipe.seed,
                workers=recipe.cluster.workers,
                blocks=recipe.worker.blocks,
                recipe=recipe.to_document(),
                signature="",
                codec="identity",
            )
        )
    return folder


def commands(kind: str) -> list[list[str]]:
    return [["train", "--resume"], ["serve", "--listen", "127.0.0.1:0", "--resume"]][: 2 if kind == "served" else 1]


@pytest.fixture
def evil_module(tmp_path, monkeypatch):
    """Put a module on the path that says when it is imported; return the file in which it says so."""
    said = tmp_path / "imported"
    (tmp_path / "evil_networks.py").write_text(
        f"open({str(said)!r}, 'w').close()\ndef net(*_, **__): raise SystemExit\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_does_not_import_what_the_folder_names(kind, tmp_path, evil_module, capsys):
    folder = run_folder(tmp_path / "run", KINDS[kind].with_settings(model={"name": "evil_networks:net"}))
    for command in (*commands(kind), *([["replay"]] if kind == "served" else [])):
        assert main([*command, str(folder)]) == 2
        said = capsys.readouterr().err
        assert f"the run in {folder} trains 'evil_networks:net', which is code" in said.replace("\n", " ")
        assert "give --model evil_networks:net" in said.replace("\n", " ")
    assert not evil_module.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_does_not_read_where_the_folder_says(kind, tmp_path, capsys):
    named = tmp_path / "of somebody"
    folder = run_folder(tmp_path / "run", KINDS[kind].with_settings(data={"name": "mnist", "directory": str(named)}))
    for command in (*commands(kind), *([["replay"]] if kind == "served" else [])):
        assert main([*command, str(folder)]) == 2
        assert f"give --data-directory {shlex.quote(str(named))}" in capsys.readouterr().err.replace("\n", " ")
    slowed = {"name": "recorded", "inject": True, "file": str(named / "delays.csv")}
    folder = run_folder(tmp_path / "slowed", KINDS[kind].with_settings(delay=slowed))
    for command in commands(kind):
        assert main([*command, str(folder)]) == 2
        assert "--delay-file" in capsys.readouterr().err


def test_the_names_that_are_given_are_the_ones_used(tmp_path):
    theirs = SERVED.with_settings(
        model={"name": "evil_networks:net"},
        data={"name": "mnist", "directory": "/theirs"},
        delay={"name": "recorded", "inject": True, "file": "/theirs/delays.csv"},
    )
    ours = WorkerOptions(model="my_networks:net", data_directory="/ours", delay_file="/ours/delays.csv")
    recipe = recipe_of_run(tmp_path, theirs.to_document(), ours)
    assert (recipe.model.name, recipe.data.directory, recipe.delay.file) == (
        "my_networks:net",
        "/ours",
        "/ours/delays.csv",
    )
    assert "theirs" not in str(recipe)
    planned = KINDS["pipeline"].with_settings(pipeline={"plan": "/theirs/plan.json"})
    assert recipe_of_run(tmp_path, planned.to_document(), WorkerOptions()).pipeline.plan == str(tmp_path / "plan.json")


def test_the_command_that_goes_on_names_them_again(tmp_path):
    named = {"model": {"name": "my_networks:net"}, "data": {"name": "mnist", "directory": "/my data"}}
    assert _command_to_resume("train", Path("runs/train"), SERVED.with_settings(**named)) == (
        "paceline train --resume runs/train --model my_networks:net --data-directory '/my data'"
    )
    assert _command_to_resume("serve", Path("runs/a"), SERVED) == "paceline serve --resume runs/a"


def test_a_pipeline_says_that_it_cannot_be_replayed_before_it_asks_for_its_network(capsys):
    golden = Path(__file__).parents[1] / "golden" / "pipeline"
    assert main(["replay", str(golden)]) == 2
    assert "is a run of a pipeline" in capsys.readouterr().err
