"""What all commands have in common: help, --json, --debug, flags, units, and names of before."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.cli import main
from paceline.cli.main import COMMANDS, OLD_NAMES
from paceline.cli.options import UsageError, options_of, parse, recipe_options
from paceline.recipes import read_recipe

MOST_COMMON = 20


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("option", ["--help", "--help-all"])
def test_help_fits_eighty_columns_and_shows_the_common_options_or_all(name, option, capsys) -> None:
    assert main([*name.split(), option]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"usage: paceline {name} ")
    shown = [word.rstrip(",") for line in lines if line.startswith("  --") for word in line.split() if word[:2] == "--"]
    command = COMMANDS[name]
    table = options_of(command.options, with_recipe=command.common is not None)
    flags = {flag for option in table if not option.spelling.positional for flag in option.flags}
    if option == "--help-all":
        assert flags <= set(shown)
    else:
        assert set(shown) < flags or len(flags) == len(set(shown))
        assert len(shown) <= MOST_COMMON
    assert {"--json", "--debug"} <= set(shown)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json_and_debug_which_are_off(name) -> None:
    fields = {field.name: field.default for field in dataclasses.fields(COMMANDS[name].options)}
    assert (fields["json"], fields["debug"]) == (False, False)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_misspelt_option_leads_to_the_right_one(name, capsys) -> None:
    assert main([*name.split(), "--debgu"]) == 2
    assert capsys.readouterr().err == "paceline: error: unknown option --debgu; did you mean --debug?\n"


def test_a_group_lists_its_commands(capsys) -> None:
    for group in ("plan", "inspect", "bench"):
        assert main([group, "--help"]) == 0
        listed = capsys.readouterr().out
        assert [name for name in COMMANDS if f"paceline {name} " in listed] == [
            name for name in COMMANDS if name.split()[0] == group
        ]


def test_help_of_a_command_by_either_word_order(capsys) -> None:
    assert main(["help", "plan", "pruning"]) == 0
    first = capsys.readouterr().out
    assert main(["plan", "pruning", "--help"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["plan", "pipline"], "did you mean 'plan pipeline'?"),
        (["inspect", "pruninng", "runs/train"], "did you mean 'inspect pruning'?"),
        (["bench", "strategies"], "choose from bench codecs"),
        (["bench", "--size", "5"], "bench needs a second word: bench codecs"),
        (["--workers", "4", "race"], "unknown option --workers; options come after a command"),
        (["race", "full,lgc"], "for a strategy give --strategies full,lgc"),
        (["train", "hpsgd"], "for a strategy give --strategy hpsgd"),
        (["trian"], "did you mean 'train'?"),
    ],
)
def test_a_misspelt_command_leads_on(typed, meant, capsys) -> None:
    assert main(typed) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert meant in err


# -- names of before ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", OLD_NAMES)
def test_a_name_of_before_warns_once_and_does_the_same(old, monkeypatch, capsys) -> None:
    new, calls = OLD_NAMES[old], []
    called = dataclasses.replace(COMMANDS[new], call=lambda *given: calls.append(given))
    monkeypatch.setitem(COMMANDS, new, called)
    arguments = ["my-run"] if new == "inspect pruning" else ["my.toml"] if called.common is not None else []
    assert main([*new.split(), *arguments, "--json"]) == 0
    assert capsys.readouterr().err == ""
    assert main([old, *arguments, "--json"]) == 0
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert f"`paceline {old}` is now `paceline {new}`" in warning
    assert calls[0] == calls[1]
    assert calls[0][0].json


def test_an_option_of_before_warns_and_its_plain_number_keeps_its_unit(capsys) -> None:
    kind = COMMANDS["plan pipeline"].options
    assert parse(kind, ["--latency-ms", "5"]) == parse(kind, ["--latency", "5ms"])
    assert capsys.readouterr().err.count("--latency-ms is now --latency") == 1


# -- flags -------------------------------------------------------------------------------------------------------------

FLAGS = [option for option in recipe_options() if option.is_flag]


@pytest.mark.parametrize("flag", [flag for option in FLAGS for flag in option.flags])
def test_what_is_true_or_false_is_a_flag_with_a_value_or_without(flag, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    kind = COMMANDS["simulate"].options

    def given(*arguments: str) -> str:
        (text,) = parse(kind, arguments)[1].values()
        return text

    assert given(flag) == given(flag, "true") == given(f"{flag}=true") == given(flag, "--json") == "true"
    assert given(flag, "false") == given(f"--no-{flag[2:]}") == "false"
    (tmp_path / "false").touch()
    assert given(flag, "false") == "false"
    options, overrides = parse(kind, [flag, "my.toml"])
    assert (options.recipe_file, [*overrides.values()]) == ("my.toml", ["true"])


def test_a_flag_of_a_command_takes_no_word(tmp_path, monkeypatch) -> None:
    options, _ = parse(COMMANDS["replay"].options, ["--json", "no/such/run"], with_recipe=False)
    assert (options.json, options.run) == (True, "no/such/run")


# -- units -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "number"),
    [
        ("delay.shift_seconds", "5ms", 0.005),
        ("delay.shift_seconds", "0.005", 0.005),
        ("server.stall_seconds", "2min", 120.0),
        ("network.server_bits_per_second", "1Gbit/s", 1e9),
        ("network.worker_bits_per_second", "125 MB/s", 1e9),
        ("network.worker_bits_per_second", "inf", float("inf")),
        ("pipeline.memory_mb", "2GB", 2000.0),
        ("pipeline.bandwidth_mbit", "1Gbit/s", 1000.0),
        ("pipeline.latency_ms", "200us", 0.2),
    ],
)
def test_units_on_the_command_line_and_in_a_file(name, text, number, tmp_path) -> None:
    section, setting = name.split(".")

    def value(recipe) -> float:
        return getattr(getattr(recipe, section), setting)

    assert value(read_recipe(overrides={name: text})) == pytest.approx(number, rel=1e-12)
    file = tmp_path / "my.toml"
    file.write_text(f"[{section}]\n{setting} = {text if text[-1].isdigit() or text == 'inf' else repr(text)}\n")
    assert value(read_recipe(file)) == value(read_recipe(overrides={name: text}))


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["simulate", "--delay.shift-seconds", "2GB"], "a number of seconds, or a time such as 5ms, 2s or 1min"),
        (["simulate", "--network.server-bits-per-second", "5ms"], "a rate such as 1Gbit/s"),
        (["train", "--pipeline.memory-mb", "1.2.3GB"], "a size such as 500MB or 2GB"),
        (["work", "127.0.0.1:1", "--patience-seconds", "1 fortnight"], "a time such as 5ms, 2s or 1min"),
        (["plan", "pruning", "--batch-seconds", "1kg"], "a time such as 5ms, 2s or 1min"),
        (["plan", "pipeline", "--latency", "5"], "a time such as 5ms or 200us"),
    ],
)
def test_a_wrong_unit_names_what_is_allowed(arguments, allowed, capsys) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert allowed in err


# -- what is refused, or pointed out -----------------------------------------------------------------------------------


def test_what_stands_beside_resume_is_named(capsys) -> None:
    typed = ["--resume", "x", "--k", "3", "--delay.shift-seconds", "5ms", "--out", "y"]
    assert main(["train", *typed]) == 2
    assert "leave out --k, --delay.shift-seconds, --out;" in capsys.readouterr().err


def test_a_folder_with_other_files_is_pointed_out_and_they_stay(tmp_path, capsys) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    assert main(["simulate", "--timing-only", "--rounds", "2", "--json", "--out", str(tmp_path)]) == 0
    err = capsys.readouterr().err
    assert f"{tmp_path} holds other files (notes.txt), which stay" in err
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def own_words(command) -> list[str]:
    return [
        each.flags[0] if not each.spelling.positional else ""
        for each in COMMANDS[command].table
        if each.hint is str and not each.of_recipe
    ]


@pytest.mark.parametrize("command", [name for name in COMMANDS if own_words(name)])
def test_an_empty_word_is_refused_and_named_whatever_it_is_of(command) -> None:
    for option in own_words(command):  # --resume "$RUN" with RUN unset began another run
        with pytest.raises(UsageError, match=f"{option} is empty: give "):
            COMMANDS[command].parse([f"{option}=" if option else ""])


def test_a_resume_of_nothing_begins_no_run(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", "", "--rounds", "1"]) == 2
    assert capsys.readouterr().err == (
        "paceline: error: --resume is empty: give FOLDER, or leave it out (is a variable not set?)\n"
    )
    assert not any(tmp_path.iterdir())


def test_out_and_resume_are_among_the_words_that_cannot_be_empty() -> None:
    takers = {option: {name for name in COMMANDS if option in own_words(name)} for option in ("--out", "--resume")}
    assert takers["--resume"] == {"train", "serve"}
    assert takers["--out"] >= {"race", "simulate", "train", "serve", "report", "plan pipeline", "bench codecs"}
