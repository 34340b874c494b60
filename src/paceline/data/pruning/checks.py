"""What may be observed: one finite loss for each sample of the batch, once."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.pruning.ledger import PruningError


def check_losses(losses: torch.Tensor, size: int, step: int, *, again: bool) -> None:
    """Refuse what is not one loss for each of `size` samples.

    >>> check_losses(torch.tensor(0.3), 4, 0, again=False)
    Traceback (most recent call last):
    ValueError: losses must be one for each sample, and this is a single number: give the loss ... reduction='none'
    """
    if not isinstance(losses, torch.Tensor):
        raise TypeError(f"losses must be a tensor (it is a {type(losses).__name__})")
    if losses.shape != (size,):
        if losses.ndim == 0:
            raise ValueError(
                "losses must be one for each sample, and this is a single number: "
                "give the loss function reduction='none'"
            )
        raise ValueError(
            f"batch {step + 1} has {size} samples, and losses has the shape {tuple(losses.shape)}: give one loss for "
            "each sample"
        )
    if again:
        raise PruningError(f"these losses were observed before, as batch {step}: call observe() once for every batch")


def refuse_not_finite(losses: torch.Tensor, batch: NDArray[np.int32], where: str) -> None:
    """Name the first sample whose loss is not finite.

    >>> refuse_not_finite(torch.tensor([1.0, torch.nan]), np.array([7, 9], np.int32), "batch 1 of epoch 2")
    Traceback (most recent call last):
    ValueError: the loss of sample 9 in batch 1 of epoch 2 is nan: nothing was learned from the batch; ...
    """
    bad = int(torch.isfinite(losses).logical_not().to(torch.uint8).argmax())  # the first, if only the sum overflows
    raise ValueError(
        f"the loss of sample {batch[bad]} in {where} is {float(losses[bad])}: nothing was learned from the batch; "
        "lower the learning rate, or leave the batch out with skip()"
    )
