"""What the ranks of test_constructors.py can be told to do."""

from __future__ import annotations

import os
import signal
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.distributed import RankGoneError

PREPARED = {}  # what all ranks must have made before
BATCH = torch.ones(6, 4)


def network():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))


def trained(make, limit, **settings):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make(model, optimizer, timeout_seconds=limit, silence_seconds=20.0, **settings)


def planned(limit):
    return paceline.plan_pipeline(network(), BATCH, stages=3, microbatches=3, repeats=3, timeout_seconds=limit)


def pruned(limit):
    sampler = paceline.InfoBatch(24, batch_size=4, timeout_seconds=limit)
    next(iter(sampler))


CONSTRUCTORS = {
    "FullSync": lambda limit: trained(paceline.FullSync, limit),
    "LGCSync": lambda limit: trained(paceline.LGCSync, limit, k=2),
    "HPSGD": lambda limit: trained(paceline.HPSGD, limit),
    "SSGD": lambda limit: trained(paceline.SSGD, limit),
    "compress": lambda limit: paceline.compress(PREPARED["ddp"], "qsgd", timeout_seconds=limit),
    "Balance": lambda limit: paceline.Balance(network(), batch_size=8, timeout_seconds=limit).mean_of(1.0),
    "InfoBatch": pruned,
    "plan_pipeline": planned,
    "Pipeline": lambda limit: paceline.Pipeline(network(), PREPARED["plan"], timeout_seconds=limit),
    "watch": lambda limit: paceline.watch(PREPARED["ddp"], out=PREPARED["out"], timeout_seconds=limit),
}


def prepare(kind):
    """Make what the constructor is given, with all ranks."""
    if kind in ("compress", "watch"):
        PREPARED["ddp"] = DistributedDataParallel(network())
    if kind in ("plan_pipeline", "Pipeline"):  # also for what is loaded then: ranks come at one time afterwards
        PREPARED["plan"] = planned(30.0)
    if kind == "watch":
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        PREPARED["out"] = folder[0]


def awake(name, ranks):
    """Wait until so many ranks are here: a busy machine may wake one of them seconds after the others."""
    store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + 60.0
    store.add(f"awake/{name}", 1)
    while store.add(f"awake/{name}", 0) < ranks:
        assert time.monotonic() < deadline, f"not all {ranks} ranks are awake"
        time.sleep(0.01)


def construct(kind, limit, ranks_there=3):
    """Return the error of the constructor, or what watch() notes; how long it took; whether it is a RankGoneError."""
    awake(f"{kind} {limit} {ranks_there}", ranks_there)
    began = time.monotonic()
    try:
        made = CONSTRUCTORS[kind](limit)
    except Exception as error:
        return [str(error), time.monotonic() - began, isinstance(error, RankGoneError)]
    seconds, notes = time.monotonic() - began, made._began.notes if kind == "watch" else ()
    if hasattr(made, "close"):
        made.close()
    return [" ".join(notes), seconds, False]


def dies_when_it_connects(kind, limit):
    """Meet the others, and be killed before the group is made."""

    def new_group(*args, **settings):
        os.kill(os.getpid(), signal.SIGKILL)

    dist.new_group = new_group
    return construct(kind, limit)
