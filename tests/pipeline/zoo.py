"""Small models of every shape that a cut must survive, and a batch for each."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Residual(nn.Module):
    """Two branches that meet, with layers that overwrite their input."""

    def __init__(self, channels, *, norm=True):
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(channels) if norm else nn.Identity()
        self.activation, self.dropout = nn.ReLU(inplace=True), nn.Dropout(0.1)

    def forward(self, x):
        y = self.activation(self.norm(self.first(x)))
        y = self.dropout(self.second(y))
        y += x
        return self.activation(y)


class Unrolled(nn.Module):
    """One cell, used at every step of a sequence."""

    def __init__(self, steps=5):
        super().__init__()
        self.cell, self.out, self.steps = nn.RNNCell(3, 6), nn.Linear(6, 2), steps

    def forward(self, x):
        state = x.new_zeros(x.shape[0], 6)
        for step in range(self.steps):
            state = self.cell(x[:, step], state)
        return self.out(state)


class Tied(nn.Module):
    """Words in and out by one table, attention, an LSTM, and a second output."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.out.weight = self.table.weight
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, words):
        hidden = self.recurrent(self.encoder(self.table(words)))[0]
        return self.out(hidden) + torch.tensor([0.5] * 11), hidden


class Views(nn.Module):
    """A tensor that is filled through views, and a normalisation that is used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        y = self.first(x)
        both = torch.zeros(x.shape[0], 2, 4)
        both[:, 0] = y
        both[:, 1] = self.second(y)
        left, right = torch.split(self.norm(both.sum(1)), 2, dim=1)
        return functional.relu_(self.norm(torch.cat([right, left], 1)))


class TwoInputs(nn.Module):
    """Two inputs, one of them read only at the end; a branch without a gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x, weight):
        hidden = torch.tanh(self.first(x)) * self.scale
        still = hidden.detach().abs()
        return self.last(hidden + still) * weight


class Undecided(nn.Module):
    """What it does depends on the numbers it is given, which no trace can hold."""

    def forward(self, x):
        return x if x.sum() > 0 else -x


class Frozen(nn.Module):
    """Batch normalisation that the user has frozen, in a model that trains."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.norm.eval()

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


class Memory(nn.Module):
    """Buffers that are written to in part, and seen through views; statistics that nothing reads."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(4, 4), nn.Linear(4, 2), nn.BatchNorm1d(4)
        self.register_buffer("queue", torch.zeros(3, 4))
        self.register_buffer("mean", torch.zeros(3, 4))

    def forward(self, x):
        seen = self.mean[0]
        y = self.first(x)
        self.norm(y)
        self.queue[0].copy_(y.detach().mean(0))
        self.queue[1] += y.detach().mean(0)
        self.mean.add_(y.detach().mean(0))
        return self.last(torch.relu(y) + self.queue.sum(0) + seen)


class Types(nn.Module):
    """Types that mix: half += float stays half; parts without gradients; a weight that is returned."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(4, 4), nn.Linear(4, 2), nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = self.first(x).bfloat16()
        y += x
        with torch.no_grad():
            mask = torch.tanh(y) * 2
        y = torch.relu(y * mask).float()
        y = y.clone()
        y += x.abs()
        return self.last(y * self.scale), self.scale


class Attention(nn.Module):
    """Views that count on how their input lies in memory."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.conv = nn.Conv1d(5, 5, 1)

    def forward(self, x):
        batch, steps, width = x.shape
        parts = (each.view(batch, steps, 2, 4).transpose(1, 2) for each in self.qkv(x).split(8, 2))
        y = functional.scaled_dot_product_attention(*parts)
        y = self.out(y.transpose(1, 2).view(batch, steps, width))
        return self.conv(torch.relu(y.transpose(1, 2)).transpose(1, 2).view(batch, steps, -1))


def tied_row():
    """Modules that stand in a row twice, or share a weight, and that cannot be traced."""
    twice, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = twice.weight
    return nn.Sequential(twice, Undecided(), twice, nn.Tanh(), other)


def mlp(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def residual_net(*, norm=True):
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Residual(4, norm=norm), Residual(4, norm=norm), head)


def undecided_row():
    return nn.Sequential(nn.Linear(4, 6), Undecided(), nn.Dropout(0.2), nn.Linear(6, 3))


class DropPath(nn.Module):
    """A residual branch that is left out of some samples, as in Swin and ConvNeXt; two ways to draw who."""

    def __init__(self, share: float, floored: bool) -> None:
        super().__init__()
        self.kept, self.floored, self.inner = 1 - share, floored, nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs, plus the branch of most samples."""
        branch = self.inner(inputs).relu()
        if not self.training:
            return inputs + branch
        if self.floored:
            return inputs + branch.div(self.kept) * torch.floor(self.kept + torch.rand(len(inputs), 1))
        return inputs + branch * branch.new_empty(len(inputs), 1).bernoulli_(self.kept).div_(self.kept)


def drop_paths() -> nn.Sequential:
    """Return both ways, one after the other."""
    return nn.Sequential(DropPath(0.3, False), DropPath(0.2, True), nn.Linear(4, 2))


ZOO = {
    "drop-path": (drop_paths, lambda: (torch.randn(6, 4),)),
    "mlp": (mlp, lambda: (torch.randn(6, 4),)),
    "residual": (residual_net, lambda: (torch.randn(6, 3, 6, 6),)),
    "unrolled": (Unrolled, lambda: (torch.randn(6, 5, 3),)),
    "tied": (Tied, lambda: (torch.randint(0, 11, (4, 5)),)),
    "views": (Views, lambda: (torch.randn(6, 4),)),
    "two-inputs": (TwoInputs, lambda: (torch.randn(6, 4), torch.rand(6, 3))),
    "frozen": (Frozen, lambda: (torch.randn(6, 4),)),
    "memory": (Memory, lambda: (torch.randn(6, 4),)),
    "types": (Types, lambda: (torch.randn(6, 4),)),
    "attention": (Attention, lambda: (torch.randn(3, 5, 8),)),
    "tied-row": (tied_row, lambda: (torch.randn(6, 4),)),
    "undecided-row": (undecided_row, lambda: (torch.randn(6, 4),)),
}


def model_and_inputs(name, seed=0):
    torch.manual_seed(seed)
    make, inputs = ZOO[name]
    return make(), inputs()


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)
