"""`paceline plan pruning` as a user meets it."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from paceline.cli import main
from paceline.data.pruning.fine_pruning import FineSchedule
from paceline.data.pruning.plan import plan_fine, plan_info

FINE = ["--samples", "1000", "--epochs", "36", "--batch-size", "32", "--window", "12", "--starting-point", "6",
        "--attenuation", "2", "--block", "4", "--count", "2", "--prune", "0.3"]  # fmt: skip
SCHEDULE = FineSchedule(window=12, starting_point=6, attenuation=2, block=4, count=2, prune=0.3)


@pytest.fixture(autouse=True)
def _columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_the_plan_is_told_in_80_columns(capsys):
    assert main(["plan", "pruning", *FINE]) == 0
    told = capsys.readouterr()
    plan = plan_fine(SCHEDULE, 1000, epochs=36, batch_size=32)
    assert told.out.split("\n") == [*str(plan).split("\n"), ""]
    assert max(map(len, told.out.splitlines())) <= 80
    assert told.err == ""


def test_as_json_it_is_the_plans_document(capsys):
    assert main(["plan", "pruning", *FINE, "--batch-seconds", "0.5", "--overhead-seconds", "2", "--json"]) == 0
    plan = plan_fine(SCHEDULE, 1000, epochs=36, batch_size=32, batch_seconds=0.5, overhead_seconds=2.0)
    assert json.loads(capsys.readouterr().out) == plan.document()


def test_info_batch_has_a_plan_too(capsys):
    arguments = ["--policy", "info-batch", "--samples", "1000", "--epochs", "40", "--ratio", "0.25", "--delta", "0.5"]
    assert main(["plan", "pruning", *arguments, "--json", "--drop-last"]) == 0
    plan = plan_info(1000, epochs=40, ratio=0.25, delta=0.5, batch_size=128, drop_last=True)
    assert json.loads(capsys.readouterr().out) == plan.document()


def test_a_whole_number_is_a_number_of_samples(capsys):
    for text, number in (("10", 10), ("0.01", 500)):
        assert main(["plan", "pruning", "--prune", text, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["prune_num"] == number


def test_a_terminal_without_blocks_gets_ascii(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["plan", "pruning", *FINE]) == 0
    terminal.flush()
    plan = plan_fine(SCHEDULE, 1000, epochs=36, batch_size=32)
    assert terminal.buffer.getvalue().decode("ascii").rstrip("\n") == plan.text(ascii_only=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--window", "0"], "window must be a whole number between 1 and 65,535 (window=0)"),
        (["--window", "3.5"], "--window: expected a whole number, got '3.5'"),
        (["--prune", "much"], "--prune: expected a whole number or a number, got 'much'"),
        (["--prune", "50000"], "prune must leave at least one sample (prune=50000, samples=50000)"),
        (["--epochs", "0"], "epochs must be between 1 and 1,000,000 (epochs=0)"),
        (["--ratio", "0.5"], "--ratio is a setting of info-batch; add --policy info-batch"),
        (["--policy", "info-batch", "--window", "9"], "--window is a setting of fine-pruning; add --policy fine-prun"),
        (["--policy", "info-batch", "--ratio", "1"], "ratio must be at least 0 and below 1 (ratio=1.0)"),
        (["--policy", "info-bath"], "unknown policy 'info-bath'; did you mean 'info-batch'?"),
        (["--overhead-seconds", "1"], "overhead_seconds needs batch_seconds beside it"),
        (["--widnow", "9"], "unknown option --widnow; did you mean --window?"),
    ],
)
def test_what_cannot_be_planned_is_told_in_one_line(arguments, said, capsys):
    assert main(["plan", "pruning", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"paceline: error: {said}")
    assert told.err.count("\n") == 1


def test_help_lists_the_command_and_every_name_fits_its_column(capsys):
    assert main(["--help"]) == 0
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  paceline ")]
    assert any(line.split()[1:3] == ["plan", "pruning"] for line in listed)
    assert {line[27] for line in listed} == {" "}
    assert " " not in {line[28] for line in listed}


def test_a_plan_needs_no_torch():
    code = "import sys; from paceline.data.pruning import plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
