"""What the conductor knows of a worker, of a gradient that is in, and how an arrival is told to a strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.drivers.served.messages import Gradient
from paceline.drivers.served.roster import Seat
from paceline.events import Event, GradientArrived, LossSeen
from paceline.traces.journal import Arrival


@dataclass(slots=True, kw_only=True, eq=False)
class Received:
    """A gradient that is in: what was said of it, its vector and buffers, and the memory to give back."""

    worker: int
    message: Gradient
    vector: torch.Tensor
    buffer_changes: torch.Tensor
    release: Callable[[], None]


@dataclass(slots=True, kw_only=True)
class Member:
    """What is known of a worker that takes part, or did."""

    seat: Seat
    host: str
    alive: bool = True
    sent_version: int = -1
    sent_seconds: float = 0.0
    answered_version: int = -1
    bad_in_a_row: int = 0
    used: int = 0
    late: int = 0
    dropped: int = 0
    refused: int = 0
    last: str = ""

    @property
    def owes(self) -> bool:
        """Whether it has a model that it has not answered."""
        return self.alive and self.sent_version > self.answered_version


def events_of(arrival: Arrival) -> tuple[Event, ...]:
    """What a strategy hears of a gradient that has arrived, in this order."""
    events: list[Event] = [
        GradientArrived(
            worker=arrival.worker,
            version=arrival.version,
            blocks_done=arrival.blocks_done,
            blocks=arrival.blocks,
            at_seconds=arrival.at_seconds,
            work_seconds=arrival.work_seconds,
            transfer_seconds=arrival.transfer_seconds,
        )
    ]
    if arrival.loss_mean is not None and arrival.loss_variance is not None and arrival.samples:
        events.append(
            LossSeen(
                worker=arrival.worker,
                version=arrival.version,
                mean=arrival.loss_mean,
                variance=arrival.loss_variance,
                samples=arrival.samples,
            )
        )
    return tuple(events)


def nobody_there(strategy_state: dict[str, Any]) -> dict[str, Any]:
    """A strategy's state after everybody has gone.

    >>> nobody_there({"version": 3, "alive": [0, 1]})
    {'version': 3, 'alive': []}
    """
    return {name: [] if name in ("alive", "fresh") else value for name, value in strategy_state.items()}


def microseconds(seconds: float) -> float:
    """A time as it can be written down and read back.

    >>> microseconds(0.12345678)
    0.123457
    """
    return round(seconds, 6)
