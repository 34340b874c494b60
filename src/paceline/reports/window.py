"""Which stretch of each run the timeline shows: a few rounds of `full`, and the same length of all others.

Rounds are shown from the first that did not wait for everybody, so that a warm-up is not taken for the rule.
All synchronous strategies begin at the same round: with the same seed they then meet the same delays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.reports.results import baseline_name
from paceline.traces import Round, Trace

ASYNC = "async"
ROUNDS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """From when a run is shown, and for how long; the length is the same for all runs of a report.

    >>> Window(start_seconds=1.0, length_seconds=2.0).end_seconds
    3.0
    """

    start_seconds: float
    length_seconds: float

    @property
    def end_seconds(self) -> float:
        """When the shown stretch ends, on the run's own clock."""
        return self.start_seconds + self.length_seconds


def windows(traces: Sequence[Trace]) -> list[Window]:
    """One window per trace, all of one length: that of five rounds of `full`, or else of the slowest.

    >>> def run(name, seconds):
    ...     rounds = tuple(Round(version=v, opened_seconds=v * seconds, closed_seconds=(v + 1) * seconds,
    ...                          k=2, used=2, late=0) for v in range(9))
    ...     return Trace(strategy=name, seed=0, workers=2, recipe={}, rounds_done=9, seconds=9 * seconds,
    ...                  rounds=rounds)
    >>> [window.length_seconds for window in windows([run("full", 2.0), run("lgc", 1.0)])]
    [10.0, 10.0]
    """
    first = _first_version(traces)
    in_rounds = [trace for trace in traces if trace.strategy != ASYNC and _rounds_from(trace, first)]
    starts = [_rounds_from(trace, first)[0].opened_seconds for trace in in_rounds]
    if not in_rounds:
        return [Window(start_seconds=0.0, length_seconds=_typical_length(traces)) for _ in traces]
    lengths = {trace.strategy: _length(trace, first) for trace in in_rounds}
    length = lengths.get(baseline_name(lengths)) or max(lengths.values())
    by_trace = {id(trace): start for trace, start in zip(in_rounds, starts, strict=True)}
    return [
        # A run without rounds begins with the others, or early enough to fill the window.
        Window(
            start_seconds=by_trace.get(id(trace), max(0.0, min(starts[0], trace.seconds - length))),
            length_seconds=length,
        )
        for trace in traces
    ]


def _first_version(traces: Sequence[Trace]) -> int:
    """The first round that closed without everybody, in the strategy that was last to do so.

    Where the record ends soon after, earlier rounds are shown too: five in all.
    """
    versions, latest = [0], []
    for trace in traces:
        if trace.strategy == ASYNC:
            continue
        early = [step.version for step in trace.rounds if step.used < trace.workers]
        last = max((work.version for work in trace.works), default=0)
        latest.append(max(0, last - ROUNDS_SHOWN + 1))
        if early:
            versions.append(early[0])
    return min([max(versions), *latest])


def _rounds_from(trace: Trace, first: int) -> list[Round]:
    return [step for step in trace.rounds if step.version >= first][:ROUNDS_SHOWN]


def _length(trace: Trace, first: int) -> float:
    shown = _rounds_from(trace, first)
    return max(shown[-1].closed_seconds - shown[0].opened_seconds, 1e-9)


def _typical_length(traces: Sequence[Trace]) -> float:
    """Where there are no rounds (asynchronous runs): as long as five pieces of work take."""
    seconds = sorted(work.compute_seconds for trace in traces for work in trace.works)
    middle = seconds[len(seconds) // 2] if seconds else 0.0
    return max(ROUNDS_SHOWN * middle, 1e-9)
