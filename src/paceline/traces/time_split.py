"""Where the time of a run went: how long its workers computed, were held up by the network, and waited.

    worker 0   ########~~~~......~~~~########~~~~....~~~~      # computes   ~ the network   . waits for others
    worker 1   ##############~~~~~~~~##############~~~~~~

A worker's seconds are one of three things, and the first that fits counts:

    computing    between the beginning and the end of a work of its own
    network      a work of its own is on its way, or the newest model is: with a server from when a round closed until
                 the worker begins on that model, on ranks the all-reduce of the round. Where workers average, from when
                 the last of them has entered until the sum is there
    waiting      all else: for slower workers, for the end, and while it was away

So what travels while the worker computes costs nothing, and the three add up to workers x seconds.

What a trace does not say cannot be told apart: a real worker's model is "on its way" also while the server and the
worker are busy with it, work that never arrived is in no journal, and a window of local steps counts as computing from
its first step to its last. A trace of a large cluster holds its first works alone (`Trace.works`): then the split is
that of the first `seconds`, up to which the works of every worker are known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.traces.records import Trace, Work

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """The seconds of all workers together, over the first `seconds` of a run; the three add up to workers x seconds.

    >>> split = TimeSplit(
    ...     workers=2, seconds=5.0, compute_seconds=6.0, network_seconds=1.0, waiting_seconds=3.0, whole=True
    ... )
    >>> split.shares
    (0.6, 0.1, 0.3)
    """

    workers: int
    seconds: float
    compute_seconds: float
    network_seconds: float
    waiting_seconds: float
    whole: bool  # whether `seconds` are all of the run's

    @property
    def shares(self) -> tuple[float, float, float]:
        """The shares of computing, network and waiting."""
        total = self.workers * self.seconds
        return (self.compute_seconds / total, self.network_seconds / total, self.waiting_seconds / total)


def time_split(trace: Trace, *, until_seconds: float = math.inf) -> TimeSplit | None:
    """Return where the time of a run went, of all of it or up to a moment.

    It is None where the trace holds no works, as one of times alone.

    >>> works = (Work(worker=0, version=0, started_seconds=0.0, finished_seconds=1.0, arrived_seconds=1.5),
    ...          Work(worker=1, version=0, started_seconds=0.0, finished_seconds=4.0, arrived_seconds=4.0))
    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=1, seconds=4.0, used=2, works=works)
    >>> split = time_split(trace)
    >>> split.compute_seconds, split.network_seconds, split.waiting_seconds
    (5.0, 0.5, 2.5)
    """
    of_worker: defaultdict[int, list[Work]] = defaultdict(list)
    for work in trace.works:
        of_worker[work.worker].append(work)
    workers = max([trace.workers, *(worker + 1 for worker in of_worker)])
    whole = len(trace.works) >= _counted(trace)
    seconds = trace.seconds if whole else _known_until(of_worker, workers)
    seconds, whole = min(seconds, until_seconds), whole and until_seconds >= trace.seconds
    if not of_worker or seconds <= 0:
        return None
    closed = {each.version: each.closed_seconds for each in trace.rounds}
    compute = network = waiting = 0.0
    for worker in range(workers):
        works = sorted(of_worker[worker], key=lambda work: (work.started_seconds, work.version))
        computing = [(work.started_seconds, work.finished_seconds) for work in works]
        busy = _covered(computing, seconds)
        held_up = _covered([*computing, *_on_the_network(works, closed, trace, worker)], seconds) - busy
        compute, network, waiting = compute + busy, network + held_up, waiting + (seconds - busy - held_up)
    return TimeSplit(
        workers=workers,
        seconds=seconds,
        compute_seconds=compute,
        network_seconds=max(0.0, network),
        waiting_seconds=max(0.0, waiting),
        whole=whole,
    )


def _counted(trace: Trace) -> int:
    """Return how many works there were, also those that the trace does not hold."""
    if trace.averaged:
        return sum(each.used for each in trace.rounds)  # `Trace.used` counts steps, and a work is a window of them
    return trace.used + trace.late + sum(trace.dropped.values())


def _known_until(of_worker: Mapping[int, Sequence[Work]], workers: int) -> float:
    """Return the moment up to which all works are known of every worker, where only the first were kept.

    Works are kept when their fate is known, a round after they were begun at the earliest. So the last two versions may
    lack some; of the others, whatever a worker did before it began the newest of its works is there.
    """
    newest = max((work.version for works in of_worker.values() for work in works), default=0)
    begun = [
        max((work.started_seconds for work in of_worker.get(worker, ()) if work.version < newest - 1), default=0.0)
        for worker in range(workers)
    ]
    return min(begun, default=0.0)


def _on_the_network(
    works: Sequence[Work], closed: Mapping[int, float], trace: Trace, worker: int
) -> Iterator[Interval]:
    """Yield when a work of the worker, or a model for it, was on its way."""
    for work in works:
        if work.arrived_seconds is not None:
            yield work.finished_seconds if work.sent_seconds is None else work.sent_seconds, work.arrived_seconds
    if trace.averaged:
        return
    back = [each.to_seconds for each in trace.absences if each.worker == worker and each.to_seconds is not None]
    for work in works:
        made = closed.get(work.version - 1, 0.0 if work.version == 0 else work.started_seconds)
        there = max((moment for moment in back if moment <= work.started_seconds), default=0.0)
        yield max(made, there), work.started_seconds
    if trace.strategy.endswith("@ranks") and closed:
        yield max(closed.values()), trace.seconds  # the last update: with a server it is there when its round closes


def _covered(intervals: Iterable[Interval], seconds: float) -> float:
    """Return how much of the time from 0 to `seconds` lies in at least one of the intervals."""
    total = until = 0.0
    for start, end in sorted(intervals):
        first, last = max(start, until), min(end, seconds)
        if last > first:
            total, until = total + (last - first), last
    return total
