"""Jobs that ask for what cannot be."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.codecs import QSGD
from tests.averaging.jobs.common import error_of, mlp


def misused():
    """Errors of the constructor and of what comes after, on all ranks alike."""
    rank, model = dist.get_rank(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {
        "ddp": error_of(lambda: paceline.HPSGD(DistributedDataParallel(mlp()), optimizer)),
        "strange": error_of(lambda: paceline.HPSGD(mlp(), optimizer)),
        "untrained": error_of(lambda: paceline.HPSGD(*frozen())),
        "optimizer": error_of(lambda: paceline.HPSGD(model, "sgd")),
        "codec": error_of(lambda: paceline.HPSGD(model, optimizer, codec="qsdg")),
        "plan": error_of(lambda: paceline.HPSGD(model, optimizer, codec="qsgd", plan="all-reduce")),
        "no plan": error_of(lambda: paceline.HPSGD(model, optimizer, codec="qsgd", plan="ring")),
        "unlike plans": error_of(
            lambda: paceline.HPSGD(model, optimizer, codec="qsgd", plan="gather" if rank == 2 else "auto")
        ),
        "float64": error_of(lambda: paceline.HPSGD(*doubles(), codec="qsgd")),
        "float64 buffers": error_of(lambda: paceline.HPSGD(*doubles_in_buffers(), codec="qsgd")),
        "one refuses": error_of(lambda: paceline.HPSGD(mlp() if rank == 1 else model, optimizer)),
        "silence": error_of(lambda: paceline.HPSGD(model, optimizer, silence_seconds=0)),
        "period": error_of(lambda: paceline.LocalSGD(model, optimizer, period=0)),
        "one period": error_of(lambda: paceline.LocalSGD(model, optimizer, period=0 if rank == 1 else 1)),
        "one timeout": error_of(lambda: paceline.HPSGD(model, optimizer, timeout_seconds=-1 if rank == 1 else 9)),
        "one codec": error_of(lambda: paceline.HPSGD(model, optimizer, codec=Broken() if rank == 1 else "qsgd")),
        "normalized": error_of(lambda: paceline.LocalSGD(model, optimizer, normalize=True, codec="one-bit")),
        "unlike models": error_of(lambda: paceline.HPSGD(*wider(8 + (rank == 2)))),
        "unlike members": error_of(lambda: paceline.HPSGD(model, optimizer, period=1 + (rank == 2))),
        "unlike codecs": error_of(lambda: paceline.HPSGD(model, optimizer, codec="qsgd" if rank == 2 else "one-bit")),
    }
    with paceline.HPSGD(model, optimizer) as sync:
        found["twice"] = error_of(lambda: paceline.HPSGD(model, optimizer))
    found["closed"] = error_of(sync.flush)
    found["closed twice"] = error_of(sync.close)
    closure = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.SSGD(model, closure):
        found["closure"] = error_of(lambda: closure.step(lambda: 1.0))
        closure.step(None)
    found["scaled"] = error_of(still_scaled)
    found["unfrozen"] = error_of(unfrozen)
    found["added"] = error_of(added)
    return found


class Broken(QSGD):
    """A codec whose kernel does not compile here."""

    def encode(self, gradient, generator=None):
        raise TypeError("no kernel for this machine")


def still_scaled():
    model = mlp()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, fused=True), torch.amp.GradScaler("cpu")
    with paceline.SSGD(model, optimizer) as sync:
        scaler.scale(model(torch.ones(2, 6)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert sync.steps == 1
        scaler.scale(model(torch.ones(2, 6)).sum()).backward()
        scaler.step(optimizer)


def frozen():
    model = mlp().requires_grad_(False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def doubles():
    model = mlp(dtype=torch.float64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def doubles_in_buffers():
    model = mlp(norm=True)
    model[1].running_mean = model[1].running_mean.double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def wider(width):
    model = nn.Linear(3, width)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def unfrozen():
    model = mlp()
    model[0].requires_grad_(False)
    with paceline.HPSGD(model, torch.optim.SGD(model.parameters(), lr=0.1)) as sync:
        model[0].requires_grad_(True)
        sync.flush()


def added():
    model = mlp()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with paceline.HPSGD(model, optimizer) as sync:
        optimizer.add_param_group({"params": list(model[0].parameters())})
        sync.flush()
