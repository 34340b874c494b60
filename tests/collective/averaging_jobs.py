"""What the ranks of the averaging tests can be told to do. What a job returns goes through JSON.

The *tally* is a model whose every step leaves a mark of its own: step t of rank r adds `world` to element [r, t]. What
the average divides by `world` is 1.0 then, exactly, and a change that is lost or merged twice shows as 0.0 or 2.0.
"""

from __future__ import annotations

import copy
import hashlib
import io
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.codecs import QSGD, ErrorFeedback
from paceline.drivers.collective.averaging import Averager
from paceline.strategies.averaging import AVERAGING, Outer, make_averaging

MARKS = 64  # the most steps of a rank
GROWTH = 0.3
MEMBERS = {
    "ssgd": paceline.SSGD,
    "local-sgd": paceline.LocalSGD,
    "bmuf": paceline.BMUF,
    "diloco": paceline.DiLoCo,
    "hpsgd": paceline.HPSGD,
    "psgd": paceline.PSGD,
}
CODECS = {"elias": lambda: QSGD(levels=3, lossless="elias"), "elias+ef": lambda: ErrorFeedback(QSGD(lossless="elias"))}
LIMITS = {"timeout_seconds": 30, "silence_seconds": 20}


def codec_of(name):
    return CODECS[name]() if name in CODECS else name


