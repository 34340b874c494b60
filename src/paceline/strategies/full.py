"""full: wait for everybody.

    update_t = mean of all N gradients

Unbiased, and as slow as the slowest worker of every round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.strategies.choose_k import Everybody
from paceline.strategies.rounds import Rounds, RoundStrategy
from paceline.strategies.shares import SharesBySpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Full(RoundStrategy):
    """Synchronous SGD: every round takes all workers alive. With `shares` they get batches by their speed.

    >>> Full().start().k
    1
    """

    shares: SharesBySpeed | None = field(default=None, repr=False)

    def start(self) -> Rounds:
        """Return the state of a run that begins now."""
        return Rounds(chooser=Everybody(), warmup_rounds=0, shares=self.shares)
