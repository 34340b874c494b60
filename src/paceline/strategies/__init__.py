"""When to step, and with whose gradients: the core.

Nothing here reads a clock or a socket, draws a random number, logs, or starts a thread. Events go in, actions
come out (`paceline.events`), so the same object runs under the simulator and on a cluster.

A new strategy is its file and one line in `STRATEGIES`; the command line, the contract tests and the docs
read the table.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from paceline.events import Action, Event
from paceline.strategies.asynchronous import Async
from paceline.strategies.fastest_k import FastestK
from paceline.strategies.full import Full
from paceline.strategies.lgc import LGC

Strategy: TypeAlias = Full | FastestK | LGC | Async

STRATEGIES: dict[str, type[Strategy]] = {
    "full": Full,
    "fastest-k": FastestK,
    "lgc": LGC,
    "async": Async,
}


class Running(Protocol):
    """The state of a strategy during a run, which a driver feeds with events."""

    version: int

    @property
    def k(self) -> int:
        """How many gradients close the open round."""

    def handle(self, event: Event) -> list[Action]:
        """Take in what happened; return what is to be done."""

    @property
    def form(self) -> dict[str, Any]:
        """The types of a `state_dict` that was kept as JSON, between two rounds."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on later, as plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""


__all__ = ["LGC", "STRATEGIES", "Async", "FastestK", "Full", "Running", "Strategy"]
