"""Jobs that train, and leave word of what all ranks must hold alike."""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.rounds.jobs.common import KINDS, LIMITS, OPTIMIZERS, batch, compute, digest, network, setup, tally


def alike(kind, optimizer, rounds, norm=True, **settings):
    """Train with random pauses, one rank slower; return a digest of everything after every round and flush."""
    rank, found = dist.get_rank(), []
    model, made, sync = setup(
        kind, optimizer=optimizer, norm=norm, on_round=lambda closed: found.append(digest(model, made)), **settings
    )
    chance = random.Random(rank)
    begun = digest(model, made)
    with sync:
        for number in range(rounds):
            inputs, targets = batch(number, rank)
            compute(sync, model, inputs, targets, lambda: time.sleep(chance.random() * 0.002 * (1 + 4 * (rank == 2))))
            sync.step()
            if number == rounds // 2:
                sync.flush()
                found.append(digest(model, made))
        sync.flush()
        found.append(digest(model, made))
    return {"begun": begun, "found": found, **tally(sync)}


def add_a_third(model, *_):
    model.thirds += 1 / 3


def counts_in_doubles(kind, rounds, **settings):
    """A buffer in float64 beside float32 parameters, to which each batch adds a third: what it comes to."""
    model, _, sync = setup(kind, **settings)
    sync.close()
    model.register_buffer("thirds", torch.zeros(1, dtype=torch.float64))
    model.register_forward_hook(add_a_third)
    made = OPTIMIZERS["sgd"](model.parameters())
    with KINDS[kind](model, made, **LIMITS, **settings) as sync:
        for number in range(rounds):
            compute(sync, model, *batch(number, dist.get_rank()))
            sync.step()
    return {"thirds": float(model.thirds), "digest": digest(model, made)}


def like_plain(kind, rounds, optimizer="sgd", norm=False, clip=None, samples=12, **settings):
    """The greatest distance of the parameters from those of plain data-parallel training by the same batches.

    That is DistributedDataParallel; with `clip` a loop that clips the gradient of each rank before it adds them up.
    """
    rank = dist.get_rank()
    model, _, sync = setup(kind, optimizer=optimizer, norm=norm, seed=5, **settings)
    with sync:
        for number in range(rounds):
            compute(sync, model, *batch(number, rank, samples))
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            sync.step()
    plain = network(5, norm)
    steps = OPTIMIZERS[optimizer](plain.parameters())
    wrapped = plain if clip else DistributedDataParallel(plain)
    for number in range(rounds):
        inputs, targets = batch(number, rank, samples)
        steps.zero_grad()
        F.cross_entropy(wrapped(inputs), targets).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
            for parameter in plain.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(dist.get_world_size())
        steps.step()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    moved = max(
        float((a - b).abs().max()) for a, b in zip(plain.parameters(), network(5, norm).parameters(), strict=True)
    )
    return {"distance": max(float((a - b).abs().max()) for a, b in pairs), "moved": moved, **tally(sync)}


SETTINGS = [
    ("full", {}),
    ("fastest-k", {"k": 2}),
    ("fastest-k", {"k": "auto", "most_behind": 1}),
    ("lgc", {"k": 1}),
    ("lgc", {"k": 1, "most_behind": 1, "norm": True}),
    ("lgc", {"k": 2}),
    ("lgc", {"k": 2, "scale_partial": False, "norm": True}),
    ("lgc", {"k": 2, "warmup_rounds": 20, "most_behind": 2}),
    ("lgc", {"k": 3}),
    ("lgc", {"k": "auto"}),
]


def schedules(place, count):
    """Short stretches of training, one after the other, each of its own delays, blocks, epochs and bad numbers."""
    kind, settings = SETTINGS[place]
    model, made, sync = setup(kind, **settings)
    found = []
    with sync:
        for seed in range(place * count, (place + 1) * count):
            _schedule(seed, model, sync)
            if seed % 2:
                sync.flush()
            found.append([sync.version, digest(model, made)])
    return {"ends": [*found, [sync.version, digest(model, made)]], **tally(sync)}


def _schedule(seed, model, sync):
    """An epoch of unequal loaders, or different numbers of rounds up to a flush; all ranks end at one place."""
    rank, alike = dist.get_rank(), random.Random(seed)
    own = random.Random(100 * seed + rank)
    sync._blocks = alike.choice([1, 2, 4])
    slow_seconds = alike.choice([0.0, 0.001, 0.004]) * (rank == alike.randrange(3))
    bad, by_epoch, rounds = alike.random() < 0.2, alike.random() < 0.6, alike.choice([None, 3])

    def take(inputs, targets):
        if bad and own.random() < 0.2:
            inputs = inputs * float("nan")
        compute(sync, model, inputs, targets, lambda: time.sleep(slow_seconds + own.choice([0, 0, 0.0005])))
        sync.step(F.cross_entropy(model(inputs), targets, reduction="none") if seed % 3 == 0 else None)

    if by_epoch:
        for inputs, targets in sync.epoch([batch(number, rank) for number in range(own.randint(1, 4))], rounds):
            take(inputs, targets)
    else:
        for number in range(own.randint(0, 4)):
            take(*batch(number, rank))
        sync.flush()


def some_close_first(first):
    """One rank closes while the others flush and train on; a bad gradient before that is counted all the same."""
    rank = dist.get_rank()
    model, made, sync = setup("full")
    with sync:
        compute(sync, model, *batch(0, rank))
        sync.step()
        if rank == first:
            model(torch.full((2, 6), float("nan"))).sum().backward()
            sync.step()
        else:
            sync.flush()
            for number in range(3):
                compute(sync, model, *batch(number, rank))
                sync.step()
    return {"version": sync.version, "digest": digest(model, made), **tally(sync)}
