"""What may be observed: one finite loss for each sample of the batch, once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.pruning.ledger import PruningError


def check_losses(losses: torch.Tensor, size: int, step: int) -> None:
    """Refuse what is not one loss for each of `size` samples.

    >>> check_losses(torch.tensor(0.3), 4, 0)
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
    if not losses.is_floating_point():
        raise ValueError(f"losses must be floating-point numbers (they are {losses.dtype})")


def check_samples(given: Any, batch: NDArray[np.int32], step: int) -> None:
    """Refuse losses of other samples than those of the batch.

    >>> check_samples([1, 2], np.array([2, 1], np.int32), 0)
    Traceback (most recent call last):
    paceline.data.pruning.ledger.PruningError: these losses are not those of batch 1, which has the samples 2, 1: ...
    """
    if np.array_equal(np.asarray(given), batch):
        return
    few = ", ".join(map(str, batch[:4].tolist()))
    raise PruningError(
        f"these losses are not those of batch {step + 1}, which has the samples {few}{', ...' * (len(batch) > 4)}: "
        "observe batches in the order in which the loader gives them, and let it keep to its order (in_order=True)"
    )


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
