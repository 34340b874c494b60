"""The order in which one worker meets its samples.

    pass 0              pass 1              pass 2
    c a d b e | e b a c d | a d e c b | ...          each pass is a new permutation of the shard
    [c a d b][e e b a][c d a d] ...                  batches of 4 run across the ends of passes

So every batch has exactly the size asked for, no sample is dropped, and over any m passes every sample
comes m times. A pass's permutation depends on the seed, the worker and the pass alone: not on the other
workers, nor on what was drawn before, which is why two numbers are enough to resume.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from paceline.randomness import torch_generator


def check_shard(shard: torch.Tensor, *, batch_size: int, worker: int) -> None:
    """Refuse what no worker can draw batches from.

    >>> check_shard(torch.arange(3), batch_size=0, worker=0)
    Traceback (most recent call last):
    ValueError: batch_size must be at least 1 (batch_size=0)
    """
    if shard.ndim != 1 or shard.dtype != torch.int64 or len(shard) == 0:
        raise ValueError(
            f"shard must be an int64 tensor of at least one sample index (shape={tuple(shard.shape)}, "
            f"dtype={shard.dtype})"
        )
    for name, value, least in (("batch_size", batch_size, 1), ("worker", worker, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least} ({name}={value})")


class BatchOrder:
    """Endless batches of sample indices for one worker.

    >>> order = BatchOrder(torch.tensor([10, 11, 12]), 2, seed=0, worker=4)
    >>> sorted(torch.cat([order.next(), order.next(), order.next()]).tolist())
    [10, 10, 11, 11, 12, 12]
    >>> order.state_dict()
    {'passes': 2, 'position': 0}
    """

    def __init__(self, shard: torch.Tensor, batch_size: int, *, seed: int, worker: int) -> None:
        check_shard(shard, batch_size=batch_size, worker=worker)
        self._shard, self._batch_size, self._seed, self._worker = shard, batch_size, seed, worker
        self._begin_pass(0)

    @property
    def samples(self) -> int:
        """The number of samples of the shard.

        >>> BatchOrder(torch.arange(3), 2, seed=0, worker=0).samples
        3
        """
        return len(self._shard)

    def next(self, samples: int | None = None) -> torch.Tensor:
        """Return the indices of the next batch: `samples` of them, or else exactly `batch_size`.

        >>> order = BatchOrder(torch.arange(3), 8, seed=0, worker=0)
        >>> len(order.next()), len(order.next(5))
        (8, 5)
        """
        pieces: list[torch.Tensor] = []
        missing = self._batch_size if samples is None else samples
        while missing > 0:
            piece = self._permuted[self._position : self._position + missing]
            pieces.append(piece)
            missing -= len(piece)
            self._position += len(piece)
            if self._position == len(self._shard):
                self._begin_pass(self._passes + 1)
        return torch.cat(pieces)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        return self.next()

    def state_dict(self) -> dict[str, int]:
        """Return how many passes are done, and how far the present one is.

        >>> BatchOrder(torch.arange(3), 2, seed=0, worker=0).state_dict()
        {'passes': 0, 'position': 0}
        """
        return {"passes": self._passes, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on exactly where another order of the same shard, seed and worker stood.

        >>> first, second = (BatchOrder(torch.arange(9), 2, seed=0, worker=0) for _ in range(2))
        >>> _ = [first.next() for _ in range(7)]
        >>> second.load_state_dict(first.state_dict())
        >>> bool((first.next() == second.next()).all())
        True
        """
        if set(state) != {"passes", "position"}:
            raise ValueError(f"state must hold passes and position (it holds {', '.join(sorted(state))})")
        if type(state["passes"]) is not int or state["passes"] < 0:
            raise ValueError(f"passes must be a whole number of at least 0 (passes={state['passes']!r:.40})")
        if type(state["position"]) is not int or not 0 <= state["position"] < len(self._shard):
            raise ValueError(
                "position must be between 0 and the shard's last sample: the state is of another shard "
                f"(position={state['position']!r:.40}, samples={len(self._shard)})"
            )
        self._begin_pass(state["passes"])
        self._position = state["position"]

    def _begin_pass(self, number: int) -> None:
        generator = torch_generator(self._seed, "batches", self._worker, number)
        self._passes, self._position = number, 0
        self._permuted = self._shard[torch.randperm(len(self._shard), generator=generator)]