def error_of(what):
    try:
        what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def digest(model):
    state = b"".join(tensor.detach().double().numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(state).hexdigest()


def saved(state):
    """A state as it comes back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# -- the tally ----------------------------------------------------------------------------------------------------


class Tally(nn.Module):
    """Marks for the steps of all ranks."""

    def __init__(self, world):
        super().__init__()
        self.marks = nn.Parameter(torch.zeros(world, MARKS))


class Life:
    """One rank's training of a tally, from a start or a checkpoint to an end."""

    def __init__(self, member, place, world, group, state=None, codec="identity", growth=0.0, **settings):
        self.growth = growth  # each mark is larger than the one before, by so much
        self.place, self.world, self.model = place, world, Tally(world)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.sync = Averager(self.model, self.optimizer, member, codec=codec_of(codec), process_group=group,
                             record=True, **{**LIMITS, **settings})  # fmt: skip
        self.taken = 0
        if state:
            self.model.load_state_dict(state["model"])
            self.sync.load_state_dict(state["sync"])
            self.taken = state["taken"]

    def step(self):
        self.optimizer.zero_grad()
        mark = torch.zeros_like(self.model.marks)
        mark[self.place, self.taken] = self.world * (1 + self.growth * self.taken)
        (-(self.model.marks * mark).sum()).backward()
        self.taken += 1
        self.optimizer.step()

    def in_place(self):
        """Whether the replica is the shared model, as it is now, plus the steps of the open window (so the paper)."""
        if self.sync.member.averages == "gradients" or self.sync.member.rebase:
            return True
        opened = self.sync._course.open_steps
        wanted = self.sync.shared["marks"]
        wanted[self.place, self.taken - opened : self.taken] += self.world
        return torch.allclose(self.model.marks.detach(), wanted, atol=1e-4)

    def state(self):
        sync = self.sync.state_dict()
        return saved({"model": self.model.state_dict(), "sync": sync, "taken": self.taken})


def plan_of(seed, world):
    """A schedule that all ranks draw alike: a member, and phases of (steps of each rank, what is done after them)."""
    draw = random.Random(seed)
    name = draw.choice(list(AVERAGING))
    settings = {"period": draw.choice([1, 2, 3, 5]), "normalize": draw.random() < 0.25}
    if name in ("bmuf", "diloco") and draw.random() < 0.6:
        settings |= {"outer_momentum": 0.0, "outer_rate": 1.0}
    if name in ("bmuf", "diloco", "hpsgd"):
        settings["overlap"] = draw.random() < 0.6
        settings["rebase"] = (settings["overlap"] or name == "hpsgd") and draw.random() < 0.5
    known = {"ssgd": (), "psgd": ("normalize",), "local-sgd": ("period", "normalize"),
             "hpsgd": ("period", "normalize", "rebase")}.get(name, tuple(settings))  # fmt: skip
    member = make_averaging(name, **{key: value for key, value in settings.items() if key in known})
    phases = []
    for _ in range(draw.randint(1, 3)):
        after = draw.choice(["flush", "flush", "settle", "resume", "nothing", "look"])
        phases.append(([draw.randint(0, 4) for _ in range(world)], after))
    return member, phases


def reckoned(history, member, world):
    """The tally that the windows in the averages come to: the outer step, in its plainest form."""
    shared, velocity = torch.zeros(world, MARKS, dtype=torch.float64), torch.zeros(world, MARKS, dtype=torch.float64)
    at, momentum = [0] * world, member.outer.momentum_of(world)
    for average in history:
        brought = [window.brought for window in average.windows]
        if not any(brought):
            continue
        steps = [each for each in brought if each]
        change = torch.zeros_like(shared)
        for place, count in enumerate(brought):
            each = sum(steps) / len(steps) / count if member.normalize and count else 1.0
            change[place, at[place] : at[place] + count] = each
            at[place] += count
        velocity = momentum * velocity + change
        moved = change + momentum * velocity if member.outer.nesterov else velocity
        shared += member.outer.rate * moved
    return shared


def schedule(seed, world, place, group, codec="identity"):
    """One schedule; what is wrong, and what the model was at every flush."""
    member, phases = plan_of(seed, world)
    pause, wrong, digests, history = random.Random(1000 * seed + place), [], [], []
    life, taken = Life(member, place, world, group, codec=codec), [0] * world

    def flushed(what):
        digests.append(digest(life.model))
        marks, exact = life.model.marks.detach(), member.outer == Outer() and not member.normalize
        wanted = torch.tensor([[float(t < taken[r]) for t in range(MARKS)] for r in range(world)])
        if exact and not torch.equal(marks, wanted):
            wrong.append(f"schedule {seed}, {member}: after {what} {marks.tolist()}, not {taken}")
        elif not torch.allclose(marks.double(), reckoned(history + life.sync.history, member, world), atol=1e-4):
            wrong.append(f"schedule {seed}, {member}: after {what} not what the windows come to")
        if not torch.equal(life.sync.shared["marks"], marks):
            wrong.append(f"schedule {seed}, {member}: after {what} the shared model is another")

    for counts, after in phases:
        for _ in range(counts[place]):
            if pause.random() < 0.3:
                time.sleep(pause.random() * 0.002)
            if pause.random() < 0.3 and life.sync._traffic.flight is not None:
                life.sync._traffic.flight.wait(
                    0.02
                )  # so that it is merged in the middle of a window, where there is one
            life.step()
            if not life.in_place():
                wrong.append(f"schedule {seed}, {member}: step {life.taken} is not on the shared model")
        taken = [before + more for before, more in zip(taken, counts, strict=True)]
        if after == "flush":
            life.sync.flush()
            flushed("flush")
        elif after == "settle":
            life.sync.state_dict()
        elif after == "look":
            assert life.sync.shared["marks"].shape == life.model.marks.shape
        elif after == "resume":
            state = life.state()
            history += life.sync.history
            life.sync.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
            life = Life(member, place, world, group, state, codec=codec)
    life.sync.close()
    flushed("close")
    if life.sync.steps != taken[place] or life.sync.merged_steps != sum(taken):
        wrong.append(f"schedule {seed}, {member}: {life.sync.steps} and {life.sync.merged_steps} steps, not {taken}")
    return wrong, digests


GROUPS = {}


def groups():
    """Groups of some ranks; made once."""
    if not GROUPS:
        GROUPS["single"] = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        GROUPS["ends"] = dist.new_group([0, dist.get_world_size() - 1])
    return GROUPS


def schedules(first, last):
    """Many schedules, one after the other."""
    wrong, digests = [], []
    for seed in range(first, last):
        found, ends = schedule(seed, dist.get_world_size(), dist.get_rank(), None)
        wrong += found
        digests += ends
    return {"wrong": wrong, "digests": digests}


def ends(seeds):
    """Schedules by the first and the last rank; those between do not come."""
    group = groups()["ends"]
    if not isinstance(group, dist.ProcessGroup):
        return None
    found = [schedule(seed, 2, dist.get_rank(group), group) for seed in seeds]
    return {"wrong": [each for wrong, _ in found for each in wrong], "digests": [digests for _, digests in found]}


def conserve(codec, member, phases, **settings):
    """Merged and held back, together, against the sum of all changes: every phase is so many steps, and a flush."""
    world, rank, found = dist.get_world_size(), dist.get_rank(), []
    life = Life(make_averaging(member, **settings), rank, world, None, codec=codec, seed=7, growth=GROWTH)
    for counts in phases:
        for _ in range(counts[rank]):
            life.step()
        life.sync.flush()
        held = life.sync.state_dict()["codec"].get("residual", torch.zeros(world * MARKS)).clone()
        dist.all_reduce(held)
        held *= -1 if member == "ssgd" else 1  # what it holds back there are gradients, and steps go against them
        merged = life.model.marks.detach().reshape(-1) + held / world
        taken = torch.tensor([float(life.taken if r == rank else 0) for r in range(world)])
        dist.all_reduce(taken)
        marks = 1 + GROWTH * torch.arange(MARKS)
        wanted = torch.cat([marks * (torch.arange(MARKS) < count) for count in taken])
        found.append({"lost": (merged - wanted).abs().max().item(), "held": held.abs().max().item()})
    sent, averages = life.sync.sent_bytes, life.sync.averages
    life.sync.close()
    return {"phases": found, "digest": digest(life.model), "bytes_each": sent / averages}


# -- training -----------------------------------------------------------------------------------------------------


def mlp(seed=0, dtype=torch.float32, norm=False):
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).to(dtype)


