"""What the tests of Accumulate share: a model that some parts do not touch all of, and the batch at once."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import nn

WORDS = 4


class Branches(nn.Module):
    """Some parts do not touch all of it: rows of a sparse embedding, and a branch for words above 1 alone."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(WORDS, 3, sparse=True, dtype=dtype)
        self.all = nn.Linear(3, 2, dtype=dtype)
        self.some = nn.Linear(3, 2, dtype=dtype)
        self.none = nn.Linear(3, 2, dtype=dtype)
        self.frozen = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)

    def forward(self, words):
        found = self.words(words)
        outputs = torch.tanh(self.all(found)) * self.frozen
        rare = words > 1
        if rare.any():
            outputs = outputs + rare[:, None] * self.some(found) ** 2
        return outputs


def losses(model, words):
    """One for each sample."""
    return (model(words) - 0.3).square().sum(1)


def gradients(model):
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: gradient.to_dense().clone() for name, gradient in found.items() if gradient is not None}


def all_at_once(model, words, weights=None, reduction="mean"):
    """What a batch gives without parts; `weights` is how much each of its samples counts."""
    model.zero_grad()
    each = losses(model, words)
    if reduction == "sum":
        each.sum().backward()
    else:
        weights = torch.ones(len(words)) if weights is None else weights
        ((each * weights).sum() / weights.sum()).backward()
    found = gradients(model)
    model.zero_grad()
    return found


def close(found, wanted, tolerance=1e-12):
    """Alike; a gradient of zeros is none."""
    for name in found.keys() | wanted.keys():
        known = found.get(name, wanted.get(name))
        one, other = found.get(name, torch.zeros_like(known)), wanted.get(name, torch.zeros_like(known))
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    return True


def in_groups(parts, steps):
    return [parts[first : first + steps] for first in range(0, len(parts), steps)]


word_parts = st.lists(st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=5).map(torch.tensor), max_size=8)


def close_after_all(accumulate, model):
    """It works as if nothing had been."""
    inputs = torch.arange(1.0, 5.0).view(4, 1)
    for part in accumulate(inputs.split([1, 2, 1])):
        accumulate.backward(model(part).square().mean())
    found = gradients(model)
    model.zero_grad()
    model(inputs).square().mean().backward()
    return close(found, gradients(model), 1e-5)
