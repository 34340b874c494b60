"""How the ranks of torch.distributed agree about pruning: a few numbers when an epoch begins and ends, and its losses.

    begin an epoch   (epoch, attempt, batches observed, samples, fingerprint of the order)   must be the same everywhere
    end an epoch     the same but for the order, then losses and who was seen, added up

Every meeting has a deadline. On gloo whoever is missing is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.data.pruning.peers import Alone, Peers

TIMEOUT_SECONDS = 600.0


def find_peers(
    rank: int | None = None,
    world_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Callable[[], Peers]:
    """What finds the ranks when they are needed: a process group may be made after the sampler.

    >>> find_peers()().ranks
    1
    >>> find_peers(rank=0)
    Traceback (most recent call last):
    ValueError: give rank and world_size together, or neither: they are found by themselves (rank=0, world_size=None)
    """
    if (rank is None) != (world_size is None):
        raise ValueError(
            f"give rank and world_size together, or neither: they are found by themselves "
            f"(rank={rank}, world_size={world_size})"
        )
    if rank is not None and world_size is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank must be between 0 and world_size - 1 (rank={rank}, world_size={world_size})")

    def find() -> Peers:
        if world_size == 1:
            return Alone()
        if not dist.is_available() or not dist.is_initialized():
            if world_size is None:
                return Alone()
            raise RuntimeError(
                f"{world_size} ranks must agree on who sits out: call torch.distributed.init_process_group first"
            )
        found = Ranks(group, timeout_seconds)
        if world_size is not None and (rank, world_size) != (found.rank, found.ranks):
            raise ValueError(
                f"rank and world_size must be those of the process group (rank={rank}, world_size={world_size}; the "
                f"group says rank={found.rank}, world_size={found.ranks})"
            )
        return found if found.ranks > 1 else Alone()

    return find


class Ranks:
    """The ranks of a process group; needs one."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_seconds: float) -> None:
        self._group, self._timeout = group, timedelta(seconds=timeout_seconds)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def agree(self, moment: str, numbers: Sequence[int], names: Sequence[str]) -> None:
        """Refuse to go on unless all ranks come with the same numbers."""
        self._meet(moment)
        own = torch.tensor(list(numbers), dtype=torch.int64, device=self._device)
        rows = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(rows, own, group=self._group)
        first = rows[0].tolist()
        for rank, row in enumerate(rows):
            for name, here, there in zip(names, row.tolist(), first, strict=True):
                if here != there:
                    raise RuntimeError(
                        f"ranks do not agree when they {moment}: {name} is {here} on rank {rank}, {there} on rank 0; "
                        "give all ranks the same data set, settings and seeds, and let them take the same steps"
                    )

    def add_up(self, values: NDArray[np.float32]) -> None:
        """Replace the values by their sum over all ranks."""
        tensor = torch.from_numpy(values)
        moved = tensor.to(self._device)
        dist.all_reduce(moved, group=self._group)
        if moved is not tensor:
            tensor.copy_(moved)

    def _meet(self, moment: str) -> None:
        """Wait for all, and name who does not come."""
        if dist.get_backend(self._group) != "gloo":
            return  # others wait for the timeout of their process group
        try:
            dist.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise TimeoutError(
                f"rank {self.rank} waited to {moment} in pruning, and not all ranks came within "
                f"{self._timeout.total_seconds():g} s: {error}"
            ) from error

    @property
    def _device(self) -> torch.device:
        if dist.get_backend(self._group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
