"""What the jobs share: a small model, its batches, rounds by their name."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import paceline

LIMITS = {"timeout_seconds": 30.0, "silence_seconds": 20.0}
KINDS = {"lgc": paceline.LGCSync, "fastest-k": paceline.FastestKSync, "full": paceline.FullSync}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "lars": lambda parameters: paceline.LARS(parameters, lr=0.5, momentum=0.9),
}


def network(seed=0, norm=False):
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers)


def batch(number, rank, samples=12):
    generator = torch.Generator().manual_seed(1000 * number + rank)
    inputs = torch.randn(samples, 6, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


def setup(kind="lgc", *, optimizer="sgd", norm=False, seed=None, **settings):
    """A model, its optimiser, and its rounds with all ranks, which begin with other weights each."""
    model = network(dist.get_rank() if seed is None else seed, norm)
    made = OPTIMIZERS[optimizer](model.parameters())
    return model, made, KINDS[kind](model, made, **{**LIMITS, **settings})


def compute(sync, model, inputs, targets, pause=lambda: None):
    """Leave a batch's gradient in .grad, block by block."""
    for x, y in sync.blocks(inputs, targets):
        pause()
        F.cross_entropy(model(x), y).backward()


def digest(model, optimizer):
    """Of all that ranks hold alike: parameters, buffers, and the optimiser's state, bit for bit."""
    tensors = [*model.state_dict().values()]
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        tensors += [state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)]
    found = b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(found + repr([group["lr"] for group in optimizer.param_groups]).encode()).hexdigest()[:16]


def tally(sync):
    """The batches that this rank drew, and what became of them."""
    outcomes = sync.outcomes
    return {"draws": sync.draws, "used": outcomes.used, "late": outcomes.late, "dropped": dict(outcomes.dropped)}


def error_of(what):
    try:
        what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
