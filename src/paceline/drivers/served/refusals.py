"""Strangers who are turned away are told of, but not at the pace they choose: a log is not theirs to fill."""

from __future__ import annotations

AT_ONCE = 200
PER_SECOND = 5.0


class Refusals:
    """Lets the first refusals be told, then so many a second; counts those that were not.

    >>> refusals = Refusals()
    >>> sum(refusals.may_tell(0.0) for _ in range(1000)), refusals.may_tell(1.0), refusals.untold()
    (200, True, 800)
    """

    def __init__(self) -> None:
        self._left = float(AT_ONCE)
        self._seen_seconds = 0.0
        self._untold = 0

    def may_tell(self, clock: float) -> bool:
        """Whether one more may be told now."""
        self._left = min(AT_ONCE, self._left + PER_SECOND * max(0.0, clock - self._seen_seconds))
        self._seen_seconds = clock
        if self._left < 1:
            self._untold += 1
            return False
        self._left -= 1
        return True

    def untold(self) -> int:
        """How many were not told since this was asked last."""
        count, self._untold = self._untold, 0
        return count
