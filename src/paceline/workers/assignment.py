"""What one worker is to compute, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """A worker's batch, and how many of its equal blocks it gets done; `seed` is for what the model draws (dropout).

    `weights` multiply the losses of the samples in the gradient (None: all weigh 1); the losses told are without them.

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
    """A row per worker: the flat gradient, the buffers after the pass, and the mean and variance of its losses.

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
