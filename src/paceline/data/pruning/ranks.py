"""How the ranks of torch.distributed agree about pruning when an epoch begins and when it ends.

    begin an epoch   compare epoch, attempt, batches observed, samples, steps, fingerprint of the order: else raise
    end an epoch     compare the same without the fingerprint; then all-reduce (sum) the losses and the observed flags

All ranks then decide by the same losses, with the same code, and come to the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.pruning.policy import PruningError, finite_number, whole_number
from paceline.distributed.agreement import Meetings, current_group

if TYPE_CHECKING:
    from paceline.distributed.agreement import ProcessGroup

TIMEOUT_SECONDS = 600.0
REMEDY = (
    "give all ranks the same data set, settings and seeds (a base too: seed its generator alike), and let them take "
    "the same steps"
)
FindRanks = Callable[[], Meetings | None]
"""Returns the meetings of the ranks that there are now; None for a single process."""


def single_process() -> Meetings | None:
    """Find no other ranks."""
    return None


@dataclass
class GroupFinder:
    """Finds the ranks when they are needed: a process group may be made after the sampler.

    >>> GroupFinder()() is None
    True
    >>> GroupFinder(rank=0)
    Traceback (most recent call last):
    ValueError: give rank and world_size together, or neither: they are found by themselves (rank=0, world_size=None)
    """

    rank: int | None = None
    world_size: int | None = None
    group: ProcessGroup | None = None
    timeout_seconds: float = TIMEOUT_SECONDS
    _found: Meetings | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if finite_number("timeout_seconds", self.timeout_seconds) <= 0:
            raise ValueError(f"timeout_seconds must be above 0 (timeout_seconds={self.timeout_seconds})")
        if (self.rank is None) != (self.world_size is None):
            raise ValueError(
                f"give rank and world_size together, or neither: they are found by themselves "
                f"(rank={self.rank}, world_size={self.world_size})"
            )
        if self.rank is not None:
            ranks = whole_number("world_size", self.world_size, least=1)
            whole_number("rank", self.rank, least=0, most=ranks - 1)

    def __call__(self) -> Meetings | None:
        """Return the meetings of the ranks that there are now; None for a single process."""
        if self.world_size == 1:
            return None
        group = current_group(self.group)
        if group is None:
            if self.world_size is None:
                return None
            raise PruningError(
                f"{self.world_size} ranks must agree on who sits out: call torch.distributed.init_process_group first"
            )
        if self._found is None or self._found.of is not group:
            self._found = Meetings(group, self.timeout_seconds, purpose="pruning")
        found = self._found
        if self.world_size is not None and (self.rank, self.world_size) != (found.rank, found.ranks):
            raise ValueError(
                f"rank and world_size must be those of the process group (rank={self.rank}, "
                f"world_size={self.world_size}; the group says rank={found.rank}, world_size={found.ranks})"
            )
        return found if found.ranks > 1 else None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_found": None}  # another process finds the ranks itself


def agree(ranks: Meetings | None, moment: str, **numbers: int) -> None:
    """Refuse to go on unless all ranks come with the same numbers."""
    if ranks is not None:
        named = {name.replace("_", " "): number for name, number in numbers.items()}
        ranks.compare(moment, named, remedy=REMEDY, error=PruningError)


def seen_by_any(values: NDArray[np.float32], ranks: Meetings | None) -> NDArray[np.float32]:
    """Return the losses of all ranks in one array: the sum over ranks, NaN where no rank has observed the sample.

    >>> seen_by_any(np.array([0.5, np.nan], np.float32), None)
    array([0.5, nan], dtype=float32)
    """
    if ranks is None:
        return values
    unseen = np.isnan(values)
    total, seen = np.where(unseen, np.float32(0), values), (~unseen).astype(np.float32)
    ranks.add_up(total)
    ranks.add_up(seen)
    total[seen == 0] = np.nan
    return total
