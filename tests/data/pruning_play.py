"""Passes over a sampler with losses that follow from the sample and the epoch alone."""

from __future__ import annotations

import torch

import paceline

SMALL = {"window": 6, "starting_point": 2, "block": 3, "count": 2, "prune": 0.3}
SAMPLES, EPOCHS = 50, 9
KINDS = {
    "fine-pruning": lambda samples=SAMPLES, **more: paceline.FinePruning(samples, **{"batch_size": 8} | SMALL | more),
    "info-batch": lambda samples=SAMPLES, **more: paceline.InfoBatch(
        samples, **{"batch_size": 8, "epochs": EPOCHS} | more
    ),
}


def losses_of(batch, epoch):
    """A loss for each sample: anybody can be above the mean in one epoch, some often are."""
    index = torch.as_tensor(batch, dtype=torch.int64)
    return 0.1 + (index % 7).float() + ((index * 7919 + epoch * 104_729) % 101).float() / 20


def passes(pruning, epochs, *, stop_after=None):
    """Train up to and with epoch `epochs`, or so many batches: [(epoch, batch), ...]."""
    taken = []
    while pruning.epoch <= epochs:
        epoch = pruning.epoch
        for batch in pruning:
            taken.append((epoch, list(batch)))
            pruning.observe(losses_of(batch, epoch))
            if len(taken) == stop_after:
                return taken
    return taken


def kept(taken):
    """Who took part, epoch by epoch."""
    found = {}
    for epoch, batch in taken:
        found.setdefault(epoch, set()).update(batch)
    return found
