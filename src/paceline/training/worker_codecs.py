"""The workers' codecs, where one process computes for all workers: each gradient is encoded as its worker would have.

A codec with a memory (error feedback, warm starts) has one for each worker. It begins empty when the worker joins, and
changes with every gradient that it encodes, whatever becomes of the gradient. So a journal of who joined and what
arrived is enough to compute every residual again, also those of gradients that were dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.codecs import Codec
from paceline.randomness import torch_generator


def gradient_generator(seed: int, worker: int, draw: int) -> torch.Generator:
    """Return the random numbers for encoding the gradient of a worker's batch: they follow from the place alone.

    >>> gradient_generator(0, 1, 2).initial_seed() == gradient_generator(0, 1, 2).initial_seed()
    True
    """
    return torch_generator(seed, "up", worker, draw)


class WorkerCodecs:
    """The codecs of all workers.

    >>> from paceline.codecs.one_bit import OneBit
    >>> codecs = WorkerCodecs(OneBit(), [torch.Size([2])], seed=0)
    >>> payload = codecs.encode(torch.tensor([1.0, 3.0]), worker=4, draw=0)
    >>> codecs.decode(payload)
    tensor([2., 2.])
    """

    def __init__(self, codec: Codec, shapes: Sequence[torch.Size], *, seed: int) -> None:
        self._codec, self._shapes, self._seed = codec, shapes, seed
        self._by_worker: dict[int, Codec] = {}

    @property
    def remember(self) -> bool:
        """Whether what is sent depends on what was sent before."""
        return self._codec.fresh() is not self._codec

    def joined(self, worker: int) -> None:
        """Forget the memory of a worker, which begins anew."""
        self._by_worker.pop(worker, None)

    def encode(self, gradient: torch.Tensor, *, worker: int, draw: int) -> torch.Tensor:
        """Return the payload that a worker sends; NotFiniteError if its gradient cannot be sent."""
        if worker not in self._by_worker:
            self._by_worker[worker] = self._codec.fresh(self._shapes)
        return self._by_worker[worker].encode(gradient, gradient_generator(self._seed, worker, draw))

    def decode(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the gradient that the server decodes."""
        return self._codec.decode(payload)
