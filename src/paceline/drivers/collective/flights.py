"""One average on its way: begun at a step boundary, looked at in passing, landed when it is done."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import Any

import torch

from paceline.drivers.collective.headers import Said

POLL_SECONDS = 0.0005  # where nobody calls back


class MessageError(RuntimeError):
    """What a rank has sent cannot be what it says; all ranks read the same, so all raise.

    >>> raise MessageError("rank 1 says that its payload has -4 bytes")
    Traceback (most recent call last):
    paceline.drivers.collective.flights.MessageError: rank 1 says that its payload has -4 bytes
    """


class Pending:
    """A collective under way."""

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

    @property
    def under_way(self) -> bool:
        """Whether it is not over."""
        return not self.done()

    def wait(self, seconds: float) -> None:
        """Until it is over, or so many seconds. Never `work.wait(timeout)`: that closes gloo's connections for good."""
        if self._calls_back:
            self._done.wait(seconds)
            return
        deadline = time.monotonic() + seconds
        while not self.done() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Raise what went wrong; on a GPU, let what comes next in the stream come after it."""
        self._work.wait()


class Flight(ABC):
    """One average under way."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    @property
    def done_at(self) -> float | None:
        """When it was over, by time.perf_counter(); None if it is not."""
        return self._pending.done_at

    @property
    def under_way(self) -> bool:
        """Whether a collective is under way."""
        return self._pending.under_way

    def poll(self) -> bool:
        """Whether it can land; may start what is next to be done. RuntimeError where a connection is lost."""
        return self._pending.done()

    def wait(self, seconds: float) -> None:
        """Until there is something to look at, or so many seconds."""
        self._pending.wait(seconds)

    @abstractmethod
    def land(self) -> tuple[list[Said], torch.Tensor]:
        """What every rank said, and the sum of what they brought (of no use if one is in trouble)."""
