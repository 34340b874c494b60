"""What random damage to files, and random faults against a run, must leave standing: 10,000 and 200 of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("command", [["corrupt", "--cases", "10000"], ["soak", "--faults", "200"]], ids=lambda c: c[0])
def test_nothing_gives_way(command, tmp_path):
    arguments = [*command, *(["--out", str(tmp_path)] if command[0] == "soak" else [])]
    done = warm.run(
        [sys.executable, "-m", f"tests.long.{arguments[0]}", *arguments[1:]],
        cwd=ROOT, timeout=2900, capture_output=True, text=True, nursing=True, finalized=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
