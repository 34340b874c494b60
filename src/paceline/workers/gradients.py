"""A worker's batch and its gradient; here those of several workers are computed one after the other.

This way works with every model, and is what `grouped.py` must equal. A model with BatchNorm is taken block by block,
because its statistics are those of a block, as on a real worker; any other model gives the same gradient for all its
blocks at once, but for the rounding. With `block_by_block` every model is taken so, and the result is a real worker's
to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.workers.flat import FlatModel
from paceline.workers.losses import CrossEntropy, SampleLoss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """A worker's batch, and how many of its equal blocks it gets done; `seed` is for what the model draws (dropout).

    `weights` multiply the losses of the samples in the gradient (None: all weigh 1), not the losses that are returned.

    >>> Assignment(inputs=torch.zeros(8, 2), targets=torch.zeros(8), blocks=4, blocks_done=3).samples_done
    6
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor | None = None
    blocks: int = 1
    blocks_done: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.inputs) % self.blocks:
            raise ValueError(
                f"the batch must divide into equal blocks (batch size {len(self.inputs)}, blocks {self.blocks})"
            )
        if self.weights is not None and self.weights.shape != (len(self.inputs),):
            raise ValueError(
                f"weights must be one for each sample (shape={tuple(self.weights.shape)}, samples={len(self.inputs)})"
            )
        if not 1 <= self.blocks_done <= self.blocks:
            raise ValueError(
                f"blocks_done must be between 1 and blocks (blocks_done={self.blocks_done}, blocks={self.blocks})"
            )

    @property
    def samples_done(self) -> int:
        """How many samples of the batch are in the gradient."""
        return len(self.inputs) // self.blocks * self.blocks_done


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gradients:
    """The result, a row per worker: flat gradient, buffers after the pass, mean and variance of the samples' losses.

    A gradient is the sum over the blocks done of the block's mean gradient, divided by all blocks. `sample_losses` are
    the losses themselves, of the samples done.

    >>> rows = Gradients(gradients=torch.zeros(2, 3), buffers=torch.zeros(2, 0), losses=torch.zeros(2),
    ...                  loss_variances=torch.zeros(2))
    >>> rows.losses.shape
    torch.Size([2])
    """

    gradients: torch.Tensor
    buffers: torch.Tensor
    losses: torch.Tensor
    loss_variances: torch.Tensor
    sample_losses: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, gradients: torch.Tensor, buffers: torch.Tensor, sample_losses: Sequence[torch.Tensor]) -> Gradients:
        """Return the result of gradients, buffers and the losses of each worker's samples."""
        return cls(
            gradients=gradients,
            buffers=buffers,
            losses=torch.stack([losses.mean() for losses in sample_losses]),
            loss_variances=torch.stack([losses.var(correction=0) for losses in sample_losses]),
            sample_losses=tuple(sample_losses),
        )


class LoopGradients:
    """Computes gradients worker by worker.

    >>> engine = LoopGradients(nn.Linear(2, 3))
    >>> batch = Assignment(inputs=torch.ones(4, 2), targets=torch.tensor([0, 1, 2, 0]))
    >>> result = engine.compute(engine.model.parameters.clone(), engine.model.buffers, [batch])
    >>> result.gradients.shape
    torch.Size([1, 9])
    """

    def __init__(self, module: nn.Module, loss: SampleLoss | None = None, *, block_by_block: bool = False) -> None:
        self.model = FlatModel(module)
        self._loss = CrossEntropy() if loss is None else loss
        # One number for a block need not be the mean of its samples: then only blocks give what a real worker gives.
        self._in_blocks = block_by_block or has_batch_norm(module) or not self._loss.per_sample

    def compute(self, parameters: torch.Tensor, buffers: torch.Tensor, assignments: Sequence[Assignment]) -> Gradients:
        """Return the gradient of each assignment at the given parameters."""
        self.model.module.train()
        rows, after, losses = [], [], list[torch.Tensor]()
        with torch.random.fork_rng(devices=[]):
            for assignment in assignments:
                torch.default_generator.manual_seed(assignment.seed)
                self.model.load(parameters, buffers)
                self.model.gradient.zero_()
                parts = assignment.blocks_done if self._in_blocks else 1
                losses.append(accumulate(self.model.module, assignment, self._loss, parts=parts)[0])
                rows.append(self.model.gradient.clone())
                after.append(self.model.buffers)
        return Gradients.of(torch.stack(rows), torch.stack(after), losses)


def accumulate(
    module: nn.Module,
    assignment: Assignment,
    loss: SampleLoss,
    *,
    parts: int,
    go_on: Callable[[int], bool] = lambda done: True,
) -> tuple[torch.Tensor, int]:
    """Add the gradient of the blocks done, part by part; return the loss of every sample in them, and the parts taken.

    `go_on(parts taken)` is asked after every part.

    >>> network = nn.Linear(2, 2)
    >>> batch = Assignment(inputs=torch.ones(4, 2), targets=torch.zeros(4, dtype=torch.int64), blocks=2, blocks_done=2)
    >>> losses, taken = accumulate(network, batch, CrossEntropy(), parts=2, go_on=lambda taken: False)
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
        losses = loss(module(inputs), targets)
        weighed = losses if weighing is None else losses * weighing
        (weighed.sum() / len(assignment.inputs)).backward()  # type: ignore[no-untyped-call]
        seen.append(losses.detach())
        if not go_on(len(seen)):
            break
    return torch.cat(seen), len(seen)


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether a sample's output depends on the others in its batch.

    >>> has_batch_norm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    True
    """
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
