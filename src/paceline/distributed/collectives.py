"""Collectives that are started now and waited for later, also when a script ends before they do.

A script may end while a collective is under way that the others have left out. gloo cannot take it back: its thread
ends it with an error when another rank's process ends, and no wait is long enough for that (under load a process takes
more than 10 s to end). A thread that calls Python while the interpreter is being finalised is ended by it, inside a C++
handler, and the process aborts: 14 of 24 did. So the callback is not on the collective's own future, which only gloo
may complete, but on one that follows it, and that the exit handler completes before:

    gloo's thread ──> work's future ──(C++)──> a future that follows it ──(Python)──> PendingCollective is done
                                               completed by `detach`: gloo finds it complete, and calls nobody
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline.distributed import RankGoneError, first_line
from paceline.distributed.groups import never_destroy
from paceline.distributed.stores import StoreGather

POLL_SECONDS = 0.0005  # where the backend does not call back
CALLBACK_SECONDS = 5.0  # for a callback that has begun when the script ends


def start_gather(ours: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    """Start to gather a flat tensor of every rank, of one length on all; return where they will be, and the work."""
    gathered = ours.new_empty(ours.numel() * group.size())
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
    return gathered, gather(gathered, ours, group=group, async_op=True)


def gather_vector(ours: torch.Tensor, store: StoreGather) -> torch.Tensor:
    """All-gather a vector of the same length from every rank; RankGoneError if the others do not answer in time."""
    group = dist.group.WORLD
    if not ours.numel() or group is None:
        return ours
    gathered, work = start_gather(ours, group)
    pending = PendingCollective(work, ours.device)
    pending.wait(store.timeout_seconds)
    waited = f"rank {store.rank} waited for all ranks' times"
    if not pending.done():
        raise RankGoneError(f"{waited}, and they have not come in {store.timeout_seconds:g} s")
    try:
        pending.check()
    except RuntimeError as error:
        raise RankGoneError(f"{waited}, and a connection is lost: {first_line(error)}") from error
    return gathered


class PendingCollective:
    """A collective under way; `done_at` is when it was over, by time.perf_counter(), None if it is not.

    `then` is called once when it is over, on the CPU alone, by a thread of the backend's that does nothing else
    meanwhile.
    """

    def __init__(self, work: Any, device: torch.device, then: Callable[[], None] | None = None) -> None:
        self._work, self._calls_back, self._then = work, device.type == "cpu", then
        self.done_at: float | None = None
        self._done = threading.Event()
        if self._calls_back:  # on gloo is_completed() turns true a little later; NCCL calls back when it has begun
            self._follower = torch.futures.collect_all([work.get_future()])
            _CALLING_BACK[id(self)] = self
            self._follower.add_done_callback(self._on_done)
            if _exiting.is_set():  # a thread that outlives the exit handler
                self.detach()

    def _on_done(self, _: Any) -> None:
        if self._calls_back:
            self._set_done()
            if self._then is not None:
                self._then()

    def _set_done(self) -> None:
        self.done_at = time.perf_counter()
        self._done.set()

    def done(self) -> bool:
        """Whether it is over, well or not; costs next to nothing."""
        if not self._calls_back and not self._done.is_set() and self._work.is_completed():
            self._set_done()
        return self._done.is_set()

    def wait(self, seconds: float) -> None:
        """Wait until it is over, at most so long. Never `work.wait(timeout)`: it closes gloo's connections for good."""
        if self._calls_back:
            self._done.wait(seconds)
            return
        deadline = time.monotonic() + seconds
        while not self.done() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def detach(self) -> None:
        """Have gloo's thread call no Python from now on, nor destroy what is Python's; the collective goes on."""
        if not self._calls_back:
            return
        self._calls_back = False
        for each in (self._work, self._follower):  # the work holds tensors
            never_destroy(each)
        try:
            self._follower.set_result([])
        except RuntimeError:  # gloo was first, and its thread calls back now, or has done so
            while not self._work.is_completed():  # true when the callback is through
                time.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Raise the collective's error, if it has one; on a GPU, make the current stream wait for the collective."""
        self._work.wait()


class FollowedCollective:
    """A collective of the CPU's, and `future`, which follows it: its callbacks are not called by gloo at exit.

    It is kept until the work is completed, which is when its callbacks are through: one that has begun is waited for at
    exit.
    """

    __slots__ = ("_work", "future")

    def __init__(self, work: Any) -> None:
        self._work, self.future = work, torch.futures.collect_all([work.get_future()])
        while _FOLLOWED and _FOLLOWED[0]._work.is_completed():
            _FOLLOWED.popleft()
        _FOLLOWED.append(self)
        if _exiting.is_set():
            self.detach()

    def detach(self) -> None:
        """Complete `future` here, so that gloo's thread calls nobody."""
        self.keep()
        try:
            self.future.set_result([])
        except RuntimeError:  # gloo was first, and its thread calls back now, or has done so
            deadline = time.monotonic() + CALLBACK_SECONDS
            while not self._work.is_completed() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)

    def keep(self) -> None:
        """Let nobody destroy the collective, here and in gloo's thread."""
        for each in (self._work, self.future):
            never_destroy(each)


# By id. A callback that is still to come keeps its collective alive.
_CALLING_BACK: weakref.WeakValueDictionary[int, PendingCollective] = weakref.WeakValueDictionary()
_FOLLOWED: deque[FollowedCollective] = deque()
_exiting = threading.Event()
os.register_at_fork(after_in_child=_CALLING_BACK.clear)  # gloo's threads do not survive a fork


def _forget_followed() -> None:
    for followed in _FOLLOWED:
        followed.keep()  # gloo's destructors would wait for threads that the child does not have
    _FOLLOWED.clear()


os.register_at_fork(after_in_child=_forget_followed)


@atexit.register  # after the exit handlers of all who start collectives: the last registered runs first
def _detach_all() -> None:
    _exiting.set()
    for reference in _CALLING_BACK.valuerefs():
        collective = reference()
        if collective is not None:
            collective.detach()
    for followed in list(_FOLLOWED):
        followed.detach()
