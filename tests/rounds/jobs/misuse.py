"""Jobs that ask for what cannot be."""

from __future__ import annotations

import logging
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from tests.rounds.jobs.common import LIMITS, batch, compute, digest, error_of, network, setup


def misused():
    """Errors of the constructor, on all ranks alike, also where only rank 1 asks for it."""
    one, model = dist.get_rank() == 1, network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def lgc(model=model, optimizer=optimizer, k=2, **settings):
        return error_of(lambda: paceline.LGCSync(model, optimizer, k=k, **LIMITS, **settings))

    wrapped = DistributedDataParallel(network())
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(network(norm=True))
    doubled, precise = network().double(), network(norm=True)
    precise[1].running_mean = precise[1].running_mean.double()
    found = {
        "ddp": lgc(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1)),
        "ddp on one": lgc(wrapped if one else model),
        "sync batch norm": lgc(synced, torch.optim.SGD(synced.parameters(), lr=0.1)),
        "codec": lgc(codec="qsdg"),
        "codec on one": lgc(codec=3 if one else "identity"),
        "unlike codecs": lgc(codec="one-bit" if one else "identity"),
        "plan": lgc(codec="qsgd", plan="all-reduce"),
        "unlike plans": lgc(codec="qsgd", plan="gather" if one else "auto"),
        "double": lgc(doubled, torch.optim.SGD(doubled.parameters(), lr=0.1), codec="one-bit"),
        "double buffers": lgc(precise, torch.optim.SGD(precise.parameters(), lr=0.1), codec="one-bit"),
        "k": lgc(k=0),
        "k of words": lgc(k="most"),
        "k on one": lgc(k=-1 if one else 2),
        "too great a k": lgc(k=4),
        "unlike k": lgc(k=1 if one else 2),
        "blocks": lgc(blocks=0),
        "blocks on one": lgc(blocks=0 if one else 4),
        "most behind": lgc(most_behind=0),
        "other optimizer": lgc(network()),
        "closure": lgc(optimizer=torch.optim.LBFGS(model.parameters())),
        "plateau": lgc(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)),
        "no scheduler": lgc(scheduler=0.1),
        "unlike rates": lgc(optimizer=torch.optim.SGD(model.parameters(), lr=0.2 if one else 0.1)),
    }
    with paceline.LGCSync(model, optimizer, k=2, **LIMITS):
        found["twice"] = error_of(lambda: paceline.FullSync(model, optimizer))
    found["again"] = error_of(lambda: paceline.LGCSync(model, optimizer, k=3, **LIMITS).close())
    found["sharded"] = lgc(type("FSDPModule", (nn.Linear,), {})(2, 2))  # as torch's fully_shard names them
    return found


def chosen():
    """Whether this is the rank whose loop is wrong."""
    return dist.get_rank() == 1


def steps_itself(model, optimizer, sync, *inputs):
    compute(sync, model, *inputs)
    if chosen():
        optimizer.step()
    sync.step()


def scaler_steps(model, optimizer, sync, *inputs):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(inputs[0]).sum()).backward()
    if chosen():
        scaler.step(optimizer)
    sync.step()


def forgets_the_step(model, optimizer, sync, *inputs):
    for each in sync.epoch([inputs, inputs]):
        compute(sync, model, *each)
        if not chosen():
            sync.step()


def breaks_off_a_batch(model, optimizer, sync, *inputs):
    for x, _ in sync.blocks(*inputs):
        model(x).sum().backward()
        if chosen():
            break
    sync.step()


def does_some_blocks(model, optimizer, sync, *inputs):
    sync.begin_batch(3)
    for _ in range(2 if chosen() else 3):
        model(inputs[0]).sum().backward()
        sync.block_done()
    sync.step()


def has_no_gradient(model, optimizer, sync, *inputs):
    compute(sync, model, *inputs)
    if chosen():
        optimizer.zero_grad()
    sync.step()


def breaks_off_an_epoch(model, optimizer, sync, *inputs):
    for each in sync.epoch([inputs, inputs]):
        compute(sync, model, *each)
        sync.step()
        if chosen():
            break


def has_an_empty_loader(model, optimizer, sync, *inputs):
    for each in sync.epoch([] if chosen() else [inputs]):
        compute(sync, model, *each)
        sync.step()


LOOPS = [
    steps_itself,
    scaler_steps,
    forgets_the_step,
    breaks_off_a_batch,
    does_some_blocks,
    has_no_gradient,
    breaks_off_an_epoch,
    has_an_empty_loader,
]


def misused_loops():
    """Errors of loops; each ends the rounds on all ranks, and a new life begins."""
    found = {loop.__name__: error_of(partial(lead, loop)) for loop in LOOPS}
    found["sparse"] = error_of(sparse)
    _, _, sync = setup("lgc", k=3)
    sync.close()
    sync.close()
    found["closed"] = error_of(sync.step)
    found["closed, flush"] = error_of(sync.flush)
    return found


def lead(loop):
    model, optimizer, sync = setup("lgc", k=3)
    with sync:
        for number in range(2):
            loop(model, optimizer, sync, *batch(number, dist.get_rank()))


def sparse():
    model = nn.Embedding(4, 2, sparse=dist.get_rank() == 1)
    with paceline.FullSync(model, torch.optim.SGD(model.parameters(), lr=0.1), **LIMITS) as sync:
        model(torch.tensor([1])).sum().backward()
        sync.step()


def steps_scheduler_too():
    """Step a scheduler in the loop that was given to the rounds; return the error."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)

    def train():
        with paceline.FullSync(model, optimizer, scheduler=scheduler, **LIMITS) as sync:
            for number in range(4):
                compute(sync, model, *batch(number, dist.get_rank()))
                sync.step()
                scheduler.step()

    return error_of(train)


def sets_rates(kind, where, rounds=8):
    """The learning rate is set by hand: in the loop, between epochs, or after flushes; what all ranks end with."""
    rank, model = dist.get_rank(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, versions = [batch(number, rank) for number in range(2)], []

    def set_rate(sync):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + sync.version)

    def run():
        kinds = {"lgc": partial(paceline.LGCSync, k=1), "full": paceline.FullSync}
        with kinds[kind](model, optimizer, **LIMITS) as sync:
            while sync.version < rounds:
                if where == "epoch":
                    set_rate(sync)
                for inputs, targets in sync.epoch(loader):
                    if where == "loop":
                        set_rate(sync)
                    compute(sync, model, inputs, targets)
                    versions.append(sync.version)
                    sync.step()
                sync.flush()
                if where == "flush":
                    set_rate(sync)

    return {"said": error_of(run), "last": max(versions, default=0), "digest": digest(model, optimizer)}


def clips(where):
    """Clip in a loop, before or after the step; what the log says, and what profiles calls then."""
    rank, model, said = dist.get_rank(), network(), []
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), network()
    sum(each.sum() for each in other.parameters()).backward()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("paceline.rounds").addHandler(handler)
    try:
        with paceline.FullSync(model, optimizer, **LIMITS) as sync:
            for number in range(4):
                compute(sync, model, *batch(number, rank))
                if where == "before":
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                sync.step()
                if where == "another model":
                    nn.utils.clip_grad_norm_(other.parameters(), 1.0)
                if where == "after":
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            left = sys.getprofile()
    finally:
        logging.getLogger("paceline.rounds").removeHandler(handler)
    return {"said": said, "left": repr(left), "after": repr(sys.getprofile())}
