"""Batches cut into equal blocks, so that a late worker can stop between two."""

from __future__ import annotations

import torch


def cut_batch(batch: tuple[torch.Tensor, ...], most_blocks: int) -> list[tuple[torch.Tensor, ...]]:
    """Return a batch of tensors in equal blocks: as many as divide it evenly, and not more than `most_blocks`.

    >>> [len(inputs) for inputs, targets in cut_batch((torch.zeros(6, 2), torch.zeros(6)), 4)]
    [2, 2, 2]
    """
    for part in batch:
        if not isinstance(part, torch.Tensor):
            raise ValueError(
                f"blocks() cuts tensors along their first dimension (found a {type(part).__name__}); give the tensors "
                "one by one: blocks(inputs, targets)"
            )
    if not batch or not batch[0].ndim or not len(batch[0]):
        raise ValueError("blocks() needs a batch of at least one sample")
    if any(len(part) != len(batch[0]) for part in batch):
        sizes = ", ".join(str(len(part)) for part in batch)
        raise ValueError(f"blocks() needs tensors of one length (they have {sizes})")
    samples = len(batch[0])
    blocks = next(count for count in range(min(most_blocks, samples), 0, -1) if samples % count == 0)
    return list(zip(*(tensor.chunk(blocks) for tensor in batch), strict=True))
