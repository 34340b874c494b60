"""What became of each worker's gradients, and whose work is mostly dropped.

A worker is *mostly dropped* when more than half of its gradients, of five or more, came too late for any update. What
only its data holds is then hardly learned, though the loss of the others may look well. Two things can be the reason,
and each has its remedy:

    fastest-k    drops whatever misses its round: `lgc` adds it one round late
    lgc          drops what misses the round after its own too. A late worker stops between two blocks, so a block takes
                 longer than a round there. Smaller blocks stop sooner; a larger K waits for it.

A worker 16 times slower than three others, under `lgc` with K = 3, simulated over 100 rounds: of its gradients 28 are
dropped and 3 used with 4 blocks, 4 and 93 with 16 blocks, 1 and 99 with 32. A smaller batch changes nothing, since the
rounds of the others become shorter by as much, and k = "auto" does not count what is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.strategies import bare_name

if TYPE_CHECKING:
    from paceline.traces.journal import Arrival
    from paceline.traces.records import Outcome

FEWEST = 5  # gradients, below which nothing is said of a worker
WATCHED = 10  # gradients of a worker by which it is judged again while a run goes on
CAME_TOO_LATE = frozenset({"its round had closed", "it missed the round after its own too"})
"""The reasons to drop a gradient (strategies/rounds.py) that are about time; the others are about the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounts:
    """One worker's gradients: used in time, late, or dropped, of which `too_late` came too late.

    `samples_...` are how many samples these gradients are of, 0 where the worker does not say. `waited_seconds` is from
    the arrival of its gradients to the closing of their rounds. Its batches come in `blocks` parts.

    >>> WorkerCounts(worker=3, used=1, late=1, dropped=21, too_late=21).gradients
    23
    """

    worker: int
    used: int = 0
    late: int = 0
    dropped: int = 0
    too_late: int = 0
    samples_used: int = 0
    samples_late: int = 0
    samples_dropped: int = 0
    waited_seconds: float = 0.0
    blocks: int = 1
    batch_samples: int = 0

    @property
    def gradients(self) -> int:
        """How many gradients have arrived."""
        return self.used + self.late + self.dropped


def mostly_dropped(counts: Iterable[WorkerCounts]) -> list[WorkerCounts]:
    """Return the workers most of whose gradients came too late for any update, the one with the most first.

    >>> slow = WorkerCounts(worker=3, late=2, dropped=21, too_late=21)
    >>> [counts.worker for counts in mostly_dropped([WorkerCounts(worker=0, used=40), slow])]
    [3]
    """
    found = [each for each in counts if each.gradients >= FEWEST and 2 * each.too_late > each.gradients]
    return sorted(found, key=lambda each: (-each.too_late / each.gradients, each.worker))


def drop_remedy(strategy: str, counts: WorkerCounts) -> str:
    """Return what helps a worker that is mostly dropped; "" where the strategy drops nothing for being late.

    `strategy` is its name in a recipe or a trace: "lgc", "lgc@ranks", "fastest-k+speed", ...

    >>> drop_remedy("lgc", WorkerCounts(worker=3, blocks=4, batch_samples=32))
    'more blocks than 4, so that it stops sooner, or a larger K, which waits for it'
    >>> drop_remedy("lgc@ranks", WorkerCounts(worker=3, blocks=2, batch_samples=4))
    'a larger K, which waits for it'
    >>> drop_remedy("fastest-k", WorkerCounts(worker=3))
    'lgc, which adds late work one round later, or a larger K, which waits for it'
    """
    name = bare_name(strategy)
    if name == "fastest-k":
        return "lgc, which adds late work one round later, or a larger K, which waits for it"
    if name != "lgc":
        return ""
    if counts.batch_samples and 2 * counts.blocks >= counts.batch_samples:  # `cut_batch` makes no smaller blocks
        return "a larger K, which waits for it"
    return f"more blocks than {counts.blocks}, so that it stops sooner, or a larger K, which waits for it"


