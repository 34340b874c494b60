"""How many samples of a batch each rank or worker computes: as many as its speed allows.

    allocation   the whole numbers that make the slowest as quick as possible; the rest of an epoch, dealt likewise
    speed        how long one of them takes for so many samples, from the times of its batches
    sharing      when new shares pay: settings, the decision, and the state of a run in rounds
    sizes        the sizes that a driver was told to give its workers

    seconds of batches ──> SpeedEstimate ──> Speed each ──> divide: whole numbers, ──> decide: do they pay? ──> shares
    (hooks, or arrivals)   (median, fixed part)             the slowest least                                  or none

Two carry the decision out. `paceline.Balance`, under DDP: ranks tell each other their Speed every few steps, and all
compute the same decision. Strategies in rounds: one strategy hears of all arrivals, and its action Assign gives each
worker the size of its next batch.

Nothing here reads a clock or a socket, or draws a random number: whoever measured the seconds gives them. So ranks that
have the same numbers come to the same shares, and a replay does too.
"""

from __future__ import annotations

from paceline.strategies.shares.allocation import Cost, deal_rest, divide
from paceline.strategies.shares.sharing import (
    EqualShares,
    ShareDecision,
    SharesBySpeed,
    ShareState,
    SpeedShares,
    decide,
)
from paceline.strategies.shares.sizes import BatchSizes
from paceline.strategies.shares.speed import Speed, SpeedEstimate

__all__ = [
    "BatchSizes",
    "Cost",
    "EqualShares",
    "ShareDecision",
    "ShareState",
    "SharesBySpeed",
    "Speed",
    "SpeedEstimate",
    "SpeedShares",
    "deal_rest",
    "decide",
    "divide",
]
