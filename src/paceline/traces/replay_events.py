"""How what is written down is told to a strategy: the same words when it happens and when it is replayed."""

from __future__ import annotations

from typing import Any

from paceline.events import Event, GradientArrived, LossSeen
from paceline.traces.journal import Arrival


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
