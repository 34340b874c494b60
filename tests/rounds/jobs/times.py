"""Jobs that are watched: what a rank's clock hears of its rounds, and step times of ranks without a common folder."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from paceline.distributed.stores import StoreGather, private_store
from paceline.drivers.ranks.times import RankTimes
from paceline.traces.step_clock import StepClock, register_clock
from paceline.traces.step_times import read_all_times
from tests.rounds.jobs.common import batch, compute, network, setup


def watched(rounds, pause_seconds):
    """Take rounds of all ranks, of which the last sleeps in every block; return what this rank's clock has heard."""
    rank, seen = dist.get_rank(), []
    model, _, sync = setup("full", blocks=2)
    clock = StepClock(seen.append)
    register_clock(model, clock)
    with sync:
        for number in range(rounds):
            inputs, targets = batch(number, rank)
            compute(sync, model, inputs, targets, lambda: time.sleep(pause_seconds * (rank == 2)))
            sync.step()
            clock.end_step()
    steps = [[each.wait_seconds, each.optimiser_seconds, each.input_seconds, each.seconds] for each in seen]
    return {"steps": steps, "buckets": [each.buckets for each in seen]}


def apart(folder, name, steps):
    """Write step times to a folder of each rank's own; return how many steps of whom are in this one's then."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = StoreGather(private_store(name), rank, world, timeout_seconds=30.0, launch="1a2b")
    own = Path(folder, f"host-{rank}")
    with RankTimes(network(), ranks, own, sync="averaging") as times:
        times.begin(step=0, seconds=0.0)
        for _ in range(steps + rank):
            times.end_step()
        times.end("all rounds are done")
    return [[number, len(each.steps)] for number, each in read_all_times(own)["rank"].items()]
