"""Every block of docs/lightning.md runs as it stands there, on two ranks; one of them by Lightning's own launcher."""

from __future__ import annotations

import os
import sys

import pytest

from tests import warm
from tests.docs.pages import blocks
from tests.integrations.ranks import ROOT, launch

HEADINGS = ["compress", "average", "prune", "checkpoints", "figures", "lars"]


@pytest.mark.parametrize("number", range(len(HEADINGS)), ids=HEADINGS)
def test_a_block_of_the_page_trains(tmp_path, number):
    assert len(blocks("lightning.md")) == 1 + len(HEADINGS)
    found = launch("tests.integrations.lightning.page_job", {"folder": str(tmp_path), "number": number})
    assert found[0][0] == found[1][0] > 0
    if HEADINGS[number] == "figures":
        assert "paceline/sent_bytes" in found[0][1].split(",")


def test_lightnings_own_launcher_starts_the_ranks(tmp_path):
    first, _, average, *_ = blocks("lightning.md")
    script = tmp_path / "script.py"
    told = "print(f'RANK {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps')\n"
    script.write_text(first + average.replace('paceline.lightning.Averaging("hpsgd")', '"paceline-hpsgd"') + told)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    ran = warm.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        nursing=True,  # Lightning starts the second rank
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "RANK 0 of 2: 16 steps" in ran.stdout
