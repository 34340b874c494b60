"""Batches cut into equal blocks, so that a late worker can stop between two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def cut_batch(batch: tuple[Any, ...], most_blocks: int) -> list[Any]:
    """Return a batch in equal blocks: as many as divide it evenly, and not more than `most_blocks`.

    A block is what the batch is: tensors as a tuple, one tensor as itself, a dict of tensors as a dict. It has at least
    two samples, unless the batch has one: BatchNorm refuses a single sample.

    >>> [len(inputs) for inputs, targets in cut_batch((torch.zeros(6, 2), torch.zeros(6)), 4)]
    [2, 2, 2]
    >>> cut_batch(({"ids": torch.tensor([3, 4, 5, 6])},), 4)
    [{'ids': tensor([3, 4])}, {'ids': tensor([5, 6])}]
    """
    if len(batch) == 1 and isinstance(batch[0], Mapping):
        names = list(batch[0])
        return [dict(zip(names, block, strict=True)) for block in _cut(tuple(batch[0].values()), most_blocks)]
    return [block if len(block) > 1 else block[0] for block in _cut(batch, most_blocks)]


def count_samples(batch: tuple[Any, ...]) -> int:
    """Return how many samples a batch has that `cut_batch` can cut.

    >>> count_samples((torch.zeros(6, 2), torch.zeros(6))), count_samples(({"ids": torch.tensor([3, 4])},))
    (6, 2)
    """
    parts = batch[0].values() if isinstance(batch[0], Mapping) else batch
    return len(next(iter(parts)))


def _cut(batch: tuple[Any, ...], most_blocks: int) -> list[tuple[torch.Tensor, ...]]:
    for part in batch:
        if not isinstance(part, torch.Tensor):
            raise ValueError(
                f"blocks() cuts tensors along their first dimension (found a {type(part).__name__}); give tensors "
                "one by one, blocks(inputs, targets), or a dict of tensors"
            )
    if not batch or not batch[0].ndim or not len(batch[0]):
        raise ValueError("blocks() needs a batch of at least one sample")
    if any(len(part) != len(batch[0]) for part in batch):
        sizes = ", ".join(str(len(part)) for part in batch)
        raise ValueError(f"blocks() needs tensors of one length (they have {sizes})")
    samples = len(batch[0])
    most = max(1, min(most_blocks, samples // 2))
    blocks = next(count for count in range(most, 0, -1) if samples % count == 0)
    return list(zip(*(tensor.chunk(blocks) for tensor in batch), strict=True))
