"""The states that are kept beside the golden runs: how each was made, and how training goes on from it.

`python -m tests.golden.states FOLDER` writes them, one file each: the state, and what came after it. Gradients and
losses are plain fractions of the step's number, so that no library's rounding is in them.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import paceline

STEPS_BEFORE, STEPS_AFTER = 7, 8
SAMPLES, BATCHES_AFTER = 90, 60


def fractions(shape, number):
    """Return numbers between -1/2 and 1/2, others for every `number`."""
    places = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return ((places * 37 + number * 61) % 97 - 48).to(torch.float32) / 96


def network():
    """Return a small network whose weights are plain fractions."""
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(fractions(parameter.shape, number))
    return model


def take_steps(model, optimizer, steps, *, schedule=None, rank=0):
    """Step with gradients that are plain fractions."""
    for step in steps:
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = fractions(parameter.shape, 1000 * rank + 17 * step + number)
        optimizer.step()
        if schedule is not None:
            schedule.step()


def weights(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


# -- optimisers ---------------------------------------------------------------------------------------------------

LARS_SETTINGS = {
    "lars": {},
    "lars-nesterov": {"nesterov": True, "trust_coefficient": 0.01},
    "lars-clip": {"clip": True, "trust_coefficient": 0.02, "exclude_bias_and_norm": False},
}


def lars(name):
    """Return a network, its LARS and its schedule: a warm-up of three of fifteen steps."""
    model = network()
    optimizer = paceline.LARS(model.parameters(), lr=0.5, **LARS_SETTINGS[name])
    return model, optimizer, paceline.warmup_poly(optimizer, warmup_steps=3, total_steps=STEPS_BEFORE + STEPS_AFTER)


def write_lars(name):
    model, optimizer, schedule = lars(name)
    take_steps(model, optimizer, range(STEPS_BEFORE), schedule=schedule)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    state = copied(state)
    return {"state": state, "after": lars_after(name, copied(state))}


def lars_after(name, state):
    """Return the weights after the steps that follow the state."""
    model, optimizer, schedule = lars(name)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    take_steps(model, optimizer, range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER), schedule=schedule)
    return weights(model)


# -- pruning ------------------------------------------------------------------------------------------------------

SAMPLERS = {
    "fine-pruning": (lambda: paceline.FinePruning(SAMPLES, batch_size=16), 33),
    "info-batch": (lambda: paceline.InfoBatch(SAMPLES, batch_size=16, epochs=12), 5),
}


def observe(sampler, batches):
    """Take batches from the sampler, across the ends of epochs, and return them with the means to train on."""
    taken = []
    while len(taken) < batches:
        for batch in islice(sampler, batches - len(taken)):
            number = 31 * len(taken)
            losses = (torch.tensor(batch) * 7 % 23 + number % 5).to(torch.float32) / 8
            taken.append((batch, float(sampler.observe(losses))))
    return taken


def write_sampler(name):
    make, epochs = SAMPLERS[name]
    sampler = make()
    for _ in range(epochs):
        for batch in sampler:
            sampler.observe((torch.tensor(batch) * 7 % 23).to(torch.float32) / 8)
    between = copied(sampler.state_dict())
    batches = iter(sampler)
    for _ in range(2):
        sampler.observe((torch.tensor(next(batches)) * 7 % 23).to(torch.float32) / 8)
    state = {"between": between, "middle": copied(sampler.state_dict())}
    return {"state": state, "after": {moment: sampler_after(name, copied(state[moment])) for moment in state}}


def sampler_after(name, state):
    """Return the batches and means that follow the state."""
    sampler = SAMPLERS[name][0]()
    sampler.load_state_dict(state)
    return [[batch, mean] for batch, mean in observe(sampler, BATCHES_AFTER)]


# -- averaging ----------------------------------------------------------------------------------------------------

RANKS = 2
AVERAGERS = {
    "bmuf": lambda model, optimizer: paceline.BMUF(model, optimizer, period=3, codec="one-bit"),
    "local-sgd": lambda model, optimizer: paceline.LocalSGD(model, optimizer, period=3),
}


def averaged(name):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, AVERAGERS[name](model, optimizer)


def write_averaged(name, rank):
    model, optimizer, sync = averaged(name)
    with sync:
        take_steps(model, optimizer, range(STEPS_BEFORE), rank=rank)
        state = {"sync": sync.state_dict()}
        state = copied(state | {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    return {"state": state, "after": averaged_after(name, copied(state), rank)}


def averaged_after(name, state, rank):
    """Return the weights that all ranks have after the steps that follow the state, and a flush."""
    model, optimizer, sync = averaged(name)
    with sync:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sync.load_state_dict(state["sync"])
        take_steps(model, optimizer, range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER), rank=rank)
        sync.flush()
        return weights(model)


def be_rank(folder, rank, out=None):
    """Be one of two ranks: write the states, or with `out` go on from those in the folder and write what came after."""
    store = dist.FileStore(str((out or folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    for name in AVERAGERS:
        file = f"{name}-{rank}.pt"
        if out is None:
            torch.save(write_averaged(name, rank), folder / file)
        else:
            state = torch.load(folder / file, weights_only=True)["state"]
            torch.save(averaged_after(name, state, rank), out / file)
    dist.destroy_process_group()


def rank_command(folder, rank, out=None):
    return [sys.executable, "-m", "tests.golden.states", str(folder), str(rank), *([str(out)] if out else [])]


def copied(state):
    """Return the state as a file has it: nothing in it changes as training goes on."""
    match state:
        case torch.Tensor():
            return state.detach().clone()
        case dict():
            return type(state)((key, copied(value)) for key, value in state.items())
        case list() | tuple():
            return type(state)(copied(value) for value in state)
    return state


def main(folder, rank=None, out=None):
    folder = Path(folder)
    if rank is not None:
        be_rank(folder, int(rank), Path(out) if out else None)
        return
    for name in LARS_SETTINGS:
        torch.save(write_lars(name), folder / f"{name}.pt")
    for name in SAMPLERS:
        torch.save(write_sampler(name), folder / f"{name}.pt")
    ranks = [subprocess.Popen(rank_command(folder, rank)) for rank in range(RANKS)]
    assert [process.wait(120) for process in ranks] == [0] * RANKS
    (folder / "store").unlink(missing_ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
