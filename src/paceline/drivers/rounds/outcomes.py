"""What became of the gradients of each rank: fresh, late, or dropped and why. A rank whose work is lost is named.

With one block a rank that is 5 times slower than the others misses two rounds with *every* gradient: all of its work is
dropped, and what only its data holds is never learned. With 4 blocks it stops in time, and most of it is used.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from paceline.decoding import Count, decode
from paceline.events import Drop, Step
from paceline.traces.journal import Arrival
from paceline.traces.run_status import WorkerStatus
from paceline.traces.worker_counts import DropWatch

log = logging.getLogger("paceline.rounds")

NOT_FINITE = "it is not finite"


class Outcomes:
    """Counts of one rank's gradients, and a watch over all ranks; `ranks` are their names, by place in the group.

    `workers` are the counts of every rank since this launch began.

    >>> from paceline.events import Share
    >>> outcomes = Outcomes([0, 1], place=1, strategy="lgc@ranks")
    >>> outcomes.add(Step(version=0, fresh=(Share(worker=1, version=0, weight=1.0),)), [])
    >>> outcomes
    1 used, 0 late, 0 dropped
    """

    def __init__(self, ranks: Sequence[int], place: int, *, strategy: str) -> None:
        self._place, self._drops = place, DropWatch(strategy)
        self.used = self.late = 0
        self.dropped: Counter[str] = Counter()  # by reason
        self.workers = [WorkerStatus(worker=rank) for rank in ranks]

    def __repr__(self) -> str:
        dropped = ", ".join(f"{count} dropped ({reason})" for reason, count in self.dropped.items())
        return f"{self.used} used, {self.late} late, {dropped or '0 dropped'}"

    def add(self, step: Step, dropped: Sequence[Drop]) -> None:
        """Count a step, and what was dropped since the one before."""
        self.used += any(share.worker == self._place for share in step.fresh)
        self.late += any(share.worker == self._place for share in step.late)
        for share in step.fresh:
            self.workers[share.worker].used += 1
            self.workers[share.worker].last = "on time"
        for share in step.late:
            self.workers[share.worker].late += 1
            self.workers[share.worker].last = "late"
        self.add_drops(dropped)

    def add_drops(self, dropped: Sequence[Drop]) -> None:
        """Count gradients that were dropped."""
        for drop in dropped:
            if drop.reason == NOT_FINITE:
                self.workers[drop.worker].refused += 1
            else:
                self.workers[drop.worker].note_drop(drop.reason)
            if drop.worker == self._place:
                self.dropped[drop.reason] += 1

    def warn_of_drops(self, arrivals: Sequence[Arrival]) -> None:
        """Name the ranks whose work is mostly dropped, and what helps; `arrivals` say how large their batches are."""
        for arrival in arrivals:
            self.workers[arrival.worker].note_arrival(arrival)
        for sentence in self._drops.sentences(worker.counts for worker in self.workers):
            log.warning("%s", sentence)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of this rank."""
        return {"used": self.used, "late": self.late, "dropped": dict(self.dropped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        held = decode({"used": Count, "late": Count, "dropped": dict[str, Count]}, state)
        self.used, self.late, self.dropped = held["used"], held["late"], Counter(held["dropped"])
