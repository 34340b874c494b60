"""Collectives that are started now and waited for later."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from paceline.distributed import RankGoneError, first_line
from paceline.distributed.stores import StoreGather

ALIGNED_BYTES = 16  # where a payload begins, so that its words can be read in place
POLL_SECONDS = 0.0005  # where the backend does not call back


def start_gather(ours: torch.Tensor, size: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    """Start to gather one tensor of every rank, in slots of at least `size` elements; return the slots and the work."""
    slot = -(-size // ALIGNED_BYTES) * ALIGNED_BYTES if ours.dtype is torch.uint8 else size
    if ours.numel() != slot:
        ours = torch.cat([ours, ours.new_zeros(slot - ours.numel())])
    gathered = ours.new_empty(slot * group.size())
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
    return gathered, gather(gathered, ours, group=group, async_op=True)


def gather_vector(ours: torch.Tensor, store: StoreGather) -> torch.Tensor:
    """All-gather a vector of the same length from every rank; RankGoneError if the others do not answer in time."""
    group = dist.group.WORLD
    if not ours.numel() or group is None:
        return ours
    gathered, work = start_gather(ours, ours.numel(), group)
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
    """A collective under way; `done_at` is when it was over, by time.perf_counter(), None if it is not."""

    def __init__(self, work: Any, device: torch.device) -> None:
        self._work, self._calls_back = work, device.type == "cpu"
        self.done_at: float | None = None
        self._done = threading.Event()
        if self._calls_back:  # on gloo is_completed() turns true a little later; NCCL calls back when it has begun
            work.get_future().add_done_callback(self._on_done)

    def _on_done(self, _: Any) -> None:
        self.done_at = time.perf_counter()
        self._done.set()

    def done(self) -> bool:
        """Whether it is over, well or not; costs next to nothing."""
        if not self._calls_back and not self._done.is_set() and self._work.is_completed():
            self._on_done(None)
        return self._done.is_set()

    def wait(self, seconds: float) -> None:
        """Wait until it is over, at most so long. Never `work.wait(timeout)`: it closes gloo's connections for good."""
        if self._calls_back:
            self._done.wait(seconds)
            return
        deadline = time.monotonic() + seconds
        while not self.done() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def leave(self, seconds: float) -> bool:
        """Wait, at most so long, until the backend is through with it; return whether it is.

        Who leaves for good calls it: a callback that comes while the interpreter ends aborts the process. Where others
        leave too, it comes soon: their connections close.
        """
        deadline = time.monotonic() + seconds
        self.wait(seconds)
        while not self._work.is_completed() and time.monotonic() < deadline:  # true when the callback is through
            time.sleep(POLL_SECONDS)
        return self.done()

    def check(self) -> None:
        """Raise the collective's error, if it has one; on a GPU, make the current stream wait for the collective."""
        self._work.wait()
