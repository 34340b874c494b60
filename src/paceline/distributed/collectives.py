"""Collectives that are started now and waited for later; and every rank's payload to every rank, bucket by bucket.

One bucket of gradients after the other is exchanged while backward goes on. A codec whose payloads are all of one size
needs one collective a bucket:

    hook of bucket    0            1            2 (the last)
    payloads          gather 0     gather 1     gather 2

Else the ranks tell each other their sizes first. A bucket's payloads leave in the hook of the next one, when the sizes
are known: waiting for them at once would hold up backward, and sending them from a callback would let two ranks send
in different orders, and hang. Sizes travel in a group of their own (gloo: they are for the CPU), else they would queue
behind the payloads of the bucket before.

    hook of bucket    0            1            2 (the last)
    sizes             gather 0     gather 1     gather 2
    payloads                       gather 0     gather 1, gather 2

A rank that has no payload (its gradient is not finite) sends a `Trouble` code instead, because every rank takes part
in every collective.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist

from paceline.distributed import RankGoneError, first_line
from paceline.distributed.stores import StoreGather

ALIGNED_BYTES = 16  # where a payload begins, so that its words can be read in place
_PAYLOAD_BEGINS = ord("p")
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


# -- payloads ----------------------------------------------------------------------------------------------------------


class Trouble(IntEnum):
    """Why a rank sends no payload: a code in place of the payload's first byte, or, negated, of its size.

    >>> Trouble(1).name
    'NOT_FINITE'
    """

    NOT_FINITE = 1
    OTHER = 2


class Delivery:
    """One bucket's payloads on their way. When the future is done, they have arrived, or its value() raises."""

    def __init__(self, future: torch.futures.Future[Any], world: int) -> None:
        self.future = future
        self.troubles: dict[int, Trouble] = {}  # by place in the group
        self._read: Callable[[], list[torch.Tensor]] = list
        self._world = world

    def expect(self, gathered: torch.Tensor, sizes: list[int]) -> None:
        """Say where the payloads will be: all ranks' slots, one after the other."""
        slot = gathered.numel() // self._world
        self._read = lambda: [gathered[place * slot :][:size] for place, size in enumerate(sizes)]

    def payloads(self) -> list[torch.Tensor]:
        """Return what every rank has sent, in the order of the group; fills in `troubles`."""
        payloads = self._read()
        for place, payload in enumerate(payloads):
            if int(payload[0]) != _PAYLOAD_BEGINS:
                self.troubles[place] = Trouble(int(payload[0])) if int(payload[0]) in list(Trouble) else Trouble.OTHER
        return payloads


class PayloadExchange(Protocol):
    """Sends one bucket's payload after the other."""

    def send(self, payload: torch.Tensor | Trouble, most_bytes: int, *, last: bool) -> Delivery:
        """Send this rank's payload of a bucket, at most `most_bytes` long; `last` of this backward pass."""


class FixedSizeExchange:
    """Exchanges payloads whose size depends on the bucket alone."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def send(self, payload: torch.Tensor | Trouble, most_bytes: int, *, last: bool) -> Delivery:
        """Gather the payload itself, with one collective."""
        if isinstance(payload, Trouble):
            payload = torch.full((most_bytes,), int(payload), dtype=torch.uint8, device=self._device)
        sizes = [payload.numel()] * self._group.size()
        gathered, work = start_gather(payload, payload.numel(), self._group)
        delivery = Delivery(work.get_future(), self._group.size())
        delivery.expect(gathered, sizes)
        return delivery


class AnySizeExchange:
    """Exchanges payloads whose size depends on the gradient: the sizes go before them."""

    def __init__(self, group: dist.ProcessGroup, sizes_group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._sizes_group, self._device = group, sizes_group, device
        self._unsent: Callable[[], None] | None = None  # the bucket whose sizes are on their way

    def send(self, payload: torch.Tensor | Trouble, most_bytes: int, *, last: bool) -> Delivery:
        """Send the payload's size now, and the payload in the hook of the next bucket, when all sizes are known."""
        ours = -int(payload) if isinstance(payload, Trouble) else payload.numel()
        sizes, work = start_gather(torch.tensor([ours]), 1, self._sizes_group)
        devices: list[int | str | torch.device] = [] if self._device.type == "cpu" else [self._device]
        delivery = Delivery(torch.futures.Future(devices=devices), self._group.size())
        send_before, self._unsent = self._unsent, functools.partial(self._send_now, payload, sizes, work, delivery)
        if send_before:
            send_before()
        if last:
            send_this, self._unsent = self._unsent, None
            send_this()
        return delivery

    def _send_now(self, payload: torch.Tensor | Trouble, sizes: torch.Tensor, work: Any, delivery: Delivery) -> None:
        try:
            work.wait()
            in_trouble = {place: Trouble(-size) for place, size in enumerate(sizes.tolist()) if size < 0}
            if in_trouble or isinstance(payload, Trouble):  # everybody knows it, and nobody sends
                delivery.troubles.update(in_trouble)
                delivery.future.set_result(None)
                return
            gathered, work = start_gather(payload, int(sizes.max()), self._group)
            delivery.expect(gathered, sizes.tolist())
            work.get_future().then(functools.partial(_pass_on, delivery.future))
        except Exception as error:  # a rank is gone: raised where the bucket's future is waited for
            delivery.future.set_exception(error)


def _pass_on(future: torch.futures.Future[Any], done: torch.futures.Future[Any]) -> None:
    try:
        done.value()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(None)
