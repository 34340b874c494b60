"""What a worker was doing at every moment: a trace cut into bars for the timeline.

    worker 3   ############~~~~.........#########.....
               |- computing -|  |       |
                             flight   waiting for the next model

Whole late work goes on while the next round is already computed. The part that runs beside newer work is
marked `beside` and drawn as a thin bar under it:

    worker 3   ###############################~~~.....
                           ==========                    <- the rest of the round before

Workers that average among themselves send when the last of them is there. Until then those that do not train on wait:

    worker 3   ########.....~~~~########      waiting for the others, then for the sum

In a real run a worker can be away, or the server down: that time is `gone`, and nobody waited in it. Work that never
arrived is in no journal, so a worker that had a new model and then went, or whose run ended, has a stretch without a
bar: it did not wait, but what it did is not known.

    worker 3   ######~~~...|          ::::::::::::########      | the round closed, a new model was sent   :: gone
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from paceline.traces import Outcome, Trace, Work
from paceline.traces.records import Absence

Doing = Outcome | Literal["flight", "waiting", "gone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of one worker's time; `cause` is its work, the work it had just done when waiting, or its absence.

    >>> work = Work(worker=0, version=0, started_seconds=0.0, finished_seconds=1.0, arrived_seconds=1.0)
    >>> Segment(doing="used", start_seconds=0.0, end_seconds=1.0, cause=work).beside
    False
    """

    doing: Doing
    start_seconds: float
    end_seconds: float
    cause: Work | Absence
    beside: bool = False


def segments(trace: Trace, worker: int) -> list[Segment]:
    """The bars of one worker's lane, in order of time.

    >>> works = (Work(worker=0, version=0, started_seconds=0.0, finished_seconds=1.0, arrived_seconds=1.5),
    ...          Work(worker=0, version=1, started_seconds=2.0, finished_seconds=3.0, arrived_seconds=3.0))
    >>> trace = Trace(strategy="full", seed=0, workers=1, recipe={}, rounds_done=2, seconds=3.0, works=works)
    >>> [(bar.doing, bar.start_seconds, bar.end_seconds) for bar in segments(trace, 0)]
    [('used', 0.0, 1.0), ('flight', 1.0, 1.5), ('waiting', 1.5, 2.0), ('used', 2.0, 3.0)]
    """
    works = sorted(
        (work for work in trace.works if work.worker == worker),
        key=lambda work: (work.started_seconds, work.version),
    )
    bars: list[Segment] = []
    busy_until = 0.0
    for work, following in pairwise([*works, None]):
        if work is None:
            continue
        next_start = trace.seconds if following is None else following.started_seconds
        arrived = work.finished_seconds if work.arrived_seconds is None else work.arrived_seconds
        overtaken_at = float("inf") if following is None else next_start
        bars += _split(work, work.outcome, work.started_seconds, work.finished_seconds, overtaken_at)
        sent = work.finished_seconds if work.sent_seconds is None else work.sent_seconds
        bars += _split(work, "waiting", work.finished_seconds, min(sent, overtaken_at), overtaken_at)
        bars += _split(work, "flight", sent, arrived, overtaken_at)
        busy_until = max(busy_until, arrived, work.finished_seconds)
        bars += _split(work, "waiting", busy_until, next_start, float("inf"))
    return bars if trace.clock == "virtual" else _as_far_as_known(bars, trace, worker)


def clipped(bars: Sequence[Segment], start_seconds: float, end_seconds: float) -> Iterator[Segment]:
    """The parts of the bars inside a window.

    >>> work = Work(worker=0, version=0, started_seconds=0.0, finished_seconds=1.0, arrived_seconds=1.0)
    >>> bar = Segment(doing="used", start_seconds=0.0, end_seconds=1.0, cause=work)
    >>> [(part.start_seconds, part.end_seconds) for part in clipped([bar], 0.25, 9.0)]
    [(0.25, 1.0)]
    """
    for bar in bars:
        start, end = max(bar.start_seconds, start_seconds), min(bar.end_seconds, end_seconds)
        if end > start:
            yield replace(bar, start_seconds=start, end_seconds=end)


def _as_far_as_known(bars: Sequence[Segment], trace: Trace, worker: int) -> list[Segment]:
    """Nobody waits while away, or with a model to work on; where work and absence overlap, the work is shown."""
    closed = {step.version: step.closed_seconds for step in trace.rounds}
    absences = [absence for absence in trace.absences if absence.worker == worker]
    ends = [trace.seconds if absence.to_seconds is None else absence.to_seconds for absence in absences]
    away = [(absence.from_seconds, end) for absence, end in zip(absences, ends, strict=True)]
    endings = {trace.seconds, *(start for start, _ in away)}
    kept: list[Segment] = []
    for bar in bars:
        kept += [bar] if bar.doing != "waiting" else _waiting(_outside(bar, away), endings, closed)
    taken = [(bar.start_seconds, bar.end_seconds) for bar in kept if not bar.beside]
    for absence, (start, end) in zip(absences, away, strict=True):
        whole = Segment(doing="gone", start_seconds=start, end_seconds=min(end, trace.seconds), cause=absence)
        kept += _outside(whole, taken)
        taken.append((start, end))
    return sorted(kept, key=lambda bar: bar.start_seconds)


def _waiting(bars: Iterable[Segment], endings: set[float], closed: Mapping[int, float]) -> Iterator[Segment]:
    """Waiting that no work ended was over when the round closed and the next model was sent."""
    for bar in bars:
        sent = closed.get(bar.cause.version, bar.end_seconds) if isinstance(bar.cause, Work) else bar.end_seconds
        end = min(bar.end_seconds, sent) if bar.end_seconds in endings else bar.end_seconds
        if bar.start_seconds < end:
            yield replace(bar, end_seconds=end)


def _outside(bar: Segment, holes: Sequence[tuple[float, float]]) -> Iterator[Segment]:
    """What is left of a bar where the holes are not."""
    start = bar.start_seconds
    for hole_start, hole_end in sorted(holes):
        if start < min(hole_start, bar.end_seconds):
            yield replace(bar, start_seconds=start, end_seconds=min(hole_start, bar.end_seconds))
        start = max(start, hole_end)
    if start < bar.end_seconds:
        yield replace(bar, start_seconds=start)


def _split(work: Work, doing: Doing, start: float, end: float, overtaken_at: float) -> Iterator[Segment]:
    if start < min(end, overtaken_at):
        yield Segment(doing=doing, start_seconds=start, end_seconds=min(end, overtaken_at), cause=work)
    if max(start, overtaken_at) < end:
        yield Segment(doing=doing, start_seconds=max(start, overtaken_at), end_seconds=end, cause=work, beside=True)
