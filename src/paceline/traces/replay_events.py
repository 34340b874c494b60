"""What a strategy hears of what a journal records: the same when it happens and when it is replayed."""

from __future__ import annotations

from typing import Any

from paceline.events import Action, Drop, Event, GradientArrived, LossSeen
from paceline.strategies import Running
from paceline.traces.journal import Arrival


def hear(strategy: Running, heard: Event | Arrival) -> list[Action]:
    """Let a strategy hear of an event, or of a gradient that has arrived, and return its actions.

    Of a gradient that it does not drop it hears the losses too. On the virtual clock, where the losses of dropped ones
    are never computed, it hears the same, and so chooses the same K.
    """
    if not isinstance(heard, Arrival):
        return strategy.handle(heard)
    actions = strategy.handle(
        GradientArrived(
            worker=heard.worker,
            version=heard.version,
            blocks_done=heard.blocks_done,
            blocks=heard.blocks,
            at_seconds=heard.at_seconds,
            work_seconds=heard.work_seconds,
            transfer_seconds=heard.transfer_seconds,
            samples=heard.batch_samples,
        )
    )
    dropped = any(isinstance(action, Drop) for action in actions)
    if heard.loss_mean is None or heard.loss_variance is None or not heard.samples or dropped:
        return actions
    return actions + strategy.handle(
        LossSeen(
            worker=heard.worker,
            version=heard.version,
            mean=heard.loss_mean,
            variance=heard.loss_variance,
            samples=heard.samples,
        )
    )


def without_workers(strategy_state: dict[str, Any]) -> dict[str, Any]:
    """Return a strategy's state after all workers have gone.

    >>> without_workers({"version": 3, "alive": [0, 1]})
    {'version': 3, 'alive': []}
    """
    return {name: [] if name in ("alive", "fresh") else value for name, value in strategy_state.items()}
