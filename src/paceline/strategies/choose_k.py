"""How many gradients close a round: what a round asks, and the two answers that never change.

A chooser hears of events after they happened and answers one question, `k(alive)`, before a round closes.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Literal, Protocol

from paceline.events import GradientArrived, LossSeen


class Chooser(Protocol):
    """What a round asks for its K."""

    def k(self, alive: int) -> int:
        """Gradients that close the open round, with so many workers alive."""

    def arrived(self, event: GradientArrived, *, round_seconds: float) -> None:
        """A member's gradient came in, so long after the open round had opened."""

    def loss_seen(self, event: LossSeen) -> None:
        """What a gradient was the gradient of."""

    def closed(self, fresh: Set[int]) -> None:
        """A round closed with the gradients of these workers."""

    def forget(self, worker: int) -> None:
        """A worker is gone."""

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on later, as plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""


class FixedK:
    """Always the same K.

    >>> FixedK(3).k(alive=10)
    3
    """

    def __init__(self, k: int) -> None:
        self._k = k

    def k(self, alive: int) -> int:
        """The K given."""
        return self._k

    def arrived(self, event: GradientArrived, *, round_seconds: float) -> None:
        """Nothing to learn from it."""

    def loss_seen(self, event: LossSeen) -> None:
        """Nothing to learn from it."""

    def closed(self, fresh: Set[int]) -> None:
        """Nothing to learn from it."""

    def forget(self, worker: int) -> None:
        """Nothing was remembered."""

    def state_dict(self) -> dict[str, Any]:
        """No state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """No state."""


class Everybody(FixedK):
    """K is everybody alive.

    >>> Everybody().k(alive=10)
    10
    """

    def __init__(self) -> None:
        super().__init__(0)

    def k(self, alive: int) -> int:
        """All of them."""
        return alive


def check_k(k: int | Literal["auto"], warmup_rounds: int) -> None:
    """Refuse what no cluster could run.

    >>> check_k(0, 0)
    Traceback (most recent call last):
    ValueError: k must be a whole number of 1 or more, or "auto" (k=0)
    """
    if k != "auto" and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
        raise ValueError(f'k must be a whole number of 1 or more, or "auto" (k={k!r})')
    if warmup_rounds < 0:
        raise ValueError(f"warmup_rounds must be 0 or more (warmup_rounds={warmup_rounds})")
