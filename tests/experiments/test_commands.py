"""One experiment of each kind runs from its command, as a toy; all of them do in tests/long."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]
KINDS = {  # a figure of a paper with jobs, a timing in one process, one with ranks on hosts
    "lgc-1": "3 of 3 claims came out",
    "optimizers": "One optimiser step",
    "links": "A step of",
}


@pytest.mark.timeout(300)
def test_an_experiment_of_each_kind_runs_from_its_command_and_keeps_its_numbers(tmp_path):
    command = [sys.executable, "-m", "experiments", *KINDS, "--toy", "--out", str(tmp_path)]
    done = warm.run(command, cwd=ROOT, timeout=280, capture_output=True, text=True, nursing=True, finalized=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, words in KINDS.items():
        assert words in done.stdout
        told = json.loads((tmp_path / name / "results.json").read_text(encoding="utf-8"))
        assert told["experiment"] == name
        assert told["numbers"]
        assert (tmp_path / name / "report.html").is_file()
    assert json.loads((tmp_path / "lgc-1" / "results.json").read_text(encoding="utf-8"))["missed"] == 0
