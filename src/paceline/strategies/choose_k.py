"""How many gradients close a round (K): the interface of a chooser, and the two whose rule is fixed.

    FixedK      always the same K
    Everybody   K = N, all members of the round
    AutoK       learns K from the times and losses of past rounds (auto_k.py)

A round tells its chooser of gradients, losses and closed rounds, and asks it for `k` whenever it may have to close. N
is the number of its members: workers alive, and those that delivered and then died.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Literal

from paceline.events import GradientArrived, LossSeen


class Chooser:
    """Chooses the K of a round; this base learns nothing from what it hears.

    >>> Chooser().state_dict()
    {}
    """

    def k(self, members: int) -> int:
        """Return how many gradients close the open round, which has so many members."""
        raise NotImplementedError

    def arrived(self, event: GradientArrived, *, round_seconds: float) -> None:
        """Hear of a member's gradient, and how long after its round had opened it came in."""

    def loss_seen(self, event: LossSeen) -> None:
        """Hear of the losses behind a gradient."""

    def closed(self, fresh: Set[int]) -> None:
        """Hear that a round closed with the gradients of these workers."""

    def forget(self, worker: int) -> None:
        """Hear that a worker is gone."""

    @property
    def form(self) -> dict[str, Any]:
        """The types of a `state_dict` that was kept as JSON."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on later, as plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""


class FixedK(Chooser):
    """Always the same K.

    >>> FixedK(3).k(members=10)
    3
    """

    def __init__(self, k: int) -> None:
        self._k = k

    def k(self, members: int) -> int:
        return self._k


class Everybody(Chooser):
    """K is N: every member of the round.

    >>> Everybody().k(members=10)
    10
    """

    def k(self, members: int) -> int:
        return members


def check_k(k: int | Literal["auto"], warmup_rounds: int) -> None:
    """Raise for settings that no cluster could run.

    >>> check_k(0, 0)
    Traceback (most recent call last):
    ValueError: k must be a whole number of 1 or more, or "auto" (k=0)
    """
    if k != "auto" and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
        raise ValueError(f'k must be a whole number of 1 or more, or "auto" (k={k!r})')
    if warmup_rounds < 0:
        raise ValueError(f"warmup_rounds must be 0 or more (warmup_rounds={warmup_rounds})")
