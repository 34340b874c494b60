"""The one place that makes process groups.

A group is made of some ranks for one purpose, so that nothing else of the script comes in between, and has a timeout.
There are two kinds:

    make_group     a group of its own; whoever makes it lets go of it with `close_group`
    shared_group   made once for all users with the same purpose, ranks, backend and timeout

torch has no good way to let go of groups of some of the ranks, and each costs connections: so two pipelines of the same
ranks share theirs, and so do two samplers.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_SHARED: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], dist.ProcessGroup | None]] = weakref.WeakKeyDictionary()


def make_group(ranks: Sequence[int], backend: str, timeout_seconds: float) -> dist.ProcessGroup:
    """Make a process group that nothing else uses; all of these ranks must call it.

    `backend` is a name, or what torch calls a backend's config: "cpu:gloo,cuda:nccl".
    """
    kinds = {part.split(":")[-1] for part in backend.split(",")}
    backend = kinds.pop() if len(kinds) == 1 else backend  # torch warns of every group that is named by a config
    among_others = len(ranks) < dist.get_world_size()  # those do not come here, and are not waited for
    timeout = datetime.timedelta(seconds=timeout_seconds)
    group = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=among_others)
    if not isinstance(group, dist.ProcessGroup):
        raise RuntimeError(f"rank {dist.get_rank()} is not among the ranks of this group ({list(ranks)})")
    return group


def close_group(group: dist.ProcessGroup, *, pending: bool) -> None:
    """Take down a group of `make_group`, without waiting for a collective that is still `pending`."""
    if pending and group.name() == "gloo":
        # Let the group's destructor never run, not even as the interpreter ends: gloo's waits for the operation under
        # way, for as long as the group's timeout, and then ends the process by SIGABRT.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    elif pending:
        group.abort()
    with contextlib.suppress(ValueError):  # the script has destroyed it already
        # torch names groups of some ranks by their ranks: the next one would meet the remains of this one, so it stays.
        if group.size() == dist.get_world_size():
            dist.destroy_process_group(group)


# -- groups that are made once -----------------------------------------------------------------------------------------


def shared_group(
    sets: Sequence[Sequence[int]], everyone: Sequence[int], backend: str, timeout_seconds: float, *, purpose: str
) -> dist.ProcessGroup | None:
    """Make a group of each of these sets of ranks, or find them; return the one that this rank is in, if there is one.

    `everyone` are the ranks that come here, all with the same sets, whichever of them they are in; no two sets overlap.

        everyone is all ranks    all of them make every group, as torch wants it
        some of the ranks        the members make a group

    A rank that is in none makes one of itself. It is of no use, but torch names a group by how many a rank has, and the
    next one that this rank makes with others must have the same name everywhere.
    """
    made = _SHARED.setdefault(dist.group.WORLD, {})
    key = (purpose, tuple(everyone), tuple(map(tuple, sets)), backend, timeout_seconds)
    if key not in made:
        made[key] = _make_shared(sets, everyone, backend, datetime.timedelta(seconds=timeout_seconds))
    return made[key]


def _make_shared(
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


def forget_groups(everyone: Sequence[int], *, purpose: str) -> list[dist.ProcessGroup]:
    """Let the next user of this purpose make groups anew; return those that this rank was in."""
    made = _SHARED.get(dist.group.WORLD, {})
    ours = [key for key in made if key[:2] == (purpose, tuple(everyone))]
    return [group for group in map(made.pop, ours) if group is not None]
