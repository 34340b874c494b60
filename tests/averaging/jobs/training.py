"""Jobs that train models of every kind, and compare with what trains them otherwise."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from tests.averaging.jobs.common import MEMBERS, batches, digest, distance, groups, mlp, train


def alike(steps):
    """period 1, ssgd, DDP, and local-sgd's other names: how far apart they end."""
    rank, found = dist.get_rank(), {}
    ddp = DistributedDataParallel(mlp())
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), batches(steps, rank))
    makers = {
        "ssgd": paceline.SSGD,
        "local-sgd": lambda *both: paceline.LocalSGD(*both, period=1),
        "plain bmuf": lambda *both: paceline.BMUF(*both, period=1, outer_momentum=0.0),
    }
    for name, make in makers.items():
        model = mlp(seed=rank)  # all begin with the first rank's
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with make(model, optimizer) as sync:
            train(model, optimizer, batches(steps, rank))
        found[name] = {"apart": distance(model, ddp.module), "averages": sync.averages, "digest": digest(model)}
    return found


def adam_too(steps):
    """ssgd against DDP with Adam, gradients accumulated, and a step that one rank alone brings."""
    rank, models = dist.get_rank(), []
    for kind in ("ddp", "ssgd"):
        model = DistributedDataParallel(mlp()) if kind == "ddp" else mlp(seed=rank)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        sync = paceline.SSGD(model, optimizer) if kind == "ssgd" else None
        for number in range(steps):
            optimizer.zero_grad()
            for inputs, targets in batches(2, rank, first=2 * number):
                F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        if sync:
            sync.close()
        models.append(model.module if kind == "ddp" else model)
    return distance(*models)


def alone(steps):
    """One worker: every member, and plain training."""
    mine, apart = groups()["single"], {}
    for name, make in MEMBERS.items():
        plain, model = mlp(), mlp()
        for which in (plain, model):
            optimizer = torch.optim.SGD(which.parameters(), lr=0.1, momentum=0.9)
            sync = make(which, optimizer, process_group=mine) if which is model else None
            train(which, optimizer, batches(steps, 0))
            if sync:
                sync.flush()
                same = all(torch.equal(value, which.state_dict()[key]) for key, value in sync.shared.items())
                sync.close()
        apart[name] = [distance(plain, model), same]
    return apart


def scale_up(model, *_):
    model.scale.fill_(1.0 + 2.0**-30)


def kinds(member, steps):
    """Models of every kind: how they end, and whether all ranks end alike (by their digests)."""
    rank, found = dist.get_rank(), {}
    tied = mlp()
    tied[2] = nn.Linear(8, 6)
    tied.append(nn.Linear(6, 8))
    tied[3].weight = tied[0].weight
    models = {
        "norm": mlp(norm=True),
        "bfloat16": mlp(dtype=torch.bfloat16),
        "float64": mlp(dtype=torch.float64),
        "tied": tied,
        "frozen": mlp(),
        "float64 buffer": mlp(),
    }
    models["float64 buffer"].register_buffer("scale", torch.ones(1, dtype=torch.float64))
    models["float64 buffer"].register_forward_hook(scale_up)
    models["frozen"][0].requires_grad_(False)
    for name, model in models.items():
        dtype = next(model.parameters()).dtype
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        before = digest(model)
        with MEMBERS[member](model, optimizer) as sync:
            train(model, optimizer, batches(steps + rank, rank, dtype=dtype))
            if name == "norm":
                counted = int(model[1].num_batches_tracked)
        found[name] = {"digest": digest(model), "moved": digest(model) != before, "steps": sync.merged_steps}
    found["norm"]["batches"] = int(models["norm"][1].num_batches_tracked)
    found["norm"]["variance"] = float(models["norm"][1].running_var.min())
    found["counted"] = counted - rank
    found["float64 buffer"]["scale"] = float(models["float64 buffer"].scale)
    return found


def scaled(steps, member, fused):
    """A gradient scaler leaves out a step of one rank: what that rank and all of them count."""
    rank, model = dist.get_rank(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with MEMBERS[member](model, optimizer) as sync:
        for number, (inputs, targets) in enumerate(batches(steps, rank)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets) * (float("inf") if number == rank == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    return {"steps": sync.steps, "merged": sync.merged_steps, "digest": digest(model)}


def told(steps):
    """What on_average and the history say."""
    rank, heard, model = dist.get_rank(), [], mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.LocalSGD(model, optimizer, period=2, record=True, on_average=heard.append) as sync:
        train(model, optimizer, batches(steps, rank))
    ordered = all(each.started <= each.begun <= each.done <= each.merged for each in sync.history)
    windows = [[[w.steps, w.merged_after, int(w.standing)] for w in each.windows] for each in sync.history]
    return {"same": heard == sync.history, "ordered": ordered, "windows": windows, "shown": repr(sync)}
