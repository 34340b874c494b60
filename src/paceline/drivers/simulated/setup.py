"""The cluster of a simulated run: all that decides its times, and nothing of what it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from paceline.drivers.simulated.delays import Delays, check_columns
from paceline.drivers.simulated.network import Network
from paceline.strategies import Strategy

LateWork: TypeAlias = Literal["partial", "complete"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Who works for how long under which strategy; `recipe` is what the trace will show.

    >>> from paceline.drivers.simulated.delays import ShiftedExponential
    >>> from paceline.strategies import Full
    >>> Setup(name="full", strategy=Full(), workers=3, rounds=10, delays=ShiftedExponential()).late_work
    'partial'
    """

    name: str
    strategy: Strategy
    workers: int
    rounds: int
    delays: Delays
    network: Network = field(default_factory=Network)
    late_work: LateWork = "partial"
    blocks: int = 1
    seed: int = 0
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("workers", "rounds", "blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more ({name}={getattr(self, name)})")
        check_columns(self.delays, self.workers)
