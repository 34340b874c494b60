"""The harness: ranks find each other, answer in their order, fail with their own words, and are counted."""

from __future__ import annotations

import pytest

from tests.integrations.ranks import JobError, Network, launch


def job(fails=False):
    import os

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(250_000)
    dist.all_reduce(total)
    rank = int(os.environ["RANK"])
    if fails and rank == 1:
        raise ValueError("rank 1 has had enough")
    return [rank, float(total[0])]


def test_ranks_answer_and_their_bytes_are_counted():
    with Network() as network:
        before = network.sent_bytes()
        assert launch(__name__, network=network) == [[0, 2.0], [1, 2.0]]
        assert 2_000_000 < network.sent_bytes() - before < 3_000_000


def test_a_rank_that_fails_says_why():
    with pytest.raises(JobError, match="rank 1 has had enough"):
        launch(__name__, {"fails": True})
