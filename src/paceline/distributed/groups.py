"""The one place that makes process groups.

A group is made of some ranks for one purpose, so that nothing else of the script comes in between, and has a timeout.
There are two kinds:

    make_group     a group of its own; whoever makes it lets go of it with `close_group`
    shared_group   made once for all users with the same purpose, ranks, backend and limits

Ranks meet in the store before (`meet_ranks`), which names those that do not come. One that is gone, or stopped, by the
time the group is made is named too, some seconds after the limit; but not the one that keeps the store of a launch, if
it is stopped while the others connect: torch asks the store then, and waits for its answer.

torch has no good way to let go of groups of some of the ranks, and each costs connections: so two pipelines of the same
ranks share theirs, and so do two samplers.

A group has threads, and a process that is forked (a DataLoader's worker) has none of them. Its garbage collector would
destroy groups that the parent had let go of, and their destructors wait for those threads: the worker dies with signal
11. So from the first group on, what a forked process has inherited is no garbage of its own (`gc.freeze`).
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import gc
import hashlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from paceline.distributed import RankGoneError, first_line, name_ranks
from paceline.distributed.stores import FleetingStore, ask_within

BEAT_SECONDS, PRESENT_SECONDS = 0.25, 3.0  # how often, and within which time, a rank that connects says that it lives
_SHARED: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], dist.ProcessGroup | None]] = weakref.WeakKeyDictionary()


def make_group(
    ranks: Sequence[int], backend: str, timeout_seconds: float, *, grace_seconds: float = 0.0
) -> dist.ProcessGroup:
    """Make a process group that nothing else uses; all of these ranks must call it, when they have met.

    `backend` is a name, or what torch calls a backend's config: "cpu:gloo,cuda:nccl". Collectives may take
    `grace_seconds` longer than the ranks have to connect: for those who have a limit of their own, that comes first.
    """
    _protect_forked_processes()
    kinds = {part.split(":")[-1] for part in backend.split(",")}
    backend = kinds.pop() if len(kinds) == 1 else backend  # torch warns of every group that is named by a config
    among_others = len(ranks) < dist.get_world_size()  # those do not come here, and are not waited for
    timeout = datetime.timedelta(seconds=timeout_seconds)
    with _naming_who_left(ranks):
        group = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=among_others)
    if not isinstance(group, dist.ProcessGroup):
        raise RuntimeError(f"rank {dist.get_rank()} is not among the ranks of this group ({list(ranks)})")
    _add_grace(group, timeout_seconds, grace_seconds)
    return group


def _add_grace(group: dist.ProcessGroup, timeout_seconds: float, grace_seconds: float) -> None:
    if grace_seconds:
        limit = datetime.timedelta(seconds=timeout_seconds + grace_seconds)
        dist.distributed_c10d._set_pg_timeout(limit, group)


@contextlib.contextmanager
def _naming_who_left(ranks: Sequence[int]) -> Iterator[None]:
    """Name a rank that was there when these met, and is gone, or stopped, before they are connected: torch does not.

    Torch gives up on one rank seconds before it does on another. So each says now and then that it lives, and in the
    end that it is through:

        beat/<rank>     how often it has said that it lives, in all groups of these ranks
        begun/<rank>    how many of them it has begun to make
        through/<rank>  how many of them it is through with, whether it has connected or given up
    """
    rank, stop = dist.get_rank(), threading.Event()
    others = [each for each in ranks if each != rank]
    store: Any = FleetingStore(f"connect/{hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]}")

    def beat() -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # the store is lost, or the default group is no more
            while not stop.wait(BEAT_SECONDS):
                store.add(f"beat/{rank}", 1)
            store.add(f"through/{rank}", 1)  # not in the calling thread: a store that is stopped never answers

    def find_missing() -> list[int]:
        before = {each: store.add(f"beat/{each}", 0) for each in others}
        stop.wait(PRESENT_SECONDS)
        silent = [each for each in others if store.add(f"beat/{each}", 0) == before[each]]
        return [each for each in silent if store.add(f"through/{each}", 0) < number]

    waited = f"rank {rank} waited for the others to connect"
    number = ask_within(lambda: store.add(f"begun/{rank}", 1), PRESENT_SECONDS, waited) if others else 0
    thread = threading.Thread(target=beat, name="paceline-connecting", daemon=True)
    if others:
        thread.start()
    try:
        yield
    except RuntimeError as error:
        why = f"rank {rank} cannot connect with the others: {first_line(error)}"
        try:
            missing = ask_within(find_missing, PRESENT_SECONDS, waited)
        except RankGoneError as gone:
            raise RankGoneError(f"{gone} ({why})") from error
        late = f"rank {rank} waited for {name_ranks(missing)} to connect (" if missing else ""
        raise RankGoneError(f"{late}{why}{')' if late else ''}") from error
    finally:
        stop.set()


@functools.cache
def _protect_forked_processes() -> None:
    """Let no process that is forked from now on collect what it has inherited."""
    os.register_at_fork(after_in_child=gc.freeze)


def never_destroy(item: object) -> None:
    """Leak a reference, so that the destructor never runs, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


def close_group(group: dist.ProcessGroup, *, pending: bool) -> None:
    """Take down a group of `make_group`, without waiting for a collective that is still `pending`."""
    if pending and group.name() == "gloo":
        never_destroy(group)  # gloo's destructor waits for it up to the group's timeout, and then aborts the process
    elif pending:
        group.abort()
    with contextlib.suppress(ValueError):  # the script has destroyed it already
        # torch names a group of part of the ranks by its ranks: a later group of the same ranks would get the same name
        # and find this one's keys in the store. So such a group is not destroyed.
        if group.size() == dist.get_world_size():
            dist.destroy_process_group(group)


# -- groups that are made once -----------------------------------------------------------------------------------------


def shared_group(
    sets: Sequence[Sequence[int]],
    everyone: Sequence[int],
    backend: str,
    timeout_seconds: float,
    *,
    purpose: str,
    local: bool = False,
    grace_seconds: float = 0.0,
) -> dist.ProcessGroup | None:
    """Return the process group of the set that contains this rank, made by the first call; None if no set does.

    Every rank in `everyone` must call it with the same arguments; the sets must not overlap.

        everyone is the whole world    every rank takes part in making every group, as dist.new_group requires
        everyone is a part of it,      only the members of a set make its group (use_local_synchronization), which torch
        or `local`                     names by its ranks: also where ranks have made different numbers of groups before

    A rank that is in no set makes a group of itself alone: torch names a group by the number of groups a rank has made,
    so a rank that left one out would give its next group another name than its peers do.
    """
    made = _SHARED.setdefault(dist.group.WORLD, {})
    key = (purpose, tuple(everyone), tuple(map(tuple, sets)), backend, timeout_seconds, grace_seconds)
    if key not in made:
        together = len(everyone) == dist.get_world_size() and not local
        ours = next((ranks for ranks in sets if dist.get_rank() in ranks), [dist.get_rank()])
        with _naming_who_left(everyone if together else ours):
            group = _make_shared(sets, backend, datetime.timedelta(seconds=timeout_seconds), together=together)
        if group is not None:
            _add_grace(group, timeout_seconds, grace_seconds)
        made[key] = group
    return made[key]


def _make_shared(
    sets: Sequence[Sequence[int]], backend: str, timeout: datetime.timedelta, *, together: bool
) -> dist.ProcessGroup | None:
    _protect_forked_processes()
    rank, found = dist.get_rank(), None
    if together:
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
