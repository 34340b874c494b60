"""A recorded run as it would have been if nobody had straggled: the ideal that an export and a page draw beside it.

In every round each worker takes as long as the median worker of that round, from the round's opening to the arrival of
its gradient; so all arrive at once, the round closes, and nothing is late or dropped:

    run      w0  ####~......|        ideal    w0  ######~|
             w1  ######~....|                 w1  ######~|         the median worker's own computing and wire
             w2  ##########~|                 w2  ######~|

Work that stopped early counts as if all of its blocks had been computed. An asynchronous run has no rounds: there N
gradients that arrived one after the other are one, for N workers, and each worker computes one of them. Where workers
train on while their average travels, the next window begins when the last one is computed. Of a watched script, each
step has the computing time of its median rank and the least wait of all, which is that of the last to come: what the
wire takes.

It is a comparison and not a prediction: the same work, on the same machines as they usually are, without the tail.
Losses are not part of it, for other gradients would have been used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.traces.alignment import steps_in_common
from paceline.traces.records import Round, Trace, Work
from paceline.traces.step_times import StepTimes, WorkerTimes

ASYNC = "async"


def ideal_trace(trace: Trace) -> Trace:
    """Return the trace of the same rounds without stragglers; rounds of which no work is recorded are left out.

    >>> works = [Work(worker=worker, version=0, started_seconds=0.0, finished_seconds=1.0 + worker,
    ...               arrived_seconds=1.5 + worker) for worker in range(3)]
    >>> run = Trace(strategy="full", seed=0, workers=3, recipe={}, rounds_done=1, seconds=3.5, works=tuple(works),
    ...             rounds=(Round(version=0, opened_seconds=0.0, closed_seconds=3.5, k=3, used=3, late=0),))
    >>> ideal = ideal_trace(run)
    >>> ideal.seconds, {work.finished_seconds for work in ideal.works}
    (2.5, {2.0})
    """
    opened = {step.version: step.opened_seconds for step in trace.rounds}
    began = min((work.started_seconds for work in trace.works), default=0.0)
    began = min([began, *opened.values()])
    trains_on, works, rounds = _trains_on(trace), list[Work](), list[Round]()
    begin = closed = began
    for key, group in _groups(trace):
        usual = _median_work(group, opened)
        lead = 0.0 if trains_on else max(0.0, usual.started_seconds - opened.get(usual.version, usual.started_seconds))
        start = begin + lead
        finish = start + _whole_seconds(usual)
        arrival = finish + _wire_seconds(usual)
        for worker in sorted({work.worker for work in group}):
            works.append(
                Work(
                    worker=worker, version=key, started_seconds=start, finished_seconds=finish, arrived_seconds=arrival
                )
            )
        number = len({work.worker for work in group})
        before, closed = closed, max(closed, arrival)
        rounds.append(Round(version=key, opened_seconds=before, closed_seconds=closed, k=number, used=number, late=0))
        begin = finish if trains_on else closed
    return replace(
        trace,
        rounds_done=len(rounds),
        seconds=closed,
        rounds=tuple(rounds),
        works=tuple(works),
        evaluations=(),
        absences=(),
        used=len(works),
        late=0,
        dropped={},
        by_worker=(),
    )


def _groups(trace: Trace) -> list[tuple[int, list[Work]]]:
    """Return the works that are compared with each other, in order: those of a round, or N as they came."""
    groups: defaultdict[int, list[Work]] = defaultdict(list)
    if trace.strategy != ASYNC:
        for work in trace.works:
            groups[work.version].append(work)
        return sorted(groups.items())
    workers = sorted({work.worker for work in trace.works})
    by_end = sorted(trace.works, key=lambda work: (work.arrived_seconds or work.finished_seconds, work.worker))
    for place, work in enumerate(by_end):
        number, seat = divmod(place, len(workers))
        groups[number].append(replace(work, worker=workers[seat]))
    return sorted(groups.items())


def _median_work(group: Sequence[Work], opened: Mapping[int, float]) -> Work:
    """Return the work that took the median time from its round's opening on; of two, the shorter."""
    arrived = [work for work in group if work.arrived_seconds is not None] or list(group)

    def seconds(work: Work) -> float:
        lead = max(0.0, work.started_seconds - opened.get(work.version, work.started_seconds))
        return lead + _whole_seconds(work) + _wire_seconds(work)

    return sorted(arrived, key=seconds)[(len(arrived) - 1) // 2]


def _whole_seconds(work: Work) -> float:
    return max(0.0, work.compute_seconds) * max(1.0, work.blocks / max(work.blocks_done, 1))


def _wire_seconds(work: Work) -> float:
    if work.arrived_seconds is None:
        return 0.0
    return max(0.0, work.arrived_seconds - (work.finished_seconds if work.sent_seconds is None else work.sent_seconds))


def _trains_on(trace: Trace) -> bool:
    """Return whether workers begin the next window before the average of the last one is there, in most cases."""
    if not trace.averaged:
        return False
    before: dict[int, Work] = {}
    overlapping = pairs = 0
    for work in sorted(trace.works, key=lambda work: work.started_seconds):
        last = before.get(work.worker)
        if last is not None and last.arrived_seconds is not None:
            pairs += 1
            overlapping += work.started_seconds < last.arrived_seconds
        before[work.worker] = work
    return 2 * overlapping > pairs


def ideal_steps(ranks: Mapping[int, WorkerTimes]) -> dict[int, tuple[StepTimes, ...]]:
    """Return the steps that all ranks of a watched script would have taken without stragglers, from second 0 on.

    >>> from paceline.traces.step_times import FORMAT, TimesBegan
    >>> def rank(number, forward, wait):
    ...     began = TimesBegan(format=FORMAT, paceline="0.2.0", noun="rank", number=number, workers=3, host="a",
    ...                        launch="1", sync="ddp")
    ...     return WorkerTimes(began=began, steps=(StepTimes(step=0, started_seconds=0.0, seconds=forward + wait,
    ...                                                      forward_seconds=forward, wait_seconds=wait),))
    >>> ideal_steps({0: rank(0, 1.0, 3.25), 1: rank(1, 2.0, 2.25), 2: rank(2, 4.0, 0.25)})[2][0].seconds
    2.25
    """
    found: dict[int, list[StepTimes]] = {rank: [] for rank in ranks}
    started = 0.0
    for by_rank in steps_in_common(ranks):
        steps = sorted(by_rank.values(), key=lambda each: each.seconds - each.wait_seconds)
        usual, wait = steps[(len(steps) - 1) // 2], min(each.wait_seconds for each in steps)
        seconds = max(usual.seconds - usual.wait_seconds, 0.0) + wait
        ideal = replace(usual, started_seconds=started, seconds=seconds, wait_seconds=wait, buckets=())
        for rank in by_rank:
            found[rank].append(ideal)
        started += seconds
    return {rank: tuple(steps) for rank, steps in found.items()}
