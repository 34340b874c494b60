"""Jobs in which one rank does something wrong."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from paceline.codecs.naming import inner_of
from paceline.strategies.averaging import make_averaging
from tests.averaging.jobs.common import LIMITS, MEMBERS, batches, codec_of, error_of, mlp, train
from tests.averaging.jobs.tally import Life
from tests.waiting import until


def poisoned(codec, member, culprit, plan="auto", moved=0.0):
    """A NaN in one rank's change, or a weight that has `moved`: what all raise, and what is left of their models."""
    rank = dist.get_rank()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run():
        with MEMBERS[member](model, optimizer, codec=codec_of(codec), plan=plan, **LIMITS) as sync:
            for number, (inputs, targets) in enumerate(batches(4, rank)):
                bad = number == 2 and rank == culprit
                train(model, optimizer, [(inputs * float("nan") if bad and not moved else inputs, targets)])
                model[-1].bias.data += moved * bad
            sync.flush()

    said = error_of(run)
    finite = all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    train(model, optimizer, batches(1, rank))  # the hooks are gone: plain training
    return {"said": said, "finite": finite}


def left_by_one(culprit, how, member="hpsgd", silence_seconds=10.0, timeout_seconds=20.0):
    """One rank raises, or never comes to the flush; what every rank says of it, and how long it took."""
    rank = dist.get_rank()
    limits = {"silence_seconds": silence_seconds, "timeout_seconds": timeout_seconds}
    life = Life(make_averaging(member), rank, dist.get_world_size(), None, **limits)
    began = time.monotonic()

    def run():
        with life.sync as sync:
            life.step()
            if rank == culprit and how == "raises":
                raise ZeroDivisionError("out of luck\nand of patience")
            if rank == culprit and how == "stays away":
                wait_for_the_others(culprit)
            sync.flush()

    return [error_of(run), time.monotonic() - began]


def wait_for_the_others(culprit):
    """Until all the other ranks are through with it; they say so in the store."""
    store = dist.distributed_c10d._get_default_store()
    others = [rank for rank in range(dist.get_world_size()) if rank != culprit]
    until(lambda: store.check([f"through {rank}" for rank in others]), "the others are through", seconds=30)
    for rank in others:
        store.delete_key(f"through {rank}")


def tell_the_one_who_waits():
    """End its `wait_for_the_others`."""
    dist.distributed_c10d._get_default_store().set(f"through {dist.get_rank()}", "1")


def stays_away(culprit):
    found = left_by_one(culprit, "stays away", "psgd", silence_seconds=20.0, timeout_seconds=1.5)
    if dist.get_rank() != culprit:
        tell_the_one_who_waits()
    return found


def until_it_ends(member, silence_seconds, folder, codec="identity"):
    """Train until something goes wrong, and say what it was; leaves word in the folder when training has begun."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    deadline = time.monotonic() + 45
    limits = {"silence_seconds": silence_seconds, "timeout_seconds": 40.0}

    def run():
        with MEMBERS[member](model, optimizer, codec=codec_of(codec), **limits) as sync:
            while time.monotonic() < deadline:
                train(model, optimizer, batches(1, dist.get_rank()))
                if sync.averages > 3:
                    (Path(folder) / f"training-{dist.get_rank()}").touch()
                time.sleep(0.005)

    return error_of(run)


def lying(culprit, plan):
    """A rank says that its payload is larger than any can be."""
    place, world = dist.get_rank(), dist.get_world_size()
    life = Life(make_averaging("local-sgd", period=1), place, world, None, codec="elias", plan=plan)
    start = life.sync._transport.start

    def lie(request):
        if request.tensor.dtype is torch.int64:  # the sizes
            request.tensor.fill_(2**50)
        return start(request)

    if dist.get_rank() == culprit:
        life.sync._transport.start = lie
    said = error_of(life.step)
    life.sync.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    return said


def unable(culprit, codec, plan):
    """A rank's codec breaks in its second average."""
    place, world = dist.get_rank(), dist.get_world_size()
    life = Life(make_averaging("local-sgd", period=1), place, world, None, codec=codec, plan=plan)
    life.step()
    kind, name = type(inner_of(life.sync._transport.exchange.codec)), "add_up" if plan == "all-reduce" else "encode"
    with mock.patch.object(kind, name, broken(getattr(kind, name))) if place == culprit else nullcontext():
        said = error_of(life.step)
    life.sync.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    return said


def broken(method):
    def raises(self, vector, *args, **settings):
        if vector.any():
            raise KeyError("no such kernel")
        return method(self, vector, *args, **settings)

    return raises
