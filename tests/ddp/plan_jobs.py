"""What four processes can be told to do with plans. Every job runs on all; what it returns goes through JSON."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import logging
import random
import threading
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from paceline.codecs import QSGD
from paceline.codecs.naming import parse_codec
from paceline.drivers.ddp import compress
from paceline.drivers.ranks.exchanging import ExchangeScheduler, exchange_now
from paceline.exchanges import exchange, make_exchange
from paceline.exchanges.lockstep import run_in_lockstep
from paceline.exchanges.plans import plans_of
from tests.ddp.jobs import digest, error_of, gradient, small_cnn

SIZES = (5_000, 700, 12_345, 3, 40_000)  # buckets of all kinds, under way at once
LAST_TOGETHER = (0, 2, 4)  # 700 and 12,345 travel together, and so do the last two
DEADLINE_SECONDS = 40.0


@functools.cache
def groups():
    return [dist.new_group() for _ in range(4)]


def shapes_of(size):
    return [torch.Size([size // 5, 5])] if size % 5 == 0 else [torch.Size([size])]


def vectors(place, step):
    draws = torch.Generator().manual_seed(1000 * step + place)
    return [torch.randn(size, generator=draws) for size in SIZES]


def seeded(place, step, number):
    return torch.Generator().manual_seed(10_000 * step + 100 * place + number)


def real_and_in_lockstep(codec, plan, steps=2, jitter=0.0):
    """Several vectors at once through the scheduler, with pauses that differ from rank to rank; and in one process."""
    parsed, world, ours = parse_codec(codec), dist.get_world_size(), dist.get_rank()
    if plan not in plans_of(parsed):
        raise ValueError(f"{codec} cannot {plan}")
    pauses = random.Random(ours)
    made = [[make_exchange(parsed, shapes_of(size), place, world, plan) for size in SIZES] for place in range(world)]
    over_network = [make_exchange(parsed, shapes_of(size), ours, world, plan) for size in SIZES]
    scheduler, found = ExchangeScheduler(groups(), torch.device("cpu")), []
    for step in range(steps):
        ended, done = {}, threading.Event()

        def finished(number, underway, what, ended=ended, done=done):
            time.sleep(jitter * pauses.random())
            ended[number] = what
            if len(ended) == len(SIZES):
                done.set()

        for number, (one, vector) in enumerate(zip(over_network, vectors(ours, step), strict=True)):
            time.sleep(jitter * pauses.random())
            protocol = one.run(vector, seeded(ours, step, number))
            scheduler.begin(protocol, functools.partial(finished, number))
            if number in LAST_TOGETHER:
                scheduler.send()
        if not done.wait(DEADLINE_SECONDS):
            raise TimeoutError(f"{len(ended)} of {len(SIZES)} exchanges have ended")
        for number in range(len(SIZES)):
            runs = [
                made[place][number].run(vectors(place, step)[number], seeded(place, step, number))
                for place in range(world)
            ]
            wanted = run_in_lockstep(runs)[ours]
            largest = float(wanted.abs().max())
            found.append(float((ended[number] - wanted).abs().max()) / max(largest, 1e-30))
    digests = hashlib.sha256(b"".join(ended[number].numpy().tobytes() for number in range(len(SIZES)))).hexdigest()
    return {"apart": max(found), "digest": digests}


def at_once(codec, plan):
    """One vector, waited for step by step, and the same through the scheduler."""
    parsed, world, ours, sent = parse_codec(codec), dist.get_world_size(), dist.get_rank(), []
    exchanges = [make_exchange(parsed, shapes_of(5000), ours, world, plan) for _ in range(2)]
    vector, done, ended = vectors(ours, 0)[0], threading.Event(), []
    now = exchange_now(exchanges[0].run(vector, seeded(ours, 0, 0)), groups(), sent.append)
    scheduler = ExchangeScheduler(groups(), torch.device("cpu"))  # whose thread ends with it
    scheduler.begin(exchanges[1].run(vector, seeded(ours, 0, 0)), lambda *told: (ended.extend(told), done.set()))
    scheduler.send()
    if not done.wait(DEADLINE_SECONDS):
        raise TimeoutError("the exchange did not end")
    return {"same": torch.equal(now, ended[1]), "bytes": [sum(sent), ended[0].given_bytes]}


def batch(number):
    draws = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(16, 1, 8, 8, generator=draws), torch.randint(10, (16,), generator=draws)


def hooked(codec, plan, **options):
    model = DistributedDataParallel(small_cnn(), bucket_cap_mb=0.02, **options)
    return model, compress(model, parse_codec(codec), plan=plan)


def backward(model, number):
    inputs, targets = batch(number)
    model.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    return gradient(model)


def nothing_is_lost(codec, plan, steps=4):
    """The mean gradients and what all ranks hold back, against the gradients; after step 1 the buckets are others."""
    plain, (model, compression) = DistributedDataParallel(small_cnn()), hooked(codec, plan)
    wanted, applied, layouts = 0.0, 0.0, []
    for number in range(steps):
        wanted = wanted + backward(plain, number)
        applied = applied + backward(model, number)
        layouts.append([bucket["parameters"] for bucket in compression.state_dict()["buckets"]])
    held = {}
    for key, one in compression._exchanges._exchanges.items():
        sizes = [compression._exchanges._sizes[name] for name in key]
        held |= dict(zip(key, one.held().split(sizes), strict=True))
    residual = torch.cat([held[name] for name, _ in model.module.named_parameters()])
    dist.all_reduce(residual)
    scale = wanted.abs().max()
    return {
        "lost": float((applied + residual / dist.get_world_size() - wanted).abs().max() / scale),
        "held": float(residual.abs().max() / scale),
        "plans": compression.plans,
        "changed": layouts[0] != layouts[1],
    }


def resumed(codec, plan, other_plan=None):
    """Six steps at once, and three and three with a checkpoint between; the same buckets all the way."""
    options = {"find_unused_parameters": True}
    (straight, _), (model, before) = hooked(codec, plan, **options), hooked(codec, plan, **options)
    gradients = [backward(straight, number) for number in range(6)]
    for number in range(3):
        backward(model, number)
    again, after = hooked(codec, other_plan or plan, **options)
    state = before.state_dict()
    after.load_state_dict(state)
    last = [backward(again, number) for number in range(3, 6)][-1]
    sent = after.sent_bytes > before.sent_bytes
    refused = error_of(lambda: after.load_state_dict(state | {"ranks": 7}))
    return {"same": torch.equal(last, gradients[-1]), "refused": refused, "sent": sent}


def not_finite(codec, plan, culprit):
    """Three steps; in the second one rank has a NaN, and the step is left out."""
    model, _ = hooked(codec, plan)
    errors = []
    for number in range(3):
        inputs, targets = batch(number)
        if number == 1 and dist.get_rank() == culprit:
            inputs = inputs * float("nan")
        model.zero_grad()
        errors.append(
            error_of(lambda inputs=inputs, targets=targets: F.cross_entropy(model(inputs), targets).backward())
        )
    return {"errors": errors, "finite": bool(torch.isfinite(gradient(model)).all()), "digest": digest(model)}


class Slow(QSGD):
    """A codec that takes longer to encode than any gradient of these is on the wire."""

    def encode(self, vector, generator=None):
        time.sleep(0.05)
        return super().encode(vector, generator)


def slow_codec():
    """What is logged in twenty steps."""
    model = DistributedDataParallel(small_cnn())
    compress(model, Slow())
    told, handler = [], logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("paceline.ddp").addHandler(handler)
    for number in range(20):
        backward(model, number)
    logging.getLogger("paceline.ddp").removeHandler(handler)
    return told


def joined_buckets():
    """Layers of two sizes, a bucket for each parameter: what was sent together, and by which plans, in a step."""
    widths = (16, 16, 16, 700, 700, 16, 16, 10)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1e-6)
    plain = DistributedDataParallel(copy.deepcopy(model.module))
    compression, sent = compress(model, "qsgd levels=127"), []
    send = compression._send_begun
    compression._send_begun = lambda: (sent.append([exchange.plan for exchange in compression._begun]), send())

    for number in range(2):  # in the second the buckets are as they stay
        inputs, sent[:] = torch.randn(8, 16, generator=seeded(dist.get_rank(), 0, number)), []
        for each in (plain, model):
            each.zero_grad()
            each(inputs).square().sum().backward()
    wanted, found = gradient(plain), gradient(model)
    return {
        "sent": sent,
        "buckets": len(compression.state_dict()["buckets"]),
        "apart": float((found - wanted).norm() / wanted.norm()),
    }


def misused():
    model = DistributedDataParallel(small_cnn())
    return {
        "unknown": error_of(lambda: compress(model, "qsgd", plan="two step")),
        "impossible": error_of(lambda: compress(model, "qsgd", plan="all-reduce")),
        "unlike": error_of(lambda: compress(model, "qsgd", plan="gather" if dist.get_rank() else "two-step")),
    }


def sum_fails():
    """The owner of a shard cannot add up: all ranks hear of it, and the next exchange is right again."""
    world, ours = dist.get_world_size(), dist.get_rank()
    exchange_of_ours = make_exchange(parse_codec("one-bit"), shapes_of(5000), ours, world, "two-step")
    before = exchange._added
    heard = []
    for number in range(2):
        exchange._added = fail if number == 0 and ours == 1 else before
        try:
            found = exchange_now(exchange_of_ours.run(vectors(ours, number)[0]), groups(), [].append)
            heard.append(hashlib.sha256(found.numpy().tobytes()).hexdigest())
        except exchange.TroubleError as error:
            heard.append([error.summed, {place: trouble.name for place, trouble in error.troubles.items()}])
            exchange_of_ours.take_back()
    exchange._added = before
    return heard


def fail(*arguments):
    raise MemoryError("no memory for the sum")


def fails_alone():
    """An error that a rank has for itself ends its exchanges: later ones would meet the others' earlier steps."""
    codec, scheduler, ended = parse_codec("qsgd"), ExchangeScheduler(groups(), torch.device("cpu")), []

    def exchange_once(broken):
        done = threading.Event()
        ours = make_exchange(codec, shapes_of(5000), dist.get_rank(), dist.get_world_size(), "gather")
        if broken:
            ours._workspace.floats = fail
        scheduler.begin(ours.run(vectors(0, 0)[0]), lambda underway, what: (ended.append(what), done.set()))
        scheduler.send()
        return done.wait(DEADLINE_SECONDS)

    waited = [exchange_once(False), exchange_once(True), exchange_once(False)]
    return {"waited": waited, "ended": [f"{type(what).__name__}: {what}"[:80] for what in ended]}


