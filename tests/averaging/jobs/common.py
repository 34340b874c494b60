"""What the jobs share: a small model, its batches, and every member by its name."""

from __future__ import annotations

import hashlib
import io

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.codecs import QSGD, ErrorFeedback

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
GROUPS = {}


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


def groups():
    """Groups of some ranks; made once."""
    if not GROUPS:
        GROUPS["single"] = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        GROUPS["ends"] = dist.new_group([0, dist.get_world_size() - 1])
    return GROUPS


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
