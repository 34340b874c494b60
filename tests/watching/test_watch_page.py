"""docs/watching.md: its block runs as it stands."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.traces.recorded_run import read_run
from tests.docs.pages import blocks_run_by


def test_the_first_block(tmp_path, monkeypatch):  # watching.md
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    try:
        network = torch.nn.Linear(4, 2)
        names = {
            "paceline": paceline,
            "DistributedDataParallel": DistributedDataParallel,
            "network": network,
            "loader": [(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))] * 3,
            "loss_function": torch.nn.functional.cross_entropy,
            "optimizer": torch.optim.SGD(network.parameters(), lr=0.1),
        }
        (code,) = blocks_run_by("watching.md", "tests/watching/test_watch_page.py::test_the_first_block")
        exec(code, names)
    finally:
        dist.destroy_process_group()
    assert len(read_run(tmp_path / "runs" / "watch").times["rank"][0].steps) == 3
