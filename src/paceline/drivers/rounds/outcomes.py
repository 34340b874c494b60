"""What became of the gradients of each rank: fresh, late, or dropped and why. A rank whose work is lost is named.

With one block a rank that is 5 times slower than the others misses two rounds with *every* gradient: all of its work is
dropped, and what only its data holds is never learned. With 4 blocks it stops in time, and most of it is used.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from paceline.decoding import Count, decode
from paceline.events import Drop, Step

log = logging.getLogger("paceline.rounds")

WATCHED = 20  # gradients of a rank over which drops are counted
NOT_FINITE = "it is not finite"


class Outcomes:
    """Counts of one rank's gradients, and a watch over all ranks; `ranks` are their names, by place in the group.

    >>> from paceline.events import Share
    >>> outcomes = Outcomes([0, 1], place=1)
    >>> outcomes.add(Step(version=0, fresh=(Share(worker=1, version=0, weight=1.0),)), [])
    >>> outcomes
    1 used, 0 late, 0 dropped
    """

    def __init__(self, ranks: Sequence[int], place: int) -> None:
        self._ranks, self._place = list(ranks), place
        self.used = self.late = 0
        self.dropped: Counter[str] = Counter()  # by reason
        self._lost = [deque[bool](maxlen=WATCHED) for _ in ranks]  # of each rank's last gradients: was it dropped
        self._quiet_until = [0] * len(self._ranks)

    def __repr__(self) -> str:
        dropped = ", ".join(f"{count} dropped ({reason})" for reason, count in self.dropped.items())
        return f"{self.used} used, {self.late} late, {dropped or '0 dropped'}"

    def add(self, step: Step, dropped: Sequence[Drop]) -> None:
        """Count a step, and what was dropped since the one before."""
        self.used += any(share.worker == self._place for share in step.fresh)
        self.late += any(share.worker == self._place for share in step.late)
        for share in (*step.fresh, *step.late):
            self._lost[share.worker].append(False)
        self.add_drops(dropped)

    def add_drops(self, dropped: Sequence[Drop]) -> None:
        """Count gradients that were dropped."""
        for drop in dropped:
            self._lost[drop.worker].append(True)
            if drop.worker == self._place:
                self.dropped[drop.reason] += 1

    def warn_of_drops(self, version: int, remedy: str) -> None:
        """Name the ranks whose work is mostly dropped, and what helps; each once in a while."""
        for place, lost in enumerate(self._lost):
            if len(lost) < WATCHED or 2 * sum(lost) <= WATCHED or version < self._quiet_until[place]:
                continue
            self._quiet_until[place] = 2 * version + 100
            log.warning(
                "%d of the last %d gradients of rank %d were dropped, and what only it has is hardly learned: %s",
                sum(lost),
                WATCHED,
                self._ranks[place],
                remedy,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of this rank."""
        return {"used": self.used, "late": self.late, "dropped": dict(self.dropped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        held = decode({"used": Count, "late": Count, "dropped": dict[str, Count]}, state)
        self.used, self.late, self.dropped = held["used"], held["late"], Counter(held["dropped"])
