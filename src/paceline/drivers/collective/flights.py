"""One average on its way: begun at a step boundary, looked at in passing, landed when it is done."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from paceline.distributed.collectives import PendingCollective
from paceline.drivers.collective.headers import Said


class MessageError(RuntimeError):
    """What a rank has sent cannot be what it says; all ranks read the same, so all raise.

    >>> raise MessageError("rank 1 says that its payload has -4 bytes")
    Traceback (most recent call last):
    paceline.drivers.collective.flights.MessageError: rank 1 says that its payload has -4 bytes
    """


class Flight(ABC):
    """One average under way."""

    def __init__(self, pending: PendingCollective) -> None:
        self._pending = pending

    @property
    def done_at(self) -> float | None:
        """When it was over, by time.perf_counter(); None if it is not."""
        return self._pending.done_at

    @property
    def under_way(self) -> bool:
        """Whether a collective is under way."""
        return not self._pending.done()

    def poll(self) -> bool:
        """Whether it can land; may start what is next to be done. RuntimeError where a connection is lost."""
        return self._pending.done()

    def wait(self, seconds: float) -> None:
        """Until there is something to look at, or so many seconds."""
        self._pending.wait(seconds)

    @abstractmethod
    def land(self) -> tuple[list[Said], torch.Tensor]:
        """What every rank said, and the sum of what they brought (of no use if one is in trouble)."""
