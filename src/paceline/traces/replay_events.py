"""The events that a strategy gets for what a journal records: the same when it happens and when it is replayed."""

from __future__ import annotations

from typing import Any

from paceline.events import Event, GradientArrived, LossSeen
from paceline.traces.journal import Arrival


def events_of(arrival: Arrival) -> tuple[Event, ...]:
    """Return the events for a gradient that has arrived, in their order."""
    events: list[Event] = [
        GradientArrived(
            worker=arrival.worker,
            version=arrival.version,
            blocks_done=arrival.blocks_done,
            blocks=arrival.blocks,
            at_seconds=arrival.at_seconds,
            work_seconds=arrival.work_seconds,
            transfer_seconds=arrival.transfer_seconds,
            samples=arrival.batch_samples,
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


def without_workers(strategy_state: dict[str, Any]) -> dict[str, Any]:
    """Return a strategy's state after all workers have gone.

    >>> without_workers({"version": 3, "alive": [0, 1]})
    {'version': 3, 'alive': []}
    """
    return {name: [] if name in ("alive", "fresh") else value for name, value in strategy_state.items()}
