"""fastest-k: take the first K gradients of each round, throw the others away.

    update_t = mean of the K gradients that came first

Known as K-SGD or backup workers (Chen et al. 2016). Unbiased where stragglers are drawn anew each round;
with persistent stragglers on skewed data the slow workers' classes are never learned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.strategies.auto_k import DISCARDED, make_chooser
from paceline.strategies.choose_k import check_k
from paceline.strategies.rounds import Rounds, RoundStrategy
from paceline.strategies.shares import SharesBySpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestK(RoundStrategy):
    """The fastest K of N workers make the update; late gradients are discarded.

    `k` gradients close a round, or "auto". The first `warmup_rounds` run as `full`. With `shares` workers get
    batches by their speed.

    >>> FastestK(k=3)
    FastestK(k=3, warmup_rounds=0)
    """

    k: int | Literal["auto"]
    warmup_rounds: int = 0
    shares: SharesBySpeed | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_k(self.k, self.warmup_rounds)

    def start(self) -> Rounds:
        """Return the state of a run that begins now."""
        return Rounds(chooser=make_chooser(self.k, DISCARDED), warmup_rounds=self.warmup_rounds, shares=self.shares)
