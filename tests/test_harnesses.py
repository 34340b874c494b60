"""Random damage to files and random faults against a run leave all standing: few here, thousands in the long run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conftest import LONG
from tests import warm

ROOT = Path(__file__).parents[1]
FEW = "kill -9 a worker, a worker that lies, a run beside, a worker leaves"
CORRUPT = ["corrupt", "--cases", "10000" if LONG else "300"]
SOAK = ["soak", "--faults", "200"] if LONG else ["soak", "--faults", "4", "--only", FEW]


@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.parametrize(("harness", "arguments"), [(CORRUPT[0], CORRUPT[1:]), (SOAK[0], SOAK[1:])])
def test_nothing_gives_way(harness, arguments, tmp_path):
    out = ["--out", str(tmp_path)] if harness == "soak" else []
    command = [sys.executable, "-m", f"tests.long.{harness}", *arguments, *out]
    limit = 3500 if LONG else 280
    done = warm.run(command, cwd=ROOT, timeout=limit, capture_output=True, text=True, nursing=True, finalized=False)
    assert done.returncode == 0, done.stdout + done.stderr
