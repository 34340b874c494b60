"""Gradients of several workers one after the other: works with every model, and is what `grouped` must equal.

A model with BatchNorm is taken block by block, because its statistics are those of a block, as on a real
worker; any other model gives the same gradient for all its blocks at once, but for the rounding. With
`block_by_block` every model is taken so, and the result is a real worker's to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

    def __init__(self, module: nn.Module, *, block_by_block: bool = False) -> None:
        self.model = FlatModel(module)
        self._in_blocks = block_by_block or has_batch_norm(module)

    def compute(self, parameters: torch.Tensor, buffers: torch.Tensor, assignments: Sequence[Assignment]) -> Gradients:
        """The gradient of each assignment at the given parameters."""
        self.model.module.train()
        rows, after, losses = [], [], list[torch.Tensor]()
        with torch.random.fork_rng(devices=[]):
            for assignment in assignments:
                torch.default_generator.manual_seed(assignment.seed)
                self.model.load(parameters, buffers)
                self.model.gradient.zero_()
                parts = assignment.blocks_done if self._in_blocks else 1
                losses.append(accumulate(self.model.module, assignment, parts=parts)[0])
                rows.append(self.model.gradient.clone())
                after.append(self.model.buffers)
        return Gradients(
            gradients=torch.stack(rows),
            buffers=torch.stack(after),
            losses=torch.stack([samples.mean() for samples in losses]),
            loss_variances=torch.stack([samples.var(correction=0) for samples in losses]),
            sample_losses=tuple(losses),
        )


def accumulate(
    module: nn.Module, assignment: Assignment, *, parts: int, go_on: Callable[[int], bool] = lambda done: True
) -> tuple[torch.Tensor, int]:
    """Add the gradient of the blocks done, part by part; returns the loss of every sample in them, and the parts taken.

    `go_on(parts taken)` is asked after every part.

    >>> network = nn.Linear(2, 2)
    >>> batch = Assignment(inputs=torch.ones(4, 2), targets=torch.zeros(4, dtype=torch.int64), blocks=2, blocks_done=2)
    >>> losses, taken = accumulate(network, batch, parts=2, go_on=lambda taken: False)
    >>> len(losses), taken
    (2, 1)
    """
    samples, weights = assignment.samples_done, assignment.weights
    seen: list[torch.Tensor] = []
    for inputs, targets, weighing in zip(
        assignment.inputs[:samples].chunk(parts),
        assignment.targets[:samples].chunk(parts),
        [None] * parts if weights is None else weights[:samples].chunk(parts),
        strict=True,
    ):
        losses = F.cross_entropy(module(inputs), targets, reduction="none")
        weighed = losses if weighing is None else losses * weighing
        (weighed.sum() / len(assignment.inputs)).backward()  # type: ignore[no-untyped-call]
        seen.append(losses.detach())
        if not go_on(len(seen)):
            break
    return torch.cat(seen), len(seen)


def has_batch_norm(module: nn.Module) -> bool:
    """Whether a sample's output depends on the others in its batch.

    >>> has_batch_norm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    True
    """
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
