"""Jobs that stop, and go on from a state."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist

import paceline
from paceline.strategies.averaging import make_averaging
from tests.averaging.jobs.common import MEMBERS, batches, codec_of, digest, error_of, mlp, saved, train
from tests.averaging.jobs.tally import Life
from tests.waiting import until


def landed(sync):
    """Wait until the average under way can be merged, so that where it is merged does not depend on time."""
    pending = sync._loop.pending
    until(lambda: pending is None or pending.poll(), "the average arrives", seconds=20, every_seconds=0.001)


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
    text = (Path(__file__).parents[3] / "docs" / "averaging.md").read_text()
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
