"""How the ranks of torch.distributed agree about pruning: a few numbers when an epoch begins and ends, and its losses.

    begin an epoch   (epoch, attempt, batches observed, samples, steps, fingerprint of the order)   the same everywhere
    end an epoch     the same but for the order, then losses and who was seen, added up

They meet in a group of their own, on gloo: whatever else the ranks talk about does not come in between, every meeting
has a deadline, and whoever is missing is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.data.pruning.numbers import real, whole
from paceline.data.pruning.peers import Alone, Peers

TIMEOUT_SECONDS = 600.0
_MADE: dict[tuple[int, timedelta], tuple[Any, Any]] = {}


@dataclass
class FindPeers:
    """Finds the ranks when they are needed: a process group may be made after the sampler.

    >>> FindPeers()().ranks
    1
    >>> FindPeers(rank=0)
    Traceback (most recent call last):
    ValueError: give rank and world_size together, or neither: they are found by themselves (rank=0, world_size=None)
    """

    rank: int | None = None
    world_size: int | None = None
    group: dist.ProcessGroup | None = None
    timeout_seconds: float = TIMEOUT_SECONDS
    _found: Ranks | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if real("timeout_seconds", self.timeout_seconds) <= 0:
            raise ValueError(f"timeout_seconds must be above 0 (timeout_seconds={self.timeout_seconds})")
        if (self.rank is None) != (self.world_size is None):
            raise ValueError(
                f"give rank and world_size together, or neither: they are found by themselves "
                f"(rank={self.rank}, world_size={self.world_size})"
            )
        if self.rank is not None:
            whole("rank", self.rank, least=0, most=whole("world_size", self.world_size, least=1) - 1)

    def __call__(self) -> Peers:
        """The ranks that there are now."""
        if self.world_size == 1:
            return Alone()
        if not dist.is_available() or not dist.is_initialized():
            if self.world_size is None:
                return Alone()
            raise RuntimeError(
                f"{self.world_size} ranks must agree on who sits out: call torch.distributed.init_process_group first"
            )
        world = self.group if self.group is not None else dist.group.WORLD
        if self._found is None or self._found.world is not world:
            self._found = Ranks(world, self.timeout_seconds)
        found = self._found
        if self.world_size is not None and (self.rank, self.world_size) != (found.rank, found.ranks):
            raise ValueError(
                f"rank and world_size must be those of the process group (rank={self.rank}, "
                f"world_size={self.world_size}; the group says rank={found.rank}, world_size={found.ranks})"
            )
        return found if found.ranks > 1 else Alone()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_found": None}  # another process finds its own


class Ranks:
    """The ranks of a process group; needs one."""

    def __init__(self, world: dist.ProcessGroup | None, timeout_seconds: float) -> None:
        self.world, self._timeout = world, timedelta(seconds=timeout_seconds)
        self.rank, self.ranks = dist.get_rank(world), dist.get_world_size(world)
        self._own: dist.ProcessGroup | None = None

    def agree(self, moment: str, numbers: Sequence[int], names: Sequence[str]) -> None:
        """Refuse to go on unless all ranks come with the same numbers."""
        group = self._meet(moment)
        own = torch.tensor(list(numbers), dtype=torch.int64)
        rows = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(rows, own, group=group)
        first = rows[0].tolist()
        for rank, row in enumerate(rows):
            for name, here, there in zip(names, row.tolist(), first, strict=True):
                if here != there:
                    raise RuntimeError(
                        f"ranks do not agree when they {moment}: {name} is {here} on rank {rank}, {there} on rank 0; "
                        "give all ranks the same data set, settings and seeds (a base too: seed its generator alike), "
                        "and let them take the same steps"
                    )

    def add_up(self, values: NDArray[np.float32]) -> None:
        """Replace the values by their sum over all ranks."""
        dist.all_reduce(torch.from_numpy(values), group=self._own)

    def _meet(self, moment: str) -> dist.ProcessGroup | None:
        """Wait for all, and name who does not come."""
        try:
            if self._own is None:
                self._own = _own_group(self.world, self._timeout)
            dist.monitored_barrier(self._own, timeout=self._timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise TimeoutError(
                f"rank {self.rank} waited to {moment} in pruning, and not all ranks came (it waits for "
                f"{self._timeout.total_seconds():g} s at most): {error}"
            ) from error
        return self._own


def _own_group(world: dist.ProcessGroup | None, timeout: timedelta) -> dist.ProcessGroup:
    """A group of the same ranks for pruning alone: one for all samplers with the same deadline."""
    of, made = _MADE.get((id(world), timeout), (None, None))
    if of is not world or made is None:
        members = dist.get_process_group_ranks(world)
        made = dist.new_group(members, timeout=timeout, backend="gloo", use_local_synchronization=True)
        _MADE[id(world), timeout] = world, made  # the world is kept, so that its id is not another's
    group: dist.ProcessGroup = made
    return group
