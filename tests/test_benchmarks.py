"""The benchmarks run: their figures mean nothing here, but a benchmark that broke would be noticed too late."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.catalogue import BENCHMARKS
from tests import warm

ROOT = Path(__file__).parents[1]


# Several in one command where that saves loading torch again.
RUNS = [
    ["cluster", "what-if"],
    ["overhead", "server-memory"],
    ["soak"],
    ["links", "plans", "codec-losses", "slow-link", "trainer"],  # the last is skipped where transformers is missing
    ["averaging", "watch"],
    ["shares", "shares-lgc"],
    ["lgc-ranks"],
    ["gradients", "--only", "mlp,lenet"],
]
RUNS += [["claims", "late-weights", "timing", "codecs", "pruning", "pruning-overhead", "false-alarms"]]
RUNS += [["pipeline-balance", "pipeline-idle", "pipeline-placement", "plan-beside-load"]]
RUNS += [["diagnosis", "--only", "ddp"]]
RUNS += [["corrupt"]]  # it forks, and must not have computed before
RUNS += [["hostile", "scale", "averaging-accuracy", "optimizers", "large-batch"]]


def test_every_benchmark_that_takes_seconds_is_run() -> None:
    assert set(BENCHMARKS) - {name for names in RUNS for name in names} == {"choice-of-k"}


@pytest.mark.parametrize("arguments", RUNS, ids=lambda arguments: arguments[0])
def test_a_benchmark_runs_and_keeps_its_numbers(arguments, tmp_path) -> None:
    command = [sys.executable, "-m", "benchmarks", *arguments, "--quick", "--out", str(tmp_path)]
    settings = {"capture_output": True, "text": True, "nursing": True, "finalized": False}
    done = warm.run(command, cwd=ROOT, timeout=300, **settings)
    assert done.returncode == 0, done.stderr
    names = [name for name in arguments if name in BENCHMARKS]
    assert done.stdout.count("bar") >= len(names)
    for name in names:
        assert json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
