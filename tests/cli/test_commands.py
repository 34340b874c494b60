"""The command line as a user meets it: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from tests import warm

pytestmark = pytest.mark.slow


def paceline(*arguments: str, cwd: Path, run=warm.run) -> subprocess.CompletedProcess[str]:
    return run(
        [sys.executable, "-m", "paceline", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "80"},
    )


def from_nothing(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """In a process that has loaded nothing yet."""
    return paceline(*arguments, cwd=cwd, run=subprocess.run)


RESULT_KEYS = {"strategy", "seed", "rounds", "seconds", "loss", "accuracy", "seconds_to_target", "used", "late"}


def test_race_prints_one_document_and_writes_the_report(tmp_path) -> None:
    done = paceline("race", "--strategies", "full,lgc", "--rounds", "12", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [result["strategy"] for result in document["results"]] == ["full", "lgc"]
    for result in document["results"]:
        assert {*RESULT_KEYS, "dropped"} <= set(result)
        assert result["used"] + result["late"] + result["dropped"] == 120
    assert document["recipe"]["rounds"] == 12
    report = (tmp_path / "runs/race/report.html").read_text(encoding="utf-8")
    assert "<script" in report
    assert json.loads((tmp_path / "runs/race/results.json").read_text(encoding="utf-8")) == document


def test_race_prints_a_table_of_eighty_columns(tmp_path) -> None:
    done = paceline("race", "--strategies", "full,fastest-k,lgc,async", "--rounds", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    for name in ("full", "fastest-k", "lgc", "async"):
        assert name in done.stdout
    assert "runs/race/report.html" in done.stderr


def test_simulate_reads_a_recipe_and_overrides(tmp_path) -> None:
    (tmp_path / "my.toml").write_text("rounds = 6\n[cluster]\nworkers = 8\n", encoding="utf-8")
    done = paceline("simulate", "my.toml", "--strategy.k", "3", "--cluster.workers", "20", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["recipe"]["cluster"]["workers"] == 20
    (result,) = document["results"]
    assert (result["rounds"], result["used"]) == (6, 18)


def test_timing_only_needs_no_torch_and_tells_no_loss(tmp_path) -> None:
    sizes = ["--cluster.workers", "5000", "--rounds", "50"]
    done = from_nothing("simulate", "--timing-only", *sizes, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert (result["rounds"], result["loss"], result["seconds_to_target"]) == (50, None, None)


def test_help_and_completion_load_no_torch(tmp_path) -> None:
    code = (
        "import sys; from paceline.cli.main import COMMANDS, main\n"
        "for name in COMMANDS: main([*name.split(), '--help-all'])\n"
        "main(['--print-completion', 'bash'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, stdout=subprocess.DEVNULL)
    assert done.returncode == 0


@pytest.mark.parametrize("arguments", [[], ["--help"], ["race", "--help"], ["simulate", "--help"], ["--version"]])
def test_help_is_help(arguments, tmp_path) -> None:
    done = from_nothing(*arguments, cwd=tmp_path)
    assert done.returncode == 0
    assert "paceline" in done.stdout
    assert not list(tmp_path.iterdir())


def test_an_unknown_command_lists_the_commands(tmp_path) -> None:
    done = paceline("rase", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'race'" in done.stderr


def test_an_error_has_no_traceback_unless_asked_for(tmp_path) -> None:
    quiet = paceline("simulate", "--k", "0", cwd=tmp_path)
    loud = paceline("simulate", "--k", "0", "--debug", cwd=tmp_path)
    assert quiet.returncode == loud.returncode == 2
    assert "Traceback" not in quiet.stderr
    assert "Traceback" in loud.stderr


def test_a_run_that_diverges_says_so(tmp_path) -> None:
    done = paceline("simulate", "--rounds", "30", "--lr", "100000", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert result["diverged"]
    assert result["loss"] is None


def test_a_folder_that_cannot_be_written_is_told_before_the_run(tmp_path) -> None:
    (tmp_path / "runs").write_text("a file is in the way", encoding="utf-8")
    done = paceline("simulate", "--rounds", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert "runs" in done.stderr
    assert "--out" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_of_the_user_s_own(tmp_path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def build(input_shape, classes):\n"
        "    c, h, w = input_shape\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(c * h * w, classes))\n",
        encoding="utf-8",
    )
    done = paceline("simulate", "--model", "mine:build", "--rounds", "5", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert 0 < result["loss"] < 2.3


def test_an_interrupted_race_tells_what_was_done(tmp_path, monkeypatch, capsys) -> None:
    def shown(self, lane, standing) -> None:
        if standing.round == 5:
            raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.cli.progress.RunBars.show", shown)
    assert main(["race", "--strategies", "full,lgc", "--rounds", "50", "--evaluate-every", "1"]) == 130
    out, err = capsys.readouterr()
    assert "what was done so far" in err
    assert "lgc" in out
    assert (tmp_path / "runs/race/report.html").exists()
    rounds = [result["rounds"] for result in json.loads((tmp_path / "runs/race/results.json").read_text())["results"]]
    assert max(rounds) == 5


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("nn.Linear(64, 5)", "(2, 10)"),
        ("nn.Linear(63, 10)", "fails on a batch of shape (2, 1, 8, 8)"),
        ("nn.LSTM(64, 10)", "tuple"),
    ],
)
def test_a_model_that_does_not_fit_is_told_before_the_run(code, message, tmp_path) -> None:
    text = f"from torch import nn\ndef build():\n    return nn.Sequential(nn.Flatten(), {code})\n"
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    done = paceline("simulate", "--model", "mine:build", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_race_refuses_what_it_would_ignore(tmp_path) -> None:
    done = paceline("race", "--strategy", "full", cwd=tmp_path)
    assert done.returncode == 2
    assert "--strategies full" in done.stderr
