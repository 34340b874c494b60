"""Jobs that train by epochs."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.rounds.jobs.checkpoints import saved
from tests.rounds.jobs.common import batch, compute, digest, setup, tally
from tests.waiting import until


class Loader:
    """A loader that notes which of its batches were taken."""

    def __init__(self, length, rank):
        self._batches = [batch(number, rank) for number in range(length)]
        self.taken = []

    def __len__(self):
        return len(self._batches)

    def __iter__(self):
        for number, each in enumerate(self._batches):
            self.taken.append(number)
            yield each


def epochs(lengths, count, slow=None, late=None, rounds=None, flush=False, flush_every=None, **settings):
    """Train some epochs; return at which round each ended and with what, and which batches this rank took in each.

    Rank `slow` takes longer for its batches, rank `late` as long as the others take for two rounds or their last.
    """
    rank, found, taken, flushed = dist.get_rank(), [], [], []
    model, made, sync = setup("lgc", **settings)
    loader = Loader(lengths[rank], rank)
    with sync:
        for _ in range(count):
            before = len(loader.taken)
            for inputs, targets in sync.epoch(loader, rounds):
                time.sleep(0.025 if rank == slow else 0.005)
                if rank == late:
                    closed = min(sync.version + 2, sync._epoch_ends)
                    until(lambda closed=closed: sync._loop.exchange.next_version >= closed, f"round {closed} is over")
                compute(sync, model, inputs, targets)
                sync.step()
                if flush_every and sync.version % flush_every == 0:
                    sync.flush()
                    flushed.append([sync.version, digest(model, made)])
            found.append([sync.version, digest(model, made)])
            taken.append(loader.taken[before:])
            if flush:
                sync.flush()
    return {"ends": found, "taken": taken, "flushed": flushed, **tally(sync)}


def broken_off(after):
    """Break out of an epoch, on each rank after its own number of batches; then flush, and train a whole one."""
    rank, found = dist.get_rank(), []
    model, made, sync = setup("lgc", k=2)
    loader = Loader(4, rank)
    with sync:
        for number, (inputs, targets) in enumerate(sync.epoch(loader), start=1):
            compute(sync, model, inputs, targets)
            sync.step()
            if number == after[rank]:
                break
        sync.flush()
        found.append([sync.version, digest(model, made)])
        for inputs, targets in sync.epoch(loader):
            compute(sync, model, inputs, targets)
            sync.step()
        found.append([sync.version, digest(model, made)])
    return {"ends": found, "first": loader.taken[after[rank] : after[rank] + 1]}


def second_loader(lengths):
    """Two loaders, each of another length on each rank."""
    rank, found = dist.get_rank(), []
    model, made, sync = setup("lgc", k=3)
    with sync:
        for each in lengths:
            for inputs, targets in sync.epoch(Loader(each[rank], rank)):
                compute(sync, model, inputs, targets)
                sync.step()
            found.append([sync.version, digest(model, made)])
    return found


def goes_on_within_an_epoch(after, epochs=3, samples=40):
    """One life, and one that is saved after some rounds and goes on: the samples of each epoch, and the models."""
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs, targets = batch(0, 0, samples)

    def live(state=None, until=None):
        model, made, sync = setup("full", seed=3)
        data = TensorDataset(inputs, targets, torch.arange(samples))
        sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=5)
        loader, first, taken = DataLoader(data, batch_size=4, sampler=sampler), 0, [[] for _ in range(epochs)]
        if state is not None:
            model.load_state_dict(state["model"])
            made.load_state_dict(state["optimizer"])
            sync.load_state_dict(state["sync"])
            first = state["epoch"]
        with sync:
            for epoch in range(first, epochs):
                sampler.set_epoch(epoch)
                for x, y, indices in sync.epoch(loader):
                    compute(sync, model, x, y)
                    sync.step()
                    taken[epoch] += indices.tolist()
                    if sync.version == until:
                        saved_sync = sync.state_dict()
                        state = {"model": model.state_dict(), "optimizer": made.state_dict()}
                        return taken, saved(state | {"sync": saved_sync, "epoch": epoch})
        return taken, digest(model, made)

    whole, ended = live()
    before, state = live(until=after)
    rest, resumed = live(state)
    pairs = zip(before, rest, strict=True)
    return {"whole": whole, "parts": [one + two for one, two in pairs], "digests": [ended, resumed]}
