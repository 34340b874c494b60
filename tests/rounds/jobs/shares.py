"""Jobs of unequal batches: weighed by their samples, and assigned by speed."""

from __future__ import annotations

import copy
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline.strategies.shares import SharesBySpeed
from tests.rounds.jobs.common import OPTIMIZERS, batch, compute, digest, error_of, network, setup, tally

SHARES = SharesBySpeed(batch_size=12, period=3)
SAMPLE_SECONDS = 0.002


def like_one_process(kind, rounds, sizes, said_by, **settings):
    """The greatest distance of the parameters from those of one process that computes all batches as one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, _, sync = setup(kind, seed=5, **settings)
    with sync:
        for number in range(rounds):
            inputs, targets = batch(number, rank, sizes[(rank + number) % world])
            if said_by == "blocks":
                compute(sync, model, inputs, targets)
                sync.step()
            else:
                F.cross_entropy(model(inputs), targets).backward()
                sync.step(samples=len(inputs))
    plain = network(5)
    steps = OPTIMIZERS["sgd"](plain.parameters())
    for number in range(rounds):
        batches = [batch(number, each, sizes[(each + number) % world]) for each in range(world)]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        steps.zero_grad()
        F.cross_entropy(plain(inputs), targets).backward()
        steps.step()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    began = network(5).parameters()
    moved = max(float((a - b).abs().max()) for a, b in zip(plain.parameters(), began, strict=True))
    return {"distance": max(float((a - b).abs().max()) for a, b in pairs), "moved": moved, **tally(sync)}


def weights(rounds, sizes, **settings):
    """The rounds of lgc with unequal batches, as rank 0 saw them: sizes that arrived, and weights."""
    rank, found = dist.get_rank(), []
    model, made, sync = setup("lgc", record=True, **settings)
    with sync:
        for number in range(rounds):
            compute(sync, model, *batch(number, rank, sizes[rank]), lambda: time.sleep(0.003 * (rank == 2)))
            sync.step()
    for closed in sync.history:
        fresh, late = (
            [(share.worker, share.weight) for share in shares] for shares in (closed.step.fresh, closed.step.late)
        )
        found.append([fresh, late, closed.step.previous_mean_weight])
    arrived = [(each.worker, each.batch_samples) for closed in sync.history for each in closed.arrivals]
    return {"rounds": found, "arrived": arrived, "digest": digest(model, made), **tally(sync)}


def by_speed(kind, rounds, slow, **settings):
    """Train with batches of the sizes that are assigned, rank `slow` three times slower; half-way on from a state."""
    rank = dist.get_rank()
    model, made, sync = setup(kind, shares=SHARES, **settings)
    sizes, kept = [], None

    def train(sync, model, until):
        while sync.version < until:
            inputs, targets = batch(sync.draws, rank, sync.samples)
            sizes.append([sync.version, sync.samples])
            seconds = SAMPLE_SECONDS * (1 + 2 * (rank == slow))
            for x, y in sync.blocks(inputs, targets):
                time.sleep(seconds * len(x))
                F.cross_entropy(model(x), y).backward()
            sync.step()
        sync.flush()

    with sync:
        train(sync, model, rounds // 2)
        kept = copy.deepcopy((sync.state_dict(), model.state_dict(), made.state_dict(), sync.samples))
    model, made, sync = setup(kind, shares=SHARES, **settings)
    with sync:
        model.load_state_dict(kept[1])
        made.load_state_dict(kept[2])
        sync.load_state_dict(kept[0])
        assert sync.samples == kept[3]
        train(sync, model, rounds)
    return {"sizes": sizes, "digest": digest(model, made), "about": sorted(kept[0]["about"])}


def refused_shares():
    """What is refused: no size said, states of other shares, ranks that have different ones, what is none."""
    rank = dist.get_rank()
    said = {}
    model, _, sync = setup("full", shares=SHARES)
    F.cross_entropy(model(batch(0, rank)[0]), batch(0, rank)[1]).backward()
    said["unsaid"] = error_of(sync.step)
    with sync:
        compute(sync, model, *batch(0, rank))
        sync.step()
        state, weights = sync.state_dict(), copy.deepcopy(model.state_dict())
    for name, shares in (("equal", None), ("other", SharesBySpeed(batch_size=8)), ("same", SHARES)):
        model, _, sync = setup("full", shares=shares)
        model.load_state_dict(weights)
        with sync:
            said[name] = error_of(lambda sync=sync: sync.load_state_dict(state))
    said["apart"] = error_of(lambda: setup("full", shares=SHARES if rank else None))
    said["none"] = error_of(lambda: setup("full", shares="speed"))
    return said


def taken(kind, rounds, samples, slow, workers, **settings):
    """How often each sample was taken from the common order by any rank, also by ranks that go on from their states."""
    rank, seen = dist.get_rank(), []
    data = TensorDataset(torch.randn(samples, 6), torch.arange(samples) % 3, torch.arange(samples))
    state = weights = kept = None
    sizes, twice = set(), False
    for _ in range(2):
        model, optimizer, sync = setup(kind, shares=SHARES, blocks=4, **settings)
        with sync:
            if state is not None:
                model.load_state_dict(weights)
                optimizer.load_state_dict(kept)
                sync.load_state_dict(state)
            loader = DataLoader(data, batch_sampler=sync.sampler(data), num_workers=workers)
            for inputs, targets, numbers in sync.epoch(loader, rounds=rounds):
                for x, y in sync.blocks(inputs, targets):
                    F.cross_entropy(model(x), y).backward()
                    time.sleep(SAMPLE_SECONDS * len(x) * (4 if rank == slow else 1))
                sync.step()
                seen += numbers.tolist()
                sizes.add(len(numbers))
                twice |= numbers.tolist() in open_batches(sync, sync._samplers[0].state_dict())
            state = sync.state_dict()
            weights, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    open_now = [sample for batch in open_batches(sync, state["samplers"][0]) for sample in batch]
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, seen + open_now)
    counts = torch.bincount(torch.tensor([each for of_rank in everybody for each in of_rank]), minlength=samples)
    return {
        "fewest": int(counts.min()),
        "most": int(counts.max()),
        "samples": len(seen),
        "sizes": sorted(sizes),
        "rounds": sync.version,
        "trained and open": twice,
    }


def open_batches(sync, state):
    """The batches that ranks would train again that go on from this state."""
    order = sync._samplers[0]._order
    return [order(epoch)[first : first + size].tolist() for epoch, first, size in state["open"]]
