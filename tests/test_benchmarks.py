"""The benchmarks run: their figures mean nothing here, but a benchmark that broke would be noticed too late."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


RUNS = [["claims"], ["timing"], ["gradients", "--only", "mlp,lenet"], ["cluster"], ["overhead"], ["soak"], ["codecs"]]
RUNS += [["hostile"], ["links"], ["averaging"], ["scale"], ["averaging-accuracy"]]


@pytest.mark.parametrize("arguments", RUNS, ids=lambda arguments: arguments[0])
def test_a_benchmark_runs_and_keeps_its_numbers(arguments, tmp_path) -> None:
    command = [sys.executable, "-m", "benchmarks", *arguments, "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "bar" in done.stdout
    assert json.loads((tmp_path / f"{arguments[0]}.json").read_text(encoding="utf-8"))
