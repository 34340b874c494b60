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
from paceline.strategies.shares import SharesBySpeed

Strategy: TypeAlias = Full | FastestK | LGC | Async

STRATEGIES: dict[str, type[Strategy]] = {
    "full": Full,
    "fastest-k": FastestK,
    "lgc": LGC,
    "async": Async,
}


def bare_name(label: str) -> str:
    """Return the name of a strategy without the shares and the place that a label may have.

    >>> bare_name("lgc+speed@ranks"), bare_name("lgc")
    ('lgc', 'lgc')
    """
    return label.partition("@")[0].partition("+")[0]


def shares_of(strategy: Strategy) -> SharesBySpeed | None:
    """Return how a strategy gives workers batches by their speed; None where it does not, or has no such setting.

    >>> shares_of(Full(shares=SharesBySpeed(batch_size=8))).batch_size, shares_of(Full()), shares_of(Async())
    (8, None, None)
    """
    shares: SharesBySpeed | None = getattr(strategy, "shares", None)
    return shares


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

    @property
    def added(self) -> dict[str, Any]:
        """What a `state_dict` of an earlier release lacks, as it is to be read."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on later, as plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""


__all__ = ["LGC", "STRATEGIES", "Async", "FastestK", "Full", "Running", "Strategy", "bare_name", "shares_of"]
