"""Passes over the loader that were left before their end: an accident, a habit, or a mistake in the loop.

nothing was observed      a look at the first batch, or an evaluation: nothing to say; a mistake if it is a habit
some batches were         it was broken off, which is told; a mistake if all were handed out, and it is a habit
"""

from __future__ import annotations

import warnings

from paceline.data.pruning.ledger import Ledger, PruningError


class LeftPasses:
    """How many passes in a row were left without an `observe`, and how many with too few.

    >>> LeftPasses().told(Ledger(batches=2), epoch=1)
    """

    def __init__(self) -> None:
        self._unobserved = self._incomplete = 0

    def none(self) -> None:
        """A pass has come to its end."""
        self._unobserved = self._incomplete = 0

    def told(self, left: Ledger, *, epoch: int) -> None:
        """A pass was left before its end: warn, and refuse what looks like a mistake."""
        if not left.begun:
            self._unobserved += left.exhausted and left.trains
            self._refuse_second(self._unobserved, f"none of the batches of epoch {epoch} was observed")
            return
        if not left.spoilt:  # else it was told
            told = f"{left.observed} of {left.batches} batches of epoch {epoch} were observed"
            self._incomplete = self._incomplete + 1 if left.exhausted else 0
            self._refuse_second(self._incomplete, told)
            warnings.warn(
                f"{told}: it is begun again, and what was observed in it is forgotten; call observe() for every batch, "
                "or end_epoch() to end an epoch early",
                stacklevel=5,
            )

    def _refuse_second(self, passes: int, told: str) -> None:
        if passes > 1:
            self.none()
            raise PruningError(
                f"{told}, and so it was in the pass before: call observe(losses) once for every batch, with losses of "
                "reduction='none'"
            )
