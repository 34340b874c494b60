"""The *tally*: a model whose every step leaves a mark of its own.

Step t of rank r adds `world` to element [r, t]. What the average divides by `world` is 1.0 then, exactly, and a change
that is lost or merged twice shows as 0.0 or 2.0.
"""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist
from torch import nn

from paceline.drivers.averaging.averager import Averager
from paceline.strategies.averaging import AVERAGING, Outer, make_averaging
from tests.averaging.jobs.common import LIMITS, codec_of, digest, error_of, groups, saved

MARKS = 64  # the most steps of a rank
GROWTH = 0.3


class Tally(nn.Module):
    """Marks for the steps of all ranks."""

    def __init__(self, world, marks=MARKS):
        super().__init__()
        self.marks = nn.Parameter(torch.zeros(world, marks))


class Life:
    """One rank's training of a tally, from a start or a checkpoint to an end."""

    def __init__(self, member, place, world, group, state=None, codec="identity", growth=0.0, marks=MARKS, **settings):
        self.growth = growth  # each mark is larger than the one before, by so much
        self.place, self.world, self.model = place, world, Tally(world, marks)
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
        opened = self.sync._state.open_steps
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
            if pause.random() < 0.3 and life.sync._loop.pending is not None:
                life.sync._loop.pending.collective.wait(
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


def conserve(codec, member, phases, head_start=False, plan="auto", then=None, marks=MARKS, **settings):
    """Merged and held back, together, against the sum of all changes: every phase is so many steps, and a flush.

    With a head start, rank 0 takes all steps of the first phase before the others take any. Its first average cannot
    end until they come, so that its second has several steps in it, however slow the machine is.

    After the second phase a state as the last release wrote it goes on by the plan `then`.
    """
    world, rank, found = dist.get_world_size(), dist.get_rank(), []
    made = {"codec": codec, "seed": 7, "growth": GROWTH, "marks": marks}
    life = Life(make_averaging(member, **settings), rank, world, None, plan=plan, **made)
    for number, counts in enumerate(phases):
        if head_start and number == 0 and rank:
            dist.barrier()
        for _ in range(counts[rank]):
            life.step()
        if head_start and number == 0 and not rank:
            dist.barrier()
        life.sync.flush()
        if then is not None and number == 1:
            state = life.state()
            del state["sync"]["plan"]
            life.sync.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
            life = Life(make_averaging(member, **settings), rank, world, None, state, plan=then, **made)
        held = life.sync._transport.exchange.held()
        held = torch.zeros(world * marks) if held is None else held.clone()
        dist.all_reduce(held)
        held *= -1 if member == "ssgd" else 1  # what it holds back there are gradients, and steps go against them
        merged = life.model.marks.detach().reshape(-1) + held / world
        taken = torch.tensor([float(life.taken if r == rank else 0) for r in range(world)])
        dist.all_reduce(taken)
        sizes = 1 + GROWTH * torch.arange(marks)
        wanted = torch.cat([sizes * (torch.arange(marks) < count) for count in taken])
        found.append({"lost": (merged - wanted).abs().max().item(), "held": held.abs().max().item()})
    sent, averages, plan = life.sync.sent_bytes, life.sync.averages, life.sync.plan
    life.sync.close()
    return {"phases": found, "digest": digest(life.model), "bytes_each": sent / averages, "plan": plan}


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
