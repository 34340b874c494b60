"""What ranks that prune together can be told to do. What a job returns goes through JSON."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from tests.data.pruning_play import SMALL, losses_of, passes

SAMPLES = 61
KINDS = {
    "fine-pruning": lambda samples=SAMPLES, **more: paceline.FinePruning(samples, **SMALL | more),
    "info-batch": lambda samples=SAMPLES, **more: paceline.InfoBatch(samples, epochs=9, **more),
}


@functools.cache
def pairs():
    """Ranks 0 and 1, ranks 2 and 3; all ranks must come here."""
    return [dist.new_group([0, 1]), dist.new_group([2, 3])]


def own_group(world):
    return None if world == 4 else pairs()[dist.get_rank() // 2]


def handed_out(kind, world, batch_size, epochs, drop_last=False):
    """All the batches of this rank, with what was learned from them."""
    pruning = KINDS[kind](batch_size=batch_size, drop_last=drop_last, process_group=own_group(world))
    taken = passes(pruning, epochs)
    return {"taken": taken, "times_pruned": pruning.times_pruned.tolist(), "difficulty": pruning.difficulty().tolist()}


def watched(kind, watch, epochs):
    """What each rank knows of the losses of the watched samples."""
    pruning = KINDS[kind](batch_size=3, watch=watch)
    passes(pruning, epochs)
    return [[sample, found] for sample, found in pruning.loss_history.items()]


def resumed(kind, epochs, stop_after):
    """Save in mid-epoch, each rank its own, and go on with another sampler."""
    first, second = KINDS[kind](batch_size=3), KINDS[kind](batch_size=3)
    before = passes(first, epochs, stop_after=stop_after)
    second.load_state_dict(first.state_dict())
    return before + passes(second, epochs)


def normalised(kind, samples, batch_size, epochs):
    """Train a network with BatchNorm under DDP, pairs of ranks each by themselves; the sizes of a rank's batches."""
    group = own_group(2)
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = DistributedDataParallel(network, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    make = {"fine-pruning": lambda: paceline.FinePruning, "info-batch": lambda: paceline.InfoBatch}[kind]()
    settings = {**SMALL, "prune": 32} if kind == "fine-pruning" else {"epochs": epochs}
    pruning, sizes = make(samples, batch_size=batch_size, process_group=group, **settings), []
    while pruning.epoch <= epochs:
        for batch in pruning:
            optimizer.zero_grad()
            pruning.observe(model(inputs[batch]).square().squeeze(1)).backward()
            optimizer.step()
            sizes.append(len(batch))
    return sizes


def refused(how):
    """What each rank is told when ranks do not do the same."""
    rank = dist.get_rank()
    try:
        if how == "seeds":
            next(iter(KINDS["fine-pruning"](batch_size=3, seed=rank)))
        elif how == "samples":
            next(iter(KINDS["fine-pruning"](60 + (rank == 2), batch_size=3)))
        elif how == "early":
            pruning = KINDS["fine-pruning"](batch_size=3)
            for batch in pruning:
                pruning.observe(losses_of(batch, 1))
                if rank == 3:
                    pruning.end_epoch()
                    break
        elif how == "breaks":
            pruning = KINDS["fine-pruning"](batch_size=3)
            for batch in pruning:
                pruning.observe(losses_of(batch, 1))
                if rank == 2:
                    break
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                next(iter(pruning))
        elif how == "state":
            pruning = KINDS["fine-pruning"](batch_size=3)
            passes(pruning, 1, stop_after=2)
            pruning.load_state_dict(pruning.state_dict() | {"rank": (rank + 1) % 4})
        elif how == "rank":
            KINDS["fine-pruning"](batch_size=3, rank=0, world_size=2).__len__()
        elif how == "absent" and rank != 1:
            next(iter(KINDS["fine-pruning"](batch_size=3, timeout_seconds=1.0)))
    except (RuntimeError, ValueError, TimeoutError) as error:
        return str(error)
    return ""


def trained(folder, epochs, *, until=None):
    """Train a small network under DDP, and keep everything after every step; stop where told, or go on to the end.

    Goes on from the last step that all ranks have kept.
    """
    rank, folder = dist.get_rank(), Path(folder)
    torch.manual_seed(0)
    inputs, targets = torch.randn(SAMPLES, 5), torch.arange(SAMPLES) % 3
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    pruning = KINDS["fine-pruning"](batch_size=4)
    step, held = 0, _newest(folder, rank)
    if held is not None:
        step = held
        state = torch.load(folder / f"{rank}-{step}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        pruning.load_state_dict(state["pruning"])
    while pruning.epoch <= epochs:
        for batch in pruning:
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(inputs[batch]), targets[batch], reduction="none")
            pruning.observe(losses).backward()
            optimizer.step()
            step += 1
            parts = {"model": model, "optimizer": optimizer, "pruning": pruning}
            beside = folder / f"{rank}.new"
            torch.save({name: part.state_dict() for name, part in parts.items()}, beside)
            beside.rename(folder / f"{rank}-{step}.pt")
            if step == until:
                dist.recv(torch.zeros(1), src=1 - rank)  # which nobody sends: it ends when the other is killed
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"steps": step, "went_on_from": held, "weights": weights.tolist(), "pruned": pruning.times_pruned.tolist()}


def _newest(folder, rank):
    found = torch.tensor([max((int(path.stem.split("-")[1]) for path in folder.glob(f"{rank}-*.pt")), default=0)])
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return int(found) or None
