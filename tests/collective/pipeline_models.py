"""Small models that a pipeline must train as one process does, and their data, all in float64."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """A residual block that overwrites its activations."""

    def __init__(self, width, norm):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), norm(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), norm(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x
        return self.relu(y)


def cnn(norm):
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm(4), nn.ReLU(inplace=True), Block(4, norm), Block(4, norm), *head)


class RNN(nn.Module):
    """Unrolled: every step uses the same weights."""

    def __init__(self, steps=5, width=4):
        super().__init__()
        self.cell, self.head, self.width = nn.RNNCell(3, width), nn.Linear(width, 3), width

    def forward(self, x):
        hidden = x.new_zeros(x.shape[0], self.width)
        for place in range(x.shape[1]):
            hidden = self.cell(x[:, place], hidden)
        return self.head(hidden)


class Tied(nn.Module):
    """Ids that the first layers and the last read, an embedding that both use, and a branch that only weights reach.

    One layer is not used at all.
    """

    def __init__(self, ids=7, width=4):
        super().__init__()
        self.embed, self.mix = nn.Embedding(ids, width), nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.late, self.more = nn.Embedding(ids, width), nn.Linear(width, width)
        self.lstm, self.unused = nn.LSTM(width, width, batch_first=True), nn.Linear(2, 2)

    def forward(self, ids):
        late = self.late(ids)  # not behind anything that came in
        hidden, _ = self.lstm(self.mix(self.embed(ids)))
        hidden = self.more(hidden) + late + self.late(ids.flip(1))
        return functional.linear(hidden, self.embed.weight)[:, -1]  # a view


class Fixed(nn.Module):
    """First layers without weights, whose output has no gradient; two inputs, one of which only the end reads."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, x, scale):
        x = torch.cos(torch.sin(x * 2.0) + 1.0)
        return self.head(self.body(x) * scale[:, None] + x)


class Added(nn.Module):
    """Weights of the shape of what they are added to, for micro-batches of 3, and one that is expanded."""

    def __init__(self, width=4):
        super().__init__()
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 3)
        self.wide = nn.Linear(width, width, bias=False)
        self.one, self.other = (nn.Parameter(torch.randn(3, width)) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for _ in range(5):  # so that all that is added is behind the middle
            x = torch.tanh(x)
        x = torch.tanh(x + self.wide.weight.sum(0).expand(len(x), -1))
        return self.last(x + self.one + self.other)


class Bent(nn.Module):
    """What torch.export cannot trace: a branch that depends on values."""

    def forward(self, x):
        return x if x.sum() > -1e9 else -x


def row():
    """Two modules with one weight, in a row that is taken module by module."""
    first, last = nn.Linear(5, 5), nn.Linear(5, 5)
    last.weight = first.weight
    return nn.Sequential(first, Bent(), nn.Tanh(), last, nn.Linear(5, 3))


def again():
    """One module that the last of two stages calls twice: its weights have two names there, and none elsewhere."""
    twice = nn.Linear(4, 4)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), twice, nn.Tanh(), twice)


def pool(size=2):
    """Pools of different sizes have the same weights, and tensors of other sizes between layers."""
    return nn.Sequential(nn.Linear(5, 8), nn.MaxPool1d(size, size), nn.AdaptiveAvgPool1d(3), nn.Tanh())


class Turned(nn.Module):
    """Outputs of several rows for each sample, or with samples in another dimension."""

    def __init__(self, shape):
        super().__init__()
        self.first, self.last, self.shape = nn.Linear(5, 6), nn.Linear(6, 8), shape

    def forward(self, x):
        x = self.last(torch.tanh(self.first(x))).view(len(x), 4, 2)
        return x.reshape(-1, 2) if self.shape == "rows" else x.transpose(0, 1)


def group_norm(width):
    return nn.GroupNorm(2, width)


def mlp():
    widths = [5, 8, 8, 7, 6, 3]
    layers = [each for pair in itertools.pairwise(widths) for each in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def floats(*shape):
    return lambda samples: torch.randn(samples, *shape, dtype=torch.float64)


MODELS = {
    "mlp": (mlp, [floats(5)]),
    "cnn": (lambda: cnn(group_norm), [floats(1, 6, 6)]),
    "bn": (lambda: cnn(nn.BatchNorm2d), [floats(1, 6, 6)]),
    "rnn": (RNN, [floats(5, 3)]),
    "tied": (Tied, [lambda samples: torch.randint(0, 7, (samples, 4))]),
    "tied in float32": (Tied, [lambda samples: torch.randint(0, 7, (samples, 4))]),
    "fixed": (Fixed, [floats(5), floats()]),
    "added": (Added, [floats(5)]),
    "row": (row, [floats(5)]),
    "again": (again, [floats(5)]),
    "pool": (pool, [floats(5)]),
    "rows": (lambda: Turned("rows"), [floats(5)]),
    "turned": (lambda: Turned("turned"), [floats(5)]),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        [floats(5)],
    ),
}


def model_of(name, seed=0):
    torch.manual_seed(seed)
    return MODELS[name][0]().to(torch.float32 if name.endswith("in float32") else torch.float64)


@functools.cache
def data_of(name, samples=64):
    torch.manual_seed(1)
    return tuple(make(samples) for make in MODELS[name][1]), torch.randint(0, 3, (samples,))


def batches_of(name, sizes):
    """One batch after the other, from the beginning again when the data ends."""
    inputs, targets = data_of(name)
    first = 0
    for size in sizes:
        if first + size > len(targets):
            first = 0
        yield tuple(each[first : first + size] for each in inputs), targets[first : first + size]
        first += size
