"""Gradients of several workers one after the other: works with every model, and is what `grouped` must equal.

A model with BatchNorm is taken block by block, because its statistics are those of a block, as on a real
worker; any other model gives the same gradient for all its blocks at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from paceline.workers.assignment import Assignment, Gradients
from paceline.workers.flat import FlatModel


class LoopGradients:
    """Computes gradients worker by worker.

    >>> engine = LoopGradients(nn.Linear(2, 3))
    >>> batch = Assignment(inputs=torch.ones(4, 2), targets=torch.tensor([0, 1, 2, 0]))
    >>> result = engine.compute(engine.model.parameters.clone(), engine.model.buffers, [batch])
    >>> result.gradients.shape
    torch.Size([1, 9])
    """

    def __init__(self, module: nn.Module) -> None:
        self.model = FlatModel(module)
        self._couples_samples = has_batch_norm(module)

    def compute(self, parameters: torch.Tensor, buffers: torch.Tensor, assignments: Sequence[Assignment]) -> Gradients:
        """The gradient of each assignment at the given parameters."""
        self.model.module.train()
        rows, after, losses = [], [], list[torch.Tensor]()
        with torch.random.fork_rng(devices=[]):
            for assignment in assignments:
                torch.default_generator.manual_seed(assignment.seed)
                self.model.load(parameters, buffers)
                self.model.gradient.zero_()
                losses.append(self._accumulate(assignment))
                rows.append(self.model.gradient.clone())
                after.append(self.model.buffers)
        return Gradients(
            gradients=torch.stack(rows),
            buffers=torch.stack(after),
            losses=torch.stack([samples.mean() for samples in losses]),
            loss_variances=torch.stack([samples.var(correction=0) for samples in losses]),
        )

    def _accumulate(self, assignment: Assignment) -> torch.Tensor:
        """Add the gradient of the blocks done; returns the loss of every sample in them."""
        samples = assignment.samples_done
        parts = assignment.blocks_done if self._couples_samples else 1
        seen = []
        for inputs, targets in zip(
            assignment.inputs[:samples].chunk(parts), assignment.targets[:samples].chunk(parts), strict=True
        ):
            losses = F.cross_entropy(self.model.module(inputs), targets, reduction="none")
            (losses.sum() / len(assignment.inputs)).backward()  # type: ignore[no-untyped-call]
            seen.append(losses.detach())
        return torch.cat(seen)


def has_batch_norm(module: nn.Module) -> bool:
    """Whether a sample's output depends on the others in its batch.

    >>> has_batch_norm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    True
    """
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