def batches(steps, rank, first=0, dtype=torch.float32):
    for number in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 * number + rank)
        inputs = torch.randn(12, 6, generator=generator)
        yield inputs.to(dtype), inputs[:, :3].argmax(1)


def train(model, optimizer, data):
    for inputs, targets in data:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def distance(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


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
    }
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
    return found


# -- checkpoints --------------------------------------------------------------------------------------------------


def landed(sync):
    """Wait until the average under way can be merged, so that where it is merged does not depend on time."""
    deadline = time.monotonic() + 20
    while sync._traffic.flight is not None and not sync._traffic.flight.poll():
        assert time.monotonic() < deadline, "the average did not arrive"
        sync._traffic.flight.wait(0.1)


def resumed(member, codec, **settings):
    """Ten steps in two lives with a checkpoint in a window's middle, and in one that settles there all the same."""
    rank, ends, opened = dist.get_rank(), [], None
    for lives in (2, 1):
        model = mlp(seed=rank, norm=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sync = MEMBERS[member](model, optimizer, codec=codec_of(codec), seed=3, **settings)
        for number in range(10):
            train(model, optimizer, batches(1, rank, first=number))
            dist.barrier()  # an average that all have entered, or none
            landed(sync)
            if number == 4:
                taken = sync.state_dict()
                opened = taken["course"]["steps"]
                assert sync.state_dict(settle=False)["course"] == taken["course"]  # a look: no rank has stepped
            if number == 4 and lives == 2:
                state = saved({"sync": taken, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
                sync.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
                model = mlp(seed=rank + 50, norm=True)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                sync = MEMBERS[member](model, optimizer, codec=codec_of(codec), seed=3, **settings)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                sync.load_state_dict(state["sync"])
        sync.close()
        ends.append([digest(model), sync.steps, sync.merged_steps, sync.sent_bytes, sync.averages])
    return {"ends": ends, "opened": opened}


def documented(folder):
    """The blocks of the documentation's section on checkpoints, in two lives; and one life, to compare with."""
    text = (Path(__file__).parents[2] / "docs" / "averaging.md").read_text()
    section = text.split("## Checkpoints")[1].split("\n## ")[0]
    save, load, evaluate = (block.split("```")[0] for block in section.split("```python")[1:])
    rank, ends = dist.get_rank(), []
    for lives in (2, 1):
        names = {"paceline": paceline, "torch": torch, "rank": rank, "folder": folder} | begun(rank)
        for number in range(10):
            train(names["model"], names["optimizer"], batches(1, rank, first=number))
            dist.barrier()
            landed(names["sync"])
            if number == 5:
                exec(save, names)
            if number == 5 and lives == 2:
                names["sync"].__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
                names |= begun(rank + 50, with_sync=False)
                exec(load, names)
        exec(evaluate, names)
        dist.barrier()
        kept, held = torch.load(f"{folder}/model.pt", weights_only=True), names["model"].state_dict()
        assert all(torch.equal(kept[name], held[name]) for name in held)
        names["sync"].close()
        ends.append(digest(names["model"]))
    return ends


def begun(seed, with_sync=True):
    model = mlp(seed=seed, norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "optimizer": optimizer} | ({"sync": paceline.HPSGD(model, optimizer)} if with_sync else {})


def wrong_states():
    """States that are of something else."""
    life = Life(make_averaging("hpsgd"), dist.get_rank(), dist.get_world_size(), None)
    life.step()
    life.sync.flush()
    state, found = life.sync.state_dict(settle=False), {}
    for key, value in {
        "member": "psgd",
        "period": "4",
        "codec": "QSGD()",
        "rank": "9",
        "number of ranks": "9",
        "model": "x",
    }.items():
        other = copy.deepcopy(state)
        other["about"][key] = value
        found[key] = error_of(lambda other=other: life.sync.load_state_dict(other))
    with torch.no_grad():
        life.model.marks.add_(1.0)
    found["moved"] = error_of(lambda: life.sync.load_state_dict(state))
    life.model.marks.data.sub_(1.0)
    if dist.get_rank() == 1:  # this rank alone is in an average that the others are not in
        state["course"]["averages"] += 3
    life.sync.load_state_dict(state)
    life.step()
    found["different"] = error_of(life.sync.flush)
    found["ended"] = error_of(life.step)
    life.sync.close()
    return found


# -- what goes wrong ----------------------------------------------------------------------------------------------


def poisoned(codec, member, culprit):
    """A NaN in one rank's change: what all ranks raise, and what is left of the others' models."""
    rank = dist.get_rank()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run():
        with MEMBERS[member](model, optimizer, codec=codec_of(codec), **LIMITS) as sync:
            for number, (inputs, targets) in enumerate(batches(4, rank)):
                bad = number == 2 and rank == culprit
                train(model, optimizer, [(inputs * float("nan") if bad else inputs, targets)])
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
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not store.check([f"through {rank}" for rank in others]):
        time.sleep(0.05)
    for rank in others:
        store.delete_key(f"through {rank}")


def stays_away(culprit):
    found = left_by_one(culprit, "stays away", "psgd", silence_seconds=20.0, timeout_seconds=1.5)
    if dist.get_rank() != culprit:
        dist.distributed_c10d._get_default_store().set(f"through {dist.get_rank()}", "1")
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


def paces(slow_seconds):
    """Between two flushes one rank sleeps in every step; the others take the steps they can until it is through."""
    rank, world = dist.get_rank(), dist.get_world_size()
    life = Life(make_averaging("hpsgd"), rank, world, None)
    life.step()
    life.sync.flush()
    store = dist.distributed_c10d._get_default_store()
    key = f"slow one is through {life.sync.averages} {slow_seconds}"
    while not store.check([key]) if rank else life.taken < 10:
        if rank == 0:
            time.sleep(slow_seconds)
        if life.taken < MARKS:
            life.step()
        if rank == 0 and life.taken == 10:
            store.set(key, "1")
    life.sync.close()
    return {"steps": life.taken, "digest": digest(life.model), "merged": life.sync.merged_steps}


def drifting(counts):
    """ssgd with learning rates that fall with every step a rank takes itself, and unequal steps."""
    rank, ends = dist.get_rank(), []
    model, optimizer, schedule = falling(rank)
    sync = paceline.SSGD(model, optimizer)

    def take(steps, first):
        for each in batches(steps, rank, first=first):
            train(model, optimizer, [each])
            schedule.step()

    take(counts[rank], 0)
    sync.flush()
    ends.append(digest(model))
    take(counts[rank], 10)
    state = saved({"sync": sync.state_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict()})
    ends.append(digest(model))  # a checkpoint leaves them as they are: apart
    sync.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    model, optimizer, schedule = falling(rank)
    sync = paceline.SSGD(model, optimizer)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    sync.load_state_dict(state["sync"])
    sync.close()
    ends.append(digest(model))
    return ends


def falling(seed):
    model = mlp(seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)


def numbers():
    """What the ranks tell each other between averages, and where they may not."""
    rank, found = dist.get_rank(), {}
    life = Life(make_averaging("local-sgd", period=4), rank, dist.get_world_size(), None)
    found["before"] = life.sync.gather_numbers([rank, 10 * rank, -(2**40)])
    life.step()
    found["stepped"] = error_of(lambda: life.sync.gather_numbers([1]))
    found["alone"] = error_of(lambda: life.sync.state_dict(settle=False))
    life.sync.state_dict()
    found["settled"] = life.sync.gather_numbers([rank])
    life.sync.close()
    found["closed"] = error_of(lambda: life.sync.gather_numbers([1]))
    return found


def lying(culprit):
    """A rank says that its payload is larger than any can be."""
    life = Life(make_averaging("local-sgd", period=1), dist.get_rank(), dist.get_world_size(), None, codec="elias")
    send = life.sync._carrier._send

    def lie(ours, slot=None):
        if slot is None:
            ours[-1] = 2**50
        return send(ours, slot)

    if dist.get_rank() == culprit:
        life.sync._carrier._send = lie
    said = error_of(life.step)
    life.sync.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    return said


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
        "float64": error_of(lambda: paceline.HPSGD(*doubles(), codec="qsgd")),
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
