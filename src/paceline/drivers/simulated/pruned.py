"""The totals of pruning in the trace of a simulated run: one process plays all workers and knows whom each left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.traces import Pruned

if TYPE_CHECKING:
    from paceline.training import Batches


def pruned_of(batches: Batches | None) -> Pruned | None:
    """Return how much was left out so far; None where nothing is pruned, or nothing is trained.

    >>> pruned_of(None) is None
    True
    """
    if batches is None or batches.pruned is None:
        return None
    pruned = batches.pruned
    return Pruned(sat_out=pruned.sat_out, share_pruned=pruned.share_pruned, passes=pruned.passes)
