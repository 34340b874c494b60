"""Jobs that are watched: what a rank's clock hears of its averages."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from paceline.traces.step_clock import StepClock, register_clock
from tests.averaging.jobs.common import LIMITS, MEMBERS, batches, mlp, train


def watched(member, steps, pause_seconds, **settings):
    """Train with averages while the last rank sleeps before each step; return the waits and buckets of each step."""
    rank, seen = dist.get_rank(), []
    model = mlp(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clock = StepClock(seen.append)
    register_clock(model, clock)
    with MEMBERS[member](model, optimizer, **settings, **LIMITS):
        for each in batches(steps, rank):
            time.sleep(pause_seconds * (rank == 2))
            train(model, optimizer, [each])
            clock.end_step()
    return [[each.wait_seconds, each.seconds, [list(bucket) for bucket in each.buckets]] for each in seen]
