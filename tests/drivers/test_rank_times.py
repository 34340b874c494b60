"""Step times of ranks: a run that is over does not fail because its step times cannot be brought together."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch import nn

from paceline.distributed import RankGoneError
from paceline.drivers.ranks.times import RankTimes


def lost(*args, **options):
    raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")


def test_a_lost_connection_at_the_end_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(dist, "broadcast", lost)
    ranks = SimpleNamespace(rank=0, world=2, launch="1a2b", timeout_seconds=1.0, gather=lambda what, ours: [[1], [1]])
    times = RankTimes(nn.Linear(2, 1), ranks, tmp_path, sync="rounds")
    with pytest.raises(RankGoneError, match="rank 1 were lost: Connection closed"):
        times._broadcast(1, 10)
    ranks.gather = lost
    with caplog.at_level(logging.WARNING, logger="paceline.ranks"):
        times.end("all rounds are done")
    assert "were not brought together: Connection closed" in caplog.text
