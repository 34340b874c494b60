"""What a worker was doing at every moment: a trace cut into bars for the timeline.

    worker 3   ############~~~~.........#########.....
               |- computing -|  |       |
                             flight   waiting for the next model

Whole late work goes on while the next round is already computed. The part that runs beside newer work is
marked `beside` and drawn as a thin bar under it:

    worker 3   ###############################~~~.....
                           ==========                    <- the rest of the round before
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from paceline.traces import Outcome, Trace, Work

Doing = Outcome | Literal["flight", "waiting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of one worker's time; `work` is what it was busy with, or had just done when waiting.

    >>> work = Work(worker=0, version=0, started_seconds=0.0, finished_seconds=1.0, arrived_seconds=1.0)
    >>> Segment(doing="used", start_seconds=0.0, end_seconds=1.0, work=work).beside
    False
    """

    doing: Doing
    start_seconds: float
    end_seconds: float
    work: Work
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
        bars += _split(work, "flight", work.finished_seconds, arrived, overtaken_at)
        busy_until = max(busy_until, arrived, work.finished_seconds)
        bars += _split(work, "waiting", busy_until, next_start, float("inf"))
    return bars


def clipped(bars: Sequence[Segment], start_seconds: float, end_seconds: float) -> Iterator[Segment]:
    """The parts of the bars inside a window.

    >>> work = Work(worker=0, version=0, started_seconds=0.0, finished_seconds=1.0, arrived_seconds=1.0)
    >>> bar = Segment(doing="used", start_seconds=0.0, end_seconds=1.0, work=work)
    >>> [(part.start_seconds, part.end_seconds) for part in clipped([bar], 0.25, 9.0)]
    [(0.25, 1.0)]
    """
    for bar in bars:
        start, end = max(bar.start_seconds, start_seconds), min(bar.end_seconds, end_seconds)
        if end > start:
            yield Segment(doing=bar.doing, start_seconds=start, end_seconds=end, work=bar.work, beside=bar.beside)


def _split(work: Work, doing: Doing, start: float, end: float, overtaken_at: float) -> Iterator[Segment]:
    if start < min(end, overtaken_at):
        yield Segment(doing=doing, start_seconds=start, end_seconds=min(end, overtaken_at), work=work)
    if max(start, overtaken_at) < end:
        yield Segment(doing=doing, start_seconds=max(start, overtaken_at), end_seconds=end, work=work, beside=True)
