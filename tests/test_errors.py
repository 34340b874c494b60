"""Whose fault an error was: what was typed (2), code that was given (1), paceline's own refusals (2 or 1), or a bug."""

from __future__ import annotations

import ast
import importlib
import pickle
import re
from pathlib import Path

import pytest

import paceline
from paceline.cli import main
from paceline.cli.main import exit_code
from paceline.errors import PacelineError, in_a_line, raised_in
from paceline.runs.launch import RankError, _portable

SOURCE = Path(paceline.__file__).parent
OPTIONAL = {"huggingface", "lightning", "ray"}


def classes_of_errors() -> list[type[Exception]]:
    """Return every exception that paceline defines, but for those of extras."""
    found = []
    for path in SOURCE.rglob("*.py"):
        place = path.relative_to(SOURCE)
        if place.parts[0] in OPTIONAL:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and any("Error" in ast.unparse(base) for base in node.bases):
                module = importlib.import_module(".".join(["paceline", *place.with_suffix("").parts]))
                found.append(getattr(module, node.name))
    return found


def raised(kind: type[Exception]) -> int | None:
    error = kind.__new__(kind)
    error.args = ("three riders are missing",)
    raise error


def test_no_refusal_of_paceline_s_own_is_called_a_bug(capsys):
    kinds = [kind for kind in classes_of_errors() if issubclass(kind, PacelineError)]
    assert len(kinds) > 40
    for kind in kinds:
        assert exit_code(lambda kind=kind: raised(kind), debug=False) == (2 if issubclass(kind, ValueError) else 1), (
            kind
        )
        assert not re.search("raised in|a bug|debug", capsys.readouterr().err), kind


def ours(source: str):
    """Return a function that runs a line as if it stood in a file of paceline's."""
    names: dict[str, object] = {}
    exec(compile(f"def run():\n    {source}\n", str(SOURCE / "pretended.py"), "exec"), names)
    return names["run"]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("raise ValueError('odd')", 2),
        ("int('odd')", 2),
        ("__import__('json').loads('odd')", 2),
        ("open('/odd/odd')", 1),
    ],
)
def test_what_our_code_refuses_in_the_words_of_others_is_plain(source, code, capsys):
    assert exit_code(ours(source), debug=False) == code
    assert not re.search("raised in|a bug|debug", capsys.readouterr().err)


def test_what_is_no_refusal_and_of_nothing_given_is_a_bug(capsys):
    assert exit_code(ours("raise KeyError('odd')"), debug=False) == 1
    assert "KeyError: 'odd' (a bug in paceline" in capsys.readouterr().err


GIVEN = """
from torch import nn


def norm(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))


class Tired(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(64, 10), 0

    def forward(self, inputs):
        self.calls += 1
        if self.calls > 5:
            raise {kind}("no more of this")
        return self.layer(inputs.flatten(1))


def load():
    raise {kind}("nothing there today")


def odd(outputs, targets):
    odd.calls += 1
    if odd.calls > 5:
        raise {kind}("an odd loss")
    return nn.functional.cross_entropy(outputs, targets)


odd.calls = 0
"""


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Write a module with what users give, whose errors are of the class asked for; return its name."""

    def write(kind: str, name: str) -> str:
        (tmp_path / f"{name}.py").write_text(GIVEN.replace("{kind}", kind), encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        return name

    return write


@pytest.mark.parametrize("kind", ["ValueError", "RuntimeError", "KeyError", "OSError"])
@pytest.mark.parametrize(
    ("option", "name", "words"),
    [("model", "Tired", "no more of this"), ("data", "load", "nothing there today"), ("loss", "odd", "an odd loss")],
)
def test_an_error_of_what_was_given_is_neither_typed_nor_a_bug(kind, option, name, words, given, capsys):
    module = given(kind, f"given_{kind}_{option}".lower())
    assert main(["simulate", f"--{option}", f"{module}:{name}", "--workers", "2", "--k", "2", "--rounds", "30"]) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{kind}: " in line
    assert words in line
    assert f"(raised in {module}.py, line " in line
    assert "a bug" not in line


def test_a_layer_of_torch_s_is_the_model(given, capsys):
    module, few = given("ValueError", "given_norm"), ["--batch-size", "1", "--blocks", "1"]
    assert main(["simulate", "--model", f"{module}:norm", *few, "--workers", "2", "--k", "2", "--rounds", "3"]) == 1
    assert "Expected more than 1 value per channel" in (err := capsys.readouterr().err)
    assert "(raised in the model)" in err


@pytest.mark.parametrize("kind", ["ValueError", "RuntimeError"])
@pytest.mark.parametrize("strategy", [("--strategy", "hpsgd"), ("--strategy", "lgc", "--on", "ranks")])
def test_ranks_bring_the_answer_along(strategy, kind, given, capsys):
    module = given(kind, f"given_{strategy[1]}_{kind}".lower())
    settings = ["--workers", "2", "--rounds", "40", "--out", "run"]
    assert main(["train", *strategy, "--model", f"{module}:Tired", *settings]) == 1
    line = next(line for line in capsys.readouterr().err.splitlines() if "paceline: error: " in line)
    assert f"{kind}: no more of this (raised in {module}.py, line " in line


def test_the_answer_survives_a_pipe(given, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(given("ValueError", "given_pipe"))
    with pytest.raises(ValueError, match="nothing there today") as caught:
        module.load()
    copy = pickle.loads(pickle.dumps(_portable(caught.value)))  # noqa: S301 - it was an object here
    assert type(copy) is ValueError
    assert raised_in(copy) == raised_in(caught.value)
    assert in_a_line(copy).startswith("ValueError: nothing there today (raised in given_pipe.py, line ")
    assert raised_in(_portable(RankError("rank 1 is gone"))) == ""
