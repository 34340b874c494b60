"""A user's own data, networks and losses, as tests name them: `tests.recipes.own_parts:digits` and so on."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from paceline.data import load_dataset

TEXT = [
    "the",
    "fast",
    "rider",
    "waits",
    "for",
    "the",
    "slow",
    "rider",
    "and",
    "the",
    "slow",
    "rider",
    "waits",
    "for",
    "none",
] * 24
LENGTH = 6


def digits():
    """The embedded data set as pairs of tensors."""
    data = load_dataset("digits")
    return (data.train.inputs, data.train.targets), (data.test.inputs, data.test.targets)


class Items(torch.utils.data.Dataset):
    """Samples that are read one by one."""

    def __init__(self, inputs, targets):
        self._inputs, self._targets = inputs, targets

    def __len__(self):
        return len(self._inputs)

    def __getitem__(self, index):
        return self._inputs[index], int(self._targets[index])


def digits_by_item():
    return {kind: Items(*pair) for kind, pair in zip(("train", "test"), digits(), strict=True)}


def text():
    """Words of a text, and at every position the word that follows."""
    words = sorted(set(TEXT))
    ids = torch.tensor([words.index(word) for word in TEXT])
    inputs, targets = ids[:-1].unfold(0, LENGTH, 1), ids[1:].unfold(0, LENGTH, 1)
    return (inputs[:-60], targets[:-60]), (inputs[-60:], targets[-60:])


class LanguageModel(nn.Module):
    """Guesses the next word."""

    def __init__(self, classes, width=12):
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.recurrent = nn.GRU(width, 16, batch_first=True)
        self.scores = nn.Linear(16, classes)

    def forward(self, ids):
        return self.scores(self.recurrent(self.embedding(ids))[0])


def numbers():
    """Targets that are numbers."""
    inputs = torch.randn(400, 6, generator=torch.Generator().manual_seed(3))
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5], [0.0], [3.0], [1.0]])
    return (inputs[:320], targets[:320]), (inputs[320:], targets[320:])


def per_sample(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def per_block(outputs, targets):
    return F.cross_entropy(outputs, targets)


def by_word(outputs, targets):
    """The cross-entropy of every position, [n, length]."""
    return F.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none")


def of_nothing(outputs, targets):
    return F.cross_entropy(outputs, targets).detach()


def one_too_many(outputs, targets):
    return torch.cat([outputs.sum(1), outputs.sum().reshape(1)])


def one_tensor():
    return torch.zeros(10, 3)


def of_two_shapes():
    return (torch.zeros(10, 3), torch.arange(10) % 2), (torch.zeros(10, 4), torch.arange(10) % 2)


def nothing_to_test():
    return (torch.zeros(10, 3), torch.arange(10) % 2), (torch.zeros(0, 3), torch.zeros(0).long())


def of_dicts():
    return [{"ids": 1}], [{"ids": 1}]


def dict_items():
    class Dicts(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"ids": index}

    return Dicts(), Dicts()
