"""The trace of a script that was watched: its steps as rounds, its ranks as workers, from their step times alone.

The clocks of ranks are not compared. All go on at one moment in each step, when the gradients of all are there; these
moments are laid one after the other, as far apart as a step took on the median rank, and everything else is counted
from them:

    rank 0   #########......~~|        it waited longest, so it was there first     . for the others   ~ on the wire
    rank 1   ###############~~|        it came last: it waited for the wire alone
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from paceline.traces.alignment import steps_in_common
from paceline.traces.history import KEPT_WORKS
from paceline.traces.records import Absence, Round, Trace, Work
from paceline.traces.step_times import WorkerTimes
from paceline.traces.worker_counts import WorkerCounts


def trace_of_times(ranks: Mapping[int, WorkerTimes]) -> Trace:
    """Return the trace of ranks that were watched; where long runs have sums of steps, a round is such a sum.

    >>> from paceline.traces.step_times import FORMAT, StepTimes, TimesBegan
    >>> def rank(number, wait):
    ...     began = TimesBegan(format=FORMAT, paceline="0.2.0", noun="rank", number=number, workers=2, host="node-7",
    ...                        launch="1a2b", sync="ddp")
    ...     step = StepTimes(step=0, started_seconds=0.0, seconds=1.0, forward_seconds=1.0 - wait, wait_seconds=wait)
    ...     return WorkerTimes(began=began, steps=(step,))
    >>> trace = trace_of_times({0: rank(0, wait=0.75), 1: rank(1, wait=0.25)})
    >>> [(work.worker, work.finished_seconds, work.sent_seconds, work.arrived_seconds) for work in trace.works]
    [(0, 0.25, 0.75, 1.0), (1, 0.75, 0.75, 1.0)]
    """
    workers = max(times.began.workers for times in ranks.values())
    rounds_done = 0
    rounds: list[Round] = []
    works: list[Work] = []
    counts = {number: WorkerCounts(worker=number) for number in ranks}
    opened, last_seen = 0.0, dict.fromkeys(ranks, 0.0)
    for lines in steps_in_common(ranks):
        step, steps = next((line.step, line.steps) for line in lines.values())
        rounds_done += steps
        closed = opened + median(line.seconds for line in lines.values())
        wire = min(line.wait_seconds for line in lines.values())
        rounds.append(
            Round(version=step, opened_seconds=opened, closed_seconds=closed, k=len(lines), used=len(lines), late=0)
        )
        for number, line in lines.items():
            before = counts[number]
            waited = before.waited_seconds + line.wait_seconds - wire
            counts[number] = WorkerCounts(worker=number, used=before.used + steps, waited_seconds=waited)
            last_seen[number] = closed
            if len(works) < KEPT_WORKS:
                works.append(
                    Work(
                        worker=number,
                        version=step,
                        started_seconds=opened,
                        finished_seconds=max(opened, closed - line.wait_seconds),
                        arrived_seconds=closed,
                        sent_seconds=max(opened, closed - wire),
                    )
                )
        opened = closed
    ended = next((times.ended.reason for times in ranks.values() if times.ended is not None), "")
    return Trace(
        strategy=next(iter(ranks.values())).began.sync,
        seed=0,
        workers=workers,
        recipe={},
        rounds_done=rounds_done,
        seconds=opened,
        clock="real",
        used=sum(each.used for each in counts.values()),
        rounds=tuple(rounds),
        works=tuple(works),
        absences=tuple(_absences(ranks, last_seen, opened, workers)),
        ended=ended,
        by_worker=tuple(counts[number] for number in sorted(counts)),
    )


def _absences(
    ranks: Mapping[int, WorkerTimes], last_seen: Mapping[int, float], seconds: float, workers: int
) -> list[Absence]:
    """Return who has left no times at all, and who stopped before the others did."""
    never = "no times of it are here"
    missing = [number for number in range(min(workers, KEPT_WORKS)) if number not in ranks]
    found = [Absence(worker=number, from_seconds=0.0, to_seconds=None, reason=never) for number in missing]
    for number, times in ranks.items():
        if last_seen[number] < seconds:
            reason = times.ended.reason if times.ended is not None else "its times end here (killed?)"
            found.append(Absence(worker=number, from_seconds=last_seen[number], to_seconds=None, reason=reason))
    return sorted(found, key=lambda absence: (absence.from_seconds, absence.worker))
