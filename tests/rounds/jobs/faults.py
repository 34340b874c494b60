"""Jobs in which something goes wrong."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

import paceline
from paceline.drivers.ranks import heartbeats
from paceline.drivers.rounds import exchange, loop, synchronizer
from tests.averaging.jobs.faults import tell_the_one_who_waits, wait_for_the_others
from tests.ddp.jobs import Injection, fails_once
from tests.distributed.constructor_jobs import awake
from tests.rounds.jobs.common import OPTIMIZERS, batch, compute, digest, error_of, network, setup, tally


def raises(culprit, k):
    """An exception in the loop of one rank; what every rank says, and how long that took."""
    rank, began = dist.get_rank(), time.monotonic()

    def run():
        model, _, sync = setup("lgc", k=k)
        with sync:
            for number in range(200):
                compute(sync, model, *batch(number, rank))
                if rank == culprit and number == 3:
                    raise ZeroDivisionError("out of luck\nand of patience")
                sync.step()

    return [error_of(run), time.monotonic() - began]


def beyond_the_codec(culprit):
    """A contribution that is finite, and beyond what its codec can carry."""

    def run():
        model, _, sync = setup("full", codec="float16", plan="two-step")
        with sync:
            for number in range(50):
                compute(sync, model, *batch(number, dist.get_rank()))
                if number == 3 and dist.get_rank() == culprit:
                    next(model.parameters()).grad[0, 0] = 1e6
                sync.step()

    return error_of(run)


def fails_first(culprit):
    """An exception on one rank before it takes its first batch, while the others wait for its epoch."""
    rank, began = dist.get_rank(), time.monotonic()

    def run():
        model, _, sync = setup("lgc", k=1)
        with sync:
            if rank == culprit:
                raise ZeroDivisionError("no data here")
            for inputs, targets in sync.epoch([batch(0, rank)]):
                compute(sync, model, inputs, targets)
                sync.step()

    return [error_of(run), time.monotonic() - began]


def until_it_ends(silence_seconds, folder, k=2):
    """Train until something goes wrong, and say what it was; leaves word in the folder when training has begun."""
    rank = dist.get_rank()
    deadline = time.monotonic() + 45

    def run():
        model, _, sync = setup("lgc", k=k, silence_seconds=silence_seconds, timeout_seconds=40.0)
        with sync:
            while time.monotonic() < deadline:
                compute(sync, model, *batch(sync.draws, rank))
                sync.step()
                if sync.version == 5:
                    (Path(folder) / f"training-{rank}").touch()
                time.sleep(0.002)

    return error_of(run)


def drifts(culprit, how):
    """One rank's model changes behind the rounds' back; what all say of it, and when."""
    rank = dist.get_rank()
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def run():
        with paceline.LGCSync(model, optimizer, k=3, timeout_seconds=30.0) as sync:
            for number in range(12):
                compute(sync, model, *batch(number, rank))
                sync.step()
                if number == 3 and rank == culprit and how == "scheduler":
                    scheduler.step()
                if number == 3 and rank == culprit and how == "weights":
                    model[0].weight.data[0, 1].neg_()

    return error_of(run)


def overflows(culprits, bad_draws, rounds):
    """Loss scaling in which some gradients overflow, on some ranks; every round waits for all."""
    rank = dist.get_rank()
    model, made, sync = setup("full", norm=True, blocks=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    came, warmed = [], 0
    with sync:
        while sync.version < rounds:
            inputs, targets = batch(sync.draws, rank)
            bad = rank in culprits and sync.draws in bad_draws
            for x, y in sync.blocks(inputs, targets):
                loss = F.cross_entropy(model(x), y)
                scaler.scale(loss * float("inf") if bad else loss).backward()
            scaler.unscale_(made)
            came.append(sync.step())
            scaler.update()
            warmed += 1
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values())
    return {"digest": digest(model, made), "scale": scaler.get_scale(), "came": came, "finite": finite, **tally(sync)}


def never_constructs(culprit, kind, timeout_seconds):
    """One rank does not come to the constructor: what the others say, and after how long; then all come."""
    rank = dist.get_rank()
    if rank != culprit:
        awake(f"never_constructs {kind}", dist.get_world_size() - 1)
        began = time.monotonic()
        said, seconds = error_of(lambda: construct(kind, timeout_seconds)), time.monotonic() - began
        tell_the_one_who_waits()
    else:
        said, seconds = None, 0.0
        wait_for_the_others(culprit)
    with construct(kind, 30.0):
        return [said, seconds]


def construct(kind, timeout_seconds):
    model = network()
    limits = {"timeout_seconds": timeout_seconds, "silence_seconds": 20.0}
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    if kind == "lgc":
        return paceline.LGCSync(model, optimizer, k=1, **limits)
    return paceline.DiLoCo(model, optimizer, **limits)


def does_not_deliver(culprit, flushing):
    """One rank is alive, and does not come to a round, or to a flush; what all ranks say."""
    rank = dist.get_rank()

    def run():
        model, _, sync = setup("full", timeout_seconds=1.0)
        with sync:
            compute(sync, model, *batch(0, rank))
            sync.step()
            if rank == culprit:
                wait_for_the_others(culprit)
            if flushing:
                sync.flush()
            compute(sync, model, *batch(1, rank))
            sync.step()

    said = error_of(run)
    if rank != culprit:
        tell_the_one_who_waits()
    return said


def flushes_where_docs_say(kind, bad, every, rounds, saves):
    """The loop that the docs print, with a flush or a state in it, and batches that are not finite.

    `bad` are [rank, draw]. Return at which version each batch was computed, and of whom each round was.
    """
    rank, trained, states = dist.get_rank(), [], []
    model, made, sync = setup(kind, **({} if kind == "full" else {"k": dist.get_world_size()}), record=True)
    loader = [batch(number, rank) for number in range(rounds)]
    with sync:
        for inputs, targets in sync.epoch(loader):
            trained.append(sync.version)
            for x, y in sync.blocks(inputs, targets):
                loss = F.cross_entropy(model(x), y)
                (loss * float("nan") if [rank, sync.draws] in bad else loss).backward()
            sync.step()
            if sync.version % every == 0:
                if saves:
                    states.append([sync.version, sync.state_dict()["version"]])
                else:
                    states.append([sync.version, sync.flush()])
    fresh = [sorted(share.worker for share in closed.step.fresh) for closed in sync.history]
    return {"trained": trained, "fresh": fresh, "states": states, "digest": digest(model, made), **tally(sync)}


def flushes_outside_of_epochs(kind, bad, every, rounds):
    """A loop without epoch(): a flush at versions, or after each step (`every` is 0) with a collective behind it."""
    rank, trained = dist.get_rank(), []
    model, made, sync = setup(kind, **({} if kind == "full" else {"k": 1}), record=True)
    with sync:
        while (sync.draws if every == 0 else sync.version) < rounds:
            trained.append(sync.version)
            for x, y in sync.blocks(*batch(sync.draws, rank)):
                loss = F.cross_entropy(model(x), y)
                (loss * float("nan") if [rank, sync.draws] in bad else loss).backward()
            sync.step()
            if every == 0:
                met = torch.tensor([float(sync.flush())])
                dist.all_reduce(met)
                trained[-1] = int(met)
            elif sync.version % every == 0:
                sync.flush()
    fresh = [sorted(share.worker for share in closed.step.fresh) for closed in sync.history]
    return {"trained": trained, "fresh": fresh, "digest": digest(model, made), **tally(sync)}


def fails_in_the_constructor(culprit, kind):
    """One rank's constructor fails when all have met; what all ranks say, how soon, and what threads are left there."""
    rank, began = dist.get_rank(), time.monotonic()
    last = {"lgc": "rounds.synchronizer.Outcomes", "diloco": "averaging.averager.AveragingLoop"}[kind]

    def run():
        with construct(kind, 30.0) as sync:
            if kind == "lgc":
                compute(sync, sync._watched, *batch(0, rank))
                sync.step()
            sync.flush()

    if rank != culprit:
        return [error_of(run), time.monotonic() - began, []]
    with mock.patch(f"paceline.drivers.{last}", side_effect=ZeroDivisionError("out of luck")):
        said = error_of(run)
    left = [each.name for each in threading.enumerate() if each.name.startswith("paceline")]
    return [said, time.monotonic() - began, left]


def failing_twice(culprit):
    """Run by run, until no call is left to fail: one rank has no memory for a sum, and a call fails in what follows.

    Return for each: what was failed, and what this rank says.
    """
    heartbeats.INTERVAL_SECONDS, loop.JOIN_SECONDS, loop.LINGER_SECONDS = 0.02, 0.5, 0.5
    found, failed, ours, begin = [], set(), dist.get_rank() == culprit, exchange.start
    while True:
        injection = Injection(failed, (exchange, synchronizer))

        def run(injection=injection):
            model, _, sync = setup("full")
            with sync:
                for number in range(5):
                    compute(sync, model, *batch(number, dist.get_rank()))
                    if ours and number == 3:
                        exchange.start = fails_once(injection, MemoryError("no memory"), begin)
                    sync.step()

        if ours:
            threading.setprofile(injection)
            sys.setprofile(injection)
        said = error_of(run)
        injection.armed, exchange.start = False, begin
        sys.setprofile(None)
        threading.setprofile(None)
        found.append([injection.hit, said])
        more = torch.tensor([float(bool(injection.hit))])
        dist.all_reduce(more)
        if not more:
            return found