def one_cannot_be_told():
    """What is called at the end of an exchange raises, also when it is called again: the others come to theirs."""
    scheduler, ended, done = ExchangeScheduler(groups(), torch.device("cpu")), [], threading.Event()
    logging.getLogger("paceline.exchanges").disabled = True

    def finished(number, underway, what):
        ended.append(number)
        if len(ended) == 6:
            done.set()
        raise ZeroDivisionError("nobody listens")

    for number in range(3):
        ours = make_exchange(parse_codec("qsgd"), shapes_of(5000), dist.get_rank(), dist.get_world_size(), "two-step")
        scheduler.begin(ours.run(vectors(0, number)[0]), functools.partial(finished, number))
        scheduler.send()
    return done.wait(DEADLINE_SECONDS) and ended


def joined(codec, plan):
    """Rank r has r + 1 batches; in the third step one that has data has a NaN: it is left out by all."""
    model, compression = hooked(codec, plan)
    errors = []
    with model.join():
        for number in range(dist.get_rank() + 1):
            inputs, targets = batch(number)
            if number == 2 and dist.get_rank() == 3:
                inputs = inputs * float("nan")
            model.zero_grad()
            errors.append(error_of(F.cross_entropy(model(inputs), targets).backward))
    kept = [len(compression._used), len(compression._taken), len(compression._failures)]
    after = backward(model, 9)
    return {"errors": errors, "kept": kept, "digest": hashlib.sha256(after.numpy().tobytes()).hexdigest()}
