"""Process groups of some of the ranks, made once for all pipelines of a launch.

torch has no good way to let go of groups of some ranks, and each costs connections: two pipelines of the same ranks
with the same deadline share theirs. All ranks come here with the same list, whichever of the groups they are in:

    the pipeline has all ranks    all of them make every group, as torch wants it
    it has some of them           the members make a group

Who is in none makes one of itself. It is of no use, but torch names a group by how many a rank has, and the next one
that this rank makes with others must have the same name everywhere.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

Key = tuple[Any, ...]

_MADE: weakref.WeakKeyDictionary[Any, dict[Key, dist.ProcessGroup | None]] = weakref.WeakKeyDictionary()


def room(
    sets: Sequence[Sequence[int]], everyone: Sequence[int], backend: str, timeout_seconds: float
) -> dist.ProcessGroup | None:
    """Make groups of these sets of ranks; the one that this rank is in, if it is in one. No two sets overlap.

    `everyone` are the ranks that come here.
    """
    made = _MADE.setdefault(dist.group.WORLD, {})
    key = (tuple(map(tuple, sets)), tuple(everyone), backend, timeout_seconds)
    if key not in made:
        made[key] = _make(sets, everyone, backend, datetime.timedelta(seconds=timeout_seconds))
    return made[key]


def _make(
    sets: Sequence[Sequence[int]], everyone: Sequence[int], backend: str, timeout: datetime.timedelta
) -> dist.ProcessGroup | None:
    rank, found = dist.get_rank(), None
    if len(everyone) == dist.get_world_size():
        for ranks in sets:
            group = dist.new_group(list(ranks), timeout, backend)
            found = group if rank in ranks and isinstance(group, dist.ProcessGroup) else found
    ours = next((list(ranks) for ranks in sets if rank in ranks), None)
    if found is None:
        group = dist.new_group(ours or [rank], timeout, backend, use_local_synchronization=True)
        found = group if ours and isinstance(group, dist.ProcessGroup) else None
    return found


def forget(everyone: Sequence[int]) -> list[dist.ProcessGroup]:
    """Let the next pipeline of these ranks make its own groups; those that this rank was in."""
    made = _MADE.get(dist.group.WORLD, {})
    ours = [key for key in made if key[1] == tuple(everyone)]
    return [group for group in map(made.pop, ours) if group is not None]
