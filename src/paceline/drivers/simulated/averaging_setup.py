"""The cluster of a simulated run without a server: all that decides its times, and nothing of what it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.drivers.simulated.delays import Delays, check_columns
from paceline.drivers.simulated.network import Network
from paceline.strategies.averaging import Averaging


@dataclass(frozen=True, kw_only=True)
class AveragingSetup:
    """Who trains for how long, and when they average; `recipe` is what the trace will show.

    `rounds` times `workers` local steps are taken in all, whoever takes them, so that members compare like with like.

    >>> from paceline.drivers.simulated.delays import ShiftedExponential
    >>> from paceline.strategies.averaging import make_averaging
    >>> AveragingSetup(member=make_averaging("hpsgd"), workers=3, rounds=10, delays=ShiftedExponential()).budget_steps
    30
    """

    member: Averaging
    workers: int
    rounds: int
    delays: Delays
    name: str = ""
    network: Network = field(default_factory=Network)
    seed: int = 0
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("workers", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more ({name}={getattr(self, name)})")
        check_columns(self.delays, self.workers)
        if not self.name:
            object.__setattr__(self, "name", self.member.name)

    @property
    def budget_steps(self) -> int:
        """The local steps of all workers together."""
        return self.rounds * self.workers

    @property
    def alone(self) -> bool:
        """Whether everybody trains alone until the end: nothing is averaged before."""
        return self.member.alone(self.workers)
