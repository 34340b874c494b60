"""A recipe that somebody sent runs no code of its own choosing; and what else of a recipe is another's to choose."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

import paceline
from paceline.cli import main
from paceline.cli.main import COMMANDS
from paceline.cli.options import recipe_options
from paceline.recipes import Recipe, RecipeError, SettingError, read_recipe
from paceline.recipes.reading import PATHS

EVIL = "code_of_a_stranger:load"
OPTIONS = {("data", "name"): "--data", ("model", "name"): "--model", ("model", "loss"): "--loss"}
TAKE_A_RECIPE = [
    name
    for name, command in COMMANDS.items()
    if "recipe_file" in {field.name for field in dataclasses.fields(command.options)}
]


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Let a module be found that says in a file that it was imported; return the file."""
    said = tmp_path / "imported"
    (tmp_path / "code_of_a_stranger.py").write_text(
        f"open({str(said)!r}, 'w').close()\ndef load(*_, **__): raise SystemExit\n"
    )
    monkeypatch.chdir(tmp_path)
    return said


def recipe_with(path, text=EVIL) -> Path:
    file = Path("strange.toml").absolute()
    line = f"{path[-1]} = '{text}'\n"
    file.write_text("rounds = 2\n" + (line if len(path) == 1 else f"[{path[0]}]\n{line}"))
    return file


def test_every_command_that_reads_a_recipe_is_looked_at():
    assert TAKE_A_RECIPE == ["race", "simulate", "train", "serve", "plan pipeline", "inspect rates"]


@pytest.mark.parametrize("command", TAKE_A_RECIPE)
def test_code_that_a_recipe_names_is_not_imported_and_the_options_that_would_run_it_are_shown(
    command, imported, tmp_path, capsys
):
    for path, option in OPTIONS.items():
        assert main([*command.split(), str(recipe_with(path)), "--out", str(tmp_path / "out")]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert len(said.err.splitlines()) == 1
        assert f"strange.toml:3: '{EVIL}' is code" in said.err
        assert f"add {option} {EVIL}, or --trust" in said.err
    assert not imported.exists()
    assert not (tmp_path / "out").exists()


def test_a_setting_of_a_file_is_either_no_code_or_refused(imported):
    """Of every setting of a recipe: text of the form module:name is a path, or it is refused."""
    taken = set()
    for option in recipe_options():
        try:
            read_recipe(recipe_with(option.path))
        except RecipeError:
            continue
        taken.add(option.path)
    assert taken <= set(PATHS)


def test_code_runs_if_it_is_named_on_the_command_line_too_or_the_file_is_trusted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = recipe_with(("model", "name"), "torch_is_here:net")
    trusted = read_recipe(file, trust=True)
    assert trusted.model.name == "torch_is_here:net"
    assert read_recipe(file, {"model.name": "torch_is_here:net"}) == trusted == Recipe.load(file, trust=True)
    assert read_recipe(file, {"model.name": "mlp"}).model.name == "mlp"
    with pytest.raises(RecipeError, match="torch_is_here:net"):
        read_recipe(file, {"data.name": "torch_is_here:net"})  # the name of one thing does not stand for another
    with pytest.raises(RecipeError, match=r"add --model torch_is_here:net, or --trust .*Recipe.load\(file, trust=True"):
        Recipe.load(file)


def test_what_is_trusted_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("networks_of_ours.py").write_text(
        "from torch import nn\ndef net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    file = recipe_with(("model", "name"), "networks_of_ours:net")
    assert main(["simulate", str(file), "--trust", "--json"]) == 0, capsys.readouterr().err


def test_a_name_that_a_terminal_would_obey_is_not_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("strange.toml").write_text('[model]\nname = "a:b\\u001b[2J"\n')
    assert main(["simulate", "strange.toml"]) == 2
    assert capsys.readouterr().err.strip().isprintable()


def test_a_recipe_in_a_script_is_code_already():
    recipe = Recipe().with_settings(model={"name": EVIL})
    assert Recipe.from_document(recipe.to_document()) == recipe
    assert paceline.Recipe is Recipe


def test_trust_does_not_reach_a_run_that_is_resumed(tmp_path, capsys):
    assert main(["train", "--resume", str(tmp_path), "--trust"]) == 2
    assert "leave out --trust" in capsys.readouterr().err


@pytest.mark.parametrize("path", PATHS)
def test_paths_of_what_the_shell_hands_over_are_relative_to_the_current_folder(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section, name = path
    text = f"[{section}]\n{name} = 'some.csv'\n" + {"delay": "name = 'recorded'", "pipeline": "stages = 2"}.get(
        section, ""
    )
    reading, writing = os.pipe()
    try:
        os.write(writing, text.encode())
        os.close(writing)
        recipe = read_recipe(f"/dev/fd/{reading}")
    finally:
        os.close(reading)
    assert Path(getattr(getattr(recipe, section), name)).absolute() == tmp_path / "some.csv"


# -- lists -------------------------------------------------------------------------------------------------------------

LISTS = [option for option in recipe_options() if isinstance(option.default, tuple)]


@pytest.mark.parametrize("option", LISTS, ids=lambda option: option.name)
def test_a_list_is_checked_as_a_tuple_is_and_makes_the_same_recipe(option):
    section, name = option.path
    whole = "int" in str(option.hint)
    inside = [20, 40] if whole else [0.25, 0.5]
    beside = {"name": "fine-pruning"} if section == "pruning" else {}
    given, same = ({section: {name: kind(inside), **beside}} for kind in (list, tuple))
    made = Recipe().with_settings(**given)
    assert made == Recipe().with_settings(**same)
    assert hash(made) == hash(Recipe().with_settings(**same))
    assert Recipe.from_document(made.to_document()) == made
    inside.append(70)  # the recipe keeps none of the caller's lists
    assert Recipe.from_document(made.to_document()) == made
    for outside in (-1, 10**9) if whole else (7.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(SettingError, match=name):
            Recipe().with_settings(**{section: {name: [inside[0], outside], **beside}})


def test_there_are_settings_that_are_lists():
    assert LISTS
