"""Holes in a journal: the rounds and records that are not in it, as the lines around a hole tell.

    step 66   records_lost 114   step 178        rounds 68 to 178 are missing: 114 records
    step 66                      step 178        the same, where the writer was killed before it could say so
    step 66   records_lost 2     step 67         2 records after round 67 are missing (who joined, what was measured)

A round is counted from 1 when it is done: step 66 of the model closes round 67. What a restart takes back is void, and
so are the holes in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.traces.journal import JournalRecord, RecordsLost, Resumed, RunBegan, RunEnded, StepRecord

MOST_SENTENCES = 5


@dataclass(frozen=True, slots=True)
class Hole:
    """The rounds from `first` to `last` are not in the journal; where `last` is less than `first`, no round is missing.

    `records` is how many records the writer has counted as lost, 0 where it came to say nothing.

    >>> Hole(68, 178, 114).sentence
    'records of rounds 68 to 178 are missing'
    >>> Hole(68, 68).sentence
    'records of round 68 are missing'
    >>> Hole(68, 67, 2).sentence
    '2 records after round 67 are missing'
    """

    first: int
    last: int
    records: int = 0

    @property
    def sentence(self) -> str:
        """What is missing, without a full stop."""
        if self.last > self.first:
            return f"records of rounds {self.first:,} to {self.last:,} are missing"
        if self.last == self.first:
            return f"records of round {self.first:,} are missing"
        where = f"after round {self.last:,}" if self.last else "before round 1"
        return f"{self.records:,} records {where} are missing" if self.records > 1 else f"a record {where} is missing"


class HoleFinder:
    """Finds the holes while records are taken one after the other.

    >>> finder = HoleFinder()
    >>> finder.take(RecordsLost(records=3, reason="No space left on device"))
    >>> finder.holes
    [Hole(first=1, last=0, records=3)]
    """

    def __init__(self) -> None:
        self.holes: list[Hole] = []
        self._next, self._versions_a_round = 0, 1  # the version of the step that comes next

    def take(self, record: JournalRecord) -> None:
        """Take the next record of the journal."""
        match record:
            case RunBegan():
                self._versions_a_round = record.workers if record.strategy == "async" else 1
            case RecordsLost():
                self._note(self._next, records=record.records)
            case StepRecord():
                self._note(record.version)
                self._next = record.version + 1
            case Resumed():
                self._note(record.version)
                self._go_back(record.version)
            case RunEnded():
                self._note(record.rounds_done * self._versions_a_round)

    def _note(self, version: int, records: int = 0) -> None:
        """Note that the journal goes on at this version of the model."""
        if version <= self._next and not records:
            return
        first = self._next // self._versions_a_round + 1
        last = -(-version // self._versions_a_round) if version > self._next else first - 1
        if self.holes and self.holes[-1].last >= first - 1:  # nothing is known between the two
            before = self.holes.pop()
            first, records = before.first, before.records + records
        self.holes.append(Hole(first, last, records))
        self._next = max(self._next, version)

    def _go_back(self, version: int) -> None:
        done = version // self._versions_a_round
        kept = [hole for hole in self.holes if hole.first <= done]
        self.holes = [replace(hole, last=min(hole.last, done)) for hole in kept]
        self._next = version


def holes_in(records: Iterable[JournalRecord]) -> tuple[Hole, ...]:
    """Return the holes in all records of a journal, in their order."""
    finder = HoleFinder()
    for record in records:
        finder.take(record)
    return tuple(finder.holes)


def before_the_first_hole(records: Sequence[JournalRecord]) -> tuple[Sequence[JournalRecord], str]:
    """Return the records before the first hole, also one that is void later, and what is missing there; "" for none.

    >>> lost = RecordsLost(records=3, reason="No space left on device")
    >>> before_the_first_hole([lost])
    ([], '3 records before round 1 are missing, and nothing after them was replayed')
    >>> before_the_first_hole([])
    ([], '')
    """
    finder = HoleFinder()
    for place, record in enumerate(records):
        finder.take(record)
        if finder.holes:
            hole = finder.holes[0]
            for each in records[place + 1 :]:  # the next step says how many rounds are missing
                if isinstance(each, Resumed):
                    break
                finder.take(each)
                hole = finder.holes[0]
                if isinstance(each, StepRecord):
                    break
            return records[:place], f"{hole.sentence}, and nothing after them was replayed"
    return records, ""


def hole_sentences(holes: Sequence[Hole]) -> list[str]:
    """Return a sentence for each of the first holes, and one for all others.

    >>> hole_sentences([Hole(2, 3)] * 7)[-1]
    'records are missing in 3 more places'
    """
    if len(holes) <= MOST_SENTENCES:
        return [hole.sentence for hole in holes]
    shown = holes[: MOST_SENTENCES - 1]
    return [*(hole.sentence for hole in shown), f"records are missing in {len(holes) - len(shown):,} more places"]
