"""All that a folder holds of one run: its journal or its trace, and the step times of its ranks or workers.

the folder holds                  kind         what was run
trace.jsonl                       server       train or serve with a parameter server; paceline.serve
trace.jsonl, on = "ranks"         rounds       LGC and its family without a server
traces.json.gz                    averaging    HPSGD and its family; `simulated` where the clock is virtual
times/rank-*.jsonl alone          watched      a script with paceline.watch
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from paceline.errors import PacelineError
from paceline.traces.history import trace_of
from paceline.traces.journal import TRACE
from paceline.traces.journal_files import Journal, read_journal
from paceline.traces.records import Trace
from paceline.traces.step_times import TIMES, Noun, WorkerTimes, read_all_times
from paceline.traces.trace_files import TRACES, read_traces

RunKind: TypeAlias = Literal["server", "rounds", "averaging", "simulated", "watched"]


class NoRunError(PacelineError, ValueError):
    """A folder that holds no run of the kind that is wanted.

    >>> raise NoRunError("runs/mine holds no run: it has none of trace.jsonl, traces.json.gz and times")
    Traceback (most recent call last):
    paceline.traces.recorded_run.NoRunError: runs/mine holds no run: it has none of trace.jsonl, ...
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedRun:
    """One run as its folder has it; `trace` is None for a watched script, whose times are all there is.

    `missing` says what of the run is not in its records, in sentences without a full stop: holes that a full disk has
    left in the journal, what a large record does not keep, and files of step times that cannot be read.
    """

    folder: Path
    kind: RunKind
    trace: Trace | None = None
    journal: Journal | None = None
    times: Mapping[Noun, Mapping[int, WorkerTimes]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def workers(self) -> int:
        """How many ranks or workers the run was begun with."""
        if self.trace is not None:
            return self.trace.workers
        return max(each.began.workers for each in self.times["rank"].values())


def read_run(folder: Path, *, strategy: str = "") -> RecordedRun:
    """Read the run in a folder; where it holds several (a race), `strategy` says which.

    >>> import tempfile
    >>> read_run(Path(tempfile.mkdtemp()))
    Traceback (most recent call last):
    paceline.traces.recorded_run.NoRunError: ... holds no run: it has none of trace.jsonl, traces.json.gz and times
    """
    left_out: list[str] = []
    times = read_all_times(folder, left_out)
    if (folder / TRACE).is_file():
        journal = read_journal(folder / TRACE)
        trace = trace_of(journal)
        kind: RunKind = "rounds" if journal.began.on == "ranks" else "server"
        missing = (*trace.missing, *left_out)
        return RecordedRun(folder=folder, kind=kind, trace=trace, journal=journal, times=times, missing=missing)
    if (folder / TRACES).is_file():
        trace = _chosen(folder, read_traces(folder), strategy)
        kind = "simulated" if trace.clock == "virtual" else "averaging"
        return RecordedRun(folder=folder, kind=kind, trace=trace, times=times, missing=(*trace.missing, *left_out))
    if times.get("rank"):
        return RecordedRun(folder=folder, kind="watched", times=times, missing=tuple(left_out))
    if left_out:
        raise NoRunError(f"{folder} holds no times that can be read: {left_out[0]}")
    raise NoRunError(f"{folder} holds no run: it has none of {TRACE}, {TRACES} and {TIMES}")


def _chosen(folder: Path, traces: list[Trace], strategy: str) -> Trace:
    names = list(dict.fromkeys(trace.strategy for trace in traces))
    found = [trace for trace in traces if trace.strategy == strategy] if strategy else traces
    if not found:
        raise NoRunError(f"{folder} holds no run of {strategy!r} (it has {', '.join(names) or 'none'})")
    if len({trace.strategy for trace in found}) > 1:
        raise NoRunError(f"{folder} holds several runs: say which with --strategy ({', '.join(names)})")
    return found[0]
