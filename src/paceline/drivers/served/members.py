"""What the conductor knows of a worker, and of a gradient that is in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from paceline.drivers.served.messages import Gradient
from paceline.drivers.served.roster import Seat
from paceline.training import all_finite

MOST_SENT = 64


@dataclass(slots=True, kw_only=True, eq=False)
class Received:
    """A gradient that is in: what was said of it, its vector and buffers, and the memory to give back.

    Without a vector it is one that its worker could not send: it is not finite.
    """

    worker: int
    message: Gradient
    vector: torch.Tensor | None
    buffer_changes: torch.Tensor
    release: Callable[[], None]

    @property
    def finite(self) -> bool:
        """Whether every number in it is finite."""
        return self.vector is not None and all_finite(self.vector) and all_finite(self.buffer_changes)


@dataclass(slots=True, kw_only=True)
class Member:
    """What is known of a worker that takes part, or did."""

    seat: Seat
    host: str
    alive: bool = True
    sent_version: int = -1
    sent_at: dict[int, float] = field(default_factory=dict)
    answered_version: int = -1
    bad_in_a_row: int = 0
    used: int = 0
    late: int = 0
    dropped: int = 0
    refused: int = 0
    last: str = ""

    def sent(self, version: int, now: float) -> None:
        """It is sent this version of the model: the next, or the same for another try."""
        if version == self.sent_version:
            self.answered_version = version - 1
        self.sent_version = version
        self.sent_at = {sent: at for sent, at in self.sent_at.items() if sent > self.answered_version}
        while len(self.sent_at) >= MOST_SENT:  # it has not answered for long; of those between it will get none
            del self.sent_at[list(self.sent_at)[1]]
        self.sent_at[version] = now

    @property
    def owes(self) -> bool:
        """Whether it has a model that it has not answered."""
        return self.alive and self.sent_version > self.answered_version


def microseconds(seconds: float) -> float:
    """A time as it can be written down and read back.

    >>> microseconds(0.12345678)
    0.123457
    """
    return round(seconds, 6)
