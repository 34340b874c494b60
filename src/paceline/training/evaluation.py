"""How good a model is."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from paceline.data import Dataset, Samples

_BATCH = 512


def measure(module: nn.Module, dataset: Dataset, most_samples: int) -> tuple[float, float]:
    """Mean loss on the training data (at most so many samples of it), accuracy on the test data.

    >>> from paceline.data import load_dataset
    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    >>> loss, accuracy = measure(network, load_dataset("digits"), 100)
    >>> loss > 0 and 0 <= accuracy <= 1
    True
    """
    loss, _ = _measure(module, dataset.train, most_samples)
    _, accuracy = _measure(module, dataset.test, most_samples)
    return loss, accuracy


@torch.no_grad()
def _measure(module: nn.Module, samples: Samples, most_samples: int) -> tuple[float, float]:
    module.eval()
    inputs, targets = samples.inputs[:most_samples], samples.targets[:most_samples]
    loss, right = 0.0, 0
    for x, y in zip(torch.split(inputs, _BATCH), torch.split(targets, _BATCH), strict=True):
        outputs = module(x)
        loss += float(F.cross_entropy(outputs, y, reduction="sum"))
        right += int((outputs.argmax(1) == y).sum())
    return loss / len(inputs), right / len(inputs)
