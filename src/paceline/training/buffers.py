"""What of a model is not trained and yet learns: BatchNorm's statistics, which travel with an average as values.

sent     value / N of every number, and of every buffer whether this worker has changed it
taken    the sum, where any worker has; a buffer that nobody changes (a mask, a table) stays as it is, to the bit
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from paceline.training.flat import Flat

COUNTER = "num_batches_tracked"


def averaged_buffers(module: nn.Module) -> list[torch.Tensor]:
    """The buffers that are averaged: floating ones that a checkpoint would hold, and BatchNorm's counter.

    Those in float64 travel as the parameters do, in float32 beside float32.

    >>> [tuple(buffer.shape) for buffer in averaged_buffers(nn.BatchNorm1d(3))]
    [(3,), (3,), ()]
    """
    return list(_averaged_buffers(module))


def _averaged_buffers(module: nn.Module) -> Iterator[torch.Tensor]:
    kept = set(module.state_dict(keep_vars=True))
    for name, buffer in module.named_buffers():  # each once, also where modules share it
        if name in kept and (buffer.is_floating_point() or name.rpartition(".")[2] == COUNTER):
            yield buffer


class Buffers:
    """A worker's buffers.

    >>> mean, mask = torch.zeros(1), torch.tensor([-3e38])
    >>> buffers = Buffers([mean, mask], torch.float32, workers=2)
    >>> message = torch.empty(buffers.size)
    >>> _ = mean.add_(4.0)
    >>> buffers.send(message)
    >>> buffers.take(message)
    >>> mean, mask
    (tensor([2.]), tensor([-3.0000e+38]))
    """

    def __init__(self, buffers: Sequence[torch.Tensor], dtype: torch.dtype, *, workers: int) -> None:
        self._flat, self._workers = Flat(buffers, dtype), workers
        self.size = self._flat.size + len(self._flat.tensors)
        self._agreed = [buffer.detach().clone() for buffer in self._flat.tensors]

    def send(self, out: torch.Tensor) -> None:
        """Fill `out`, of `size` elements, with what this worker has."""
        self._flat.read(out[: self._flat.size])
        out[: self._flat.size].div_(self._workers)
        changed = [not torch.equal(*pair) for pair in zip(self._flat.tensors, self._agreed, strict=True)]
        out[self._flat.size :] = torch.tensor(changed, dtype=out.dtype)

    @torch.no_grad()
    def take(self, total: torch.Tensor) -> None:
        """Take over the mean of the buffers that any worker has changed, from the sum of what all sent."""
        changes = total[self._flat.size :].tolist()
        for buffer, agreed, part, changed in zip(
            self._flat.tensors, self._agreed, self._flat.parts(total), changes, strict=True
        ):
            if changed:
                buffer.copy_(part if buffer.is_floating_point() else part.round())
                agreed.copy_(buffer)
