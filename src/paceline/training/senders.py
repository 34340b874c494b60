"""Gradients on their way to the server, where one process plays all workers: each is encoded as its worker would have.

A codec that remembers (error feedback, warm starts) has one memory for each worker, which begins empty when the worker
joins, and moves with every gradient it encodes, whatever becomes of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.codecs import Codec
from paceline.randomness import torch_generator


def gradient_generator(seed: int, worker: int, draw: int) -> torch.Generator:
    """The random numbers for encoding the gradient of a worker's batch: they follow from the place alone.

    >>> gradient_generator(0, 1, 2).initial_seed() == gradient_generator(0, 1, 2).initial_seed()
    True
    """
    return torch_generator(seed, "up", worker, draw)


class Senders:
    """The codecs of all workers.

    >>> from paceline.codecs.one_bit import OneBit
    >>> senders = Senders(OneBit(), [torch.Size([2])], seed=0)
    >>> payload = senders.encode(torch.tensor([1.0, 3.0]), worker=4, draw=0)
    >>> senders.decode(payload)
    tensor([2., 2.])
    """

    def __init__(self, codec: Codec, shapes: Sequence[torch.Size], *, seed: int) -> None:
        self._codec, self._shapes, self._seed = codec, shapes, seed
        self._own: dict[int, Codec] = {}

    @property
    def remember(self) -> bool:
        """Whether what is sent depends on what was sent before."""
        return self._codec.fresh() is not self._codec

    def joined(self, worker: int) -> None:
        """A worker begins anew."""
        self._own.pop(worker, None)

    def encode(self, gradient: torch.Tensor, *, worker: int, draw: int) -> torch.Tensor:
        """What a worker sends; NotFiniteError if that cannot be sent."""
        if worker not in self._own:
            self._own[worker] = self._codec.fresh(self._shapes)
        return self._own[worker].encode(gradient, gradient_generator(self._seed, worker, draw))

    def decode(self, payload: torch.Tensor) -> torch.Tensor:
        """What the server makes of it."""
        return self._codec.decode(payload)
