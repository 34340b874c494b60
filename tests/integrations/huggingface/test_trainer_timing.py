"""The timing of Trainer runs: its figures mean nothing here, but one that broke would be noticed too late."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.core.hosts import why_not

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(why_not() is not None, reason="two hosts need root and iproute2")
def test_the_timing_of_trainer_runs_and_keeps_its_numbers(tmp_path):
    command = [sys.executable, "-m", "experiments", "trainer", "--toy", "--seeds", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bar ") == 2
    told = json.loads((tmp_path / "trainer" / "results.json").read_text(encoding="utf-8"))
    assert not told["skipped"]
    rows = told["numbers"]["rows"]
    assert all(row["samples_per_second"] > 0 and row["sent_bytes"] > 0 for row in rows)
    ddp, ours = (row["sent_bytes"] for row in rows)
    assert ours < ddp