def dropped_sentence(strategy: str, counts: WorkerCounts, *, lately: bool = False) -> str:
    """Return a sentence that names a worker whose work is mostly dropped, and what helps.

    The counts are of all its gradients, or of its last ones (`lately`).

    >>> print(dropped_sentence("fastest-k", WorkerCounts(worker=3, used=2, dropped=21, too_late=21)))
    worker 3 is mostly dropped: 21 of its 23 gradients came too late. What helps: lgc, which adds late work one round
    later, or a larger K, which waits for it.
    """
    noun = "rank" if strategy.endswith("@ranks") else "worker"
    remedy, its = drop_remedy(strategy, counts), "its last" if lately else "its"
    return (
        f"{noun} {counts.worker} is mostly dropped: {counts.too_late:,} of {its} {counts.gradients:,} gradients came "
        f"too late.{f' What helps: {remedy}.' if remedy else ''}"
    )


class DropWatch:
    """Names workers whose work is mostly dropped while a run goes on, each when it begins, and not again and again.

    A worker is judged by its first five gradients, then by every ten. One that comes and goes is named again only when
    it has sent twice as many gradients, and a hundred more.

    >>> watch = DropWatch("fastest-k")
    >>> [len(watch.sentences([WorkerCounts(worker=3, dropped=n, too_late=n)])) for n in (4, 9, 30)]
    [0, 1, 0]
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._judged: dict[int, WorkerCounts] = {}
        self._dropped: set[int] = set()
        self._quiet_until: dict[int, int] = {}

    def sentences(self, counts: Iterable[WorkerCounts]) -> list[str]:
        """Return a sentence for each worker that is mostly dropped since it was last judged, and was not before."""
        found = []
        for each in counts:
            before = self._judged.get(each.worker)
            last = each if before is None else _since(before, each)
            if last.gradients < (FEWEST if before is None else WATCHED):
                continue
            self._judged[each.worker] = each
            if not mostly_dropped([last]):
                self._dropped.discard(each.worker)
            elif each.worker not in self._dropped:
                self._dropped.add(each.worker)
                if each.gradients >= self._quiet_until.get(each.worker, 0):
                    self._quiet_until[each.worker] = 2 * each.gradients + 100
                    found.append(dropped_sentence(self._strategy, last, lately=before is not None))
        return found


def _since(before: WorkerCounts, now: WorkerCounts) -> WorkerCounts:
    """Return the gradients of a worker that have come since it was last judged; of a run begun anew, all."""
    names = ("used", "late", "dropped", "too_late")
    differences = {name: getattr(now, name) - getattr(before, name) for name in names}
    return now if min(differences.values()) < 0 else replace(now, **differences)


def with_gradient(
    counts: WorkerCounts, arrival: Arrival, outcome: Outcome, *, reason: str = "", waited_seconds: float = 0.0
) -> WorkerCounts:
    """Return the counts with one gradient more.

    >>> from paceline.traces.journal import Arrival
    >>> arrival = Arrival(worker=0, version=4, draw=4, blocks_done=2, blocks=4, at_seconds=2.5, work_seconds=0.4,
    ...                   transfer_seconds=0.01, loss_mean=0.7, loss_variance=0.2, samples=16)
    >>> counts = with_gradient(WorkerCounts(worker=0), arrival, "late")
    >>> counts.late, counts.samples_late, counts.blocks, counts.batch_samples
    (1, 16, 4, 32)
    """
    samples = f"samples_{outcome}"
    return replace(
        counts,
        **{outcome: getattr(counts, outcome) + 1, samples: getattr(counts, samples) + arrival.samples},
        too_late=counts.too_late + (outcome == "dropped" and reason in CAME_TOO_LATE),
        waited_seconds=counts.waited_seconds + waited_seconds,
        blocks=max(counts.blocks, arrival.blocks),
        batch_samples=max(counts.batch_samples, arrival.samples * arrival.blocks // arrival.blocks_done),
    )
