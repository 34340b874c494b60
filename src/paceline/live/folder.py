"""One run's folder, followed: its journal, its trace and its step times, and whether somebody still writes them.

    waiting     there is no folder, no record, or nobody has taken a step yet
    running     records come, or the writer of the journal is known to live
    quiet       nothing has come for QUIET_SECONDS, and nobody here holds the journal: killed, or on another machine
    killed      the writer of the journal lived on this machine, and lives no more, and has written no end
    ended       the last record says so, and why; a trace is of a run that has ended

The writer of a journal locks it for as long as it lives (`traces.journal_files`). Trying that lock would stand in the
way of a server that starts at that moment, so /proc/locks is read instead, where there is one. It names the locks of
this machine (in a container: of this container), so a lock that is not there proves nothing by itself: only where it
was there before, or the step times of who wrote the journal say that this was on this machine. A writer that
ends well writes the end and then gives up the lock, so when the lock is newly missing, the journal is read once more.

A look reads at most LOOK_BYTES of all files together, so it takes a fraction of a second however long the record is.
Who is `behind` looks again at once; until it has caught up, a run is neither quiet nor killed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

from paceline.live.state import (
    MOST_ROWS,
    JournalState,
    Json,
    RankSteps,
    TraceState,
    merged_rows,
    quiet_text,
    shown_rows,
    waited_for,
)
from paceline.live.tail import FileTail
from paceline.processes import seen_from
from paceline.traces.checked_lines import checksum_of
from paceline.traces.journal import TRACE, record_from
from paceline.traces.journal_files import LONGEST_LINE_BYTES, MOST_BYTES
from paceline.traces.step_times import LONGEST_LINE_BYTES as LONGEST_TIMES_LINE
from paceline.traces.step_times import MOST_BYTES as MOST_TIMES_BYTES
from paceline.traces.step_times import TIMES, TimesBegan, times_path, times_record
from paceline.traces.trace_files import TRACES, read_traces

RunState: TypeAlias = Literal["waiting", "running", "quiet", "killed", "ended"]
STATES: tuple[RunState, ...] = ("waiting", "running", "quiet", "killed", "ended")
QUIET_SECONDS = 20.0
MOST_TIMES_FILES = 4_000  # of the lowest numbers; 6 kB of memory each
LOOK_BYTES = 2**20  # of all files at one look; a longer record is read in several, and the page says how far
LEAST_BYTES = 2**16  # of one file of step times at one look
LOCKS, MOUNTS = Path("/proc/locks"), Path("/proc/self/mountinfo")
_TIMES_NAME = re.compile(r"(rank|worker)-([0-9]{1,7})\.jsonl")


class _Journal:
    """The journal of the folder, and its state."""

    def __init__(self, path: Path) -> None:
        self.tail = FileTail(path, most_bytes=MOST_BYTES, longest_line_bytes=LONGEST_LINE_BYTES)
        self.state, self.lines, self.problem = JournalState(), 0, ""
        self._checksum = 0  # of the last line
        self.left_bytes = self.size_bytes = self.read_bytes = 0
        self.exists = self.more = False

    def look(self, most_bytes: int) -> bool:
        """Read what is new, of about so many bytes, and return whether there was anything."""
        self.more, self.read_bytes = False, 0
        try:
            found = self.tail.look(most_bytes)
        except (OSError, ValueError) as error:
            return self._note(f"cannot read {self.tail.path.name}: {_reason(error)}")
        if found.begun_anew:
            self.state, self.lines, self.problem, self._checksum = JournalState(), 0, "", 0
        self.exists, self.left_bytes, self.size_bytes = found.exists, found.left_bytes, found.size_bytes
        self.more, self.read_bytes = found.more, sum(map(len, found.lines))
        for line in found.lines if not self.problem else ():
            try:
                self.state.take(record_from(line, self._checksum))
            except ValueError as error:
                return self._note(f"{self.tail.path.name}:{self.lines + 1}: {error}")
            self._checksum = checksum_of(line)
            self.lines += 1
        return bool(found.lines) or found.begun_anew

    def _note(self, problem: str) -> bool:
        changed, self.problem = problem != self.problem, problem
        return changed


class _TimesFile:
    """One file of step times; `size_bytes` is what it holds before it is looked at."""

    def __init__(self, path: Path, *, size_bytes: int = 0, with_curve: bool = False) -> None:
        self.tail = FileTail(path, most_bytes=MOST_TIMES_BYTES, longest_line_bytes=LONGEST_TIMES_LINE)
        self.with_curve = with_curve
        self.times, self.lines, self.problem = RankSteps(with_curve=with_curve), 0, ""
        self.left_bytes = self.size_bytes = size_bytes
        self.read_bytes, self.more = 0, False
        self.grown_at = 0.0

    def look(self, now: float, most_bytes: int) -> bool:
        """Read what is new, of about so many bytes, and return whether there was anything."""
        self.more, self.read_bytes = False, 0
        try:
            found = self.tail.look(most_bytes)
            self.left_bytes, self.size_bytes, self.more = found.left_bytes, found.size_bytes, found.more
            self.read_bytes = sum(map(len, found.lines))
            if found.begun_anew:
                self.times, self.lines, self.problem = RankSteps(with_curve=self.with_curve), 0, ""
            for line in found.lines if not self.problem else ():
                self.lines += 1
                self.times.take(times_record(line))
        except (OSError, ValueError) as error:
            problem = f"{TIMES}/{self.tail.path.name}:{self.lines}: {_reason(error)}"
            changed, self.problem = problem != self.problem, problem
            return changed
        if found.lines:
            self.grown_at = now
        return bool(found.lines) or found.begun_anew


class FollowedRun:
    """Follows the run in a folder: `look` reads what is new, `document` is the state as plain values.

    Args:
        clock: the time of day in seconds, which files are dated by.

    >>> import tempfile
    >>> run = FollowedRun(Path(tempfile.mkdtemp(), "later"))
    >>> run.look()
    False
    >>> run.document()["state"], run.document()["text"]
    ('waiting', 'waiting for a run: the folder is not there yet')
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.folder, self._clock = folder, clock
        self._journal = _Journal(folder / TRACE)
        self._times: dict[tuple[str, int], _TimesFile] = {}
        self._unread: list[tuple[str, int]] = []  # the files that the last look has not come to
        self._drawn: tuple[str, int] | None = None  # whose curve is kept
        self._too_many_times = ""
        self._trace: TraceState | None = None
        self._trace_date, self._trace_problem = 0, ""
        self._written_at = 0.0
        self._was_locked = self._locked = False

    # -- reading

    @property
    def behind(self) -> bool:
        """Whether there is more to read at once."""
        return self._journal.more or bool(self._unread) or any(file.more for file in self._times.values())

    def look(self) -> bool:
        """Read what is new in the folder, up to LOOK_BYTES, and return whether the document has changed by it."""
        before = self._state(), self.behind
        changed = self._journal.look(LOOK_BYTES // 2 if self._times else LOOK_BYTES)
        left = LOOK_BYTES - self._journal.read_bytes
        self._locked = self._is_being_written()
        if self._was_locked and not self._locked and self._journal.state.ended is None:
            changed |= self._journal.look(LOOK_BYTES)  # the end may have been written since
            self._locked = self._is_being_written()
        self._was_locked = (self._was_locked or self._locked) and self._journal.state.ended is None
        changed |= self._look_for_times(max(LEAST_BYTES, left))
        if not self._journal.exists:
            changed |= self._look_for_trace()
        self._written_at = self._newest()
        return changed or (self._state(), self.behind) != before

    def _is_being_written(self) -> bool:
        journal = self._journal
        return journal.exists and journal.state.ended is None and _is_locked(journal.tail.path)

    def _look_for_times(self, most_bytes: int) -> bool:
        changed = self._find_times()
        self._draw_the_first()
        share = max(LEAST_BYTES, most_bytes // max(1, len(self._times)))
        waiting = set(self._unread)
        order = [*self._unread, *(key for key in self._times if key not in waiting)]
        self._unread = []
        for place, key in enumerate(order):
            if most_bytes <= 0:
                self._unread = order[place:]
                break
            file = self._times[key]
            changed |= file.look(self._clock(), min(share, most_bytes))
            most_bytes -= file.read_bytes
        return changed

    def _find_times(self) -> bool:
        """Take the files of step times that are new, those of the lowest numbers first."""
        new: dict[tuple[str, int], os.DirEntry[str]] = {}
        try:
            with os.scandir(self.folder / TIMES) as entries:
                for entry in entries:
                    named = _TIMES_NAME.fullmatch(entry.name)
                    if named and (key := (named[1], int(named[2]))) not in self._times and key not in new:
                        new[key] = entry
        except OSError:
            pass
        before, room = self._too_many_times, MOST_TIMES_FILES - len(self._times)
        for key in sorted(new)[:room]:
            self._times[key] = _TimesFile(self.folder / TIMES / new[key].name, size_bytes=_size_of(new[key]))
        number = len(new) + len(self._times) - min(room, len(new))
        more = f"{TIMES} holds {number:,} files: {MOST_TIMES_FILES:,} of them are shown"
        self._too_many_times = more if len(new) > room else ""
        return self._too_many_times != before

    def _draw_the_first(self) -> None:
        """Keep the curve of the first one alone: a file that has become the first is read again for it."""
        first = min((key for key in self._times if key[0] == self.noun), default=None)
        if first == self._drawn:
            return
        if self._drawn is not None:
            self._times[self._drawn].with_curve = False
            self._times[self._drawn].times.drop_curve()
        if first is not None:
            file = self._times[first]
            self._times[first] = _TimesFile(file.tail.path, size_bytes=file.size_bytes, with_curve=True)
        self._drawn = first

    def _look_for_trace(self) -> bool:
        try:
            date = os.stat(self.folder / TRACES).st_mtime_ns
        except OSError:
            return False
        if date == self._trace_date:
            return False
        self._trace_date = date
        try:
            traces = read_traces(self.folder)
        except (OSError, ValueError) as error:
            self._trace_problem = _reason(error)
            return True
        self._trace_problem = "" if len(traces) == 1 else f"{TRACES} holds {len(traces)} runs: see report.html for them"
        self._trace = TraceState(traces[0]) if len(traces) == 1 else None
        return True

    def _newest(self) -> float:
        newest = 0.0
        for path in (self._journal.tail.path, *(file.tail.path for file in self._times.values())):
            try:
                newest = max(newest, path.stat().st_mtime)
            except OSError:
                continue
        return newest

    # -- the state

    @property
    def kind(self) -> str:
        """What was run, as `traces.recorded_run` names it; "" where there is nothing yet."""
        if self._journal.state.began is not None:
            return "rounds" if self._journal.state.began.on == "ranks" else "server"
        if self._trace is not None:
            return "simulated" if self._trace.trace.clock == "virtual" else "averaging"
        began = self._any_times()
        if began is None or began.began is None:
            return ""
        return "averaging" if began.began.sync == "averaging" else "watched"

    @property
    def found(self) -> bool:
        """Whether the folder holds a run."""
        return bool(self.kind)

    @property
    def over(self) -> bool:
        """Whether the run has ended, or its process is known to be gone."""
        return self._state() in ("ended", "killed")

    def _any_times(self) -> RankSteps | None:
        return next((file.times for _, file in sorted(self._times.items())), None)

    @property
    def noun(self) -> str:
        """What those who compute are called."""
        if self._journal.state.began is not None:
            return self._journal.state.noun
        return "worker" if self._trace is not None and not self._trace.trace.averaged else "rank"

    def _of_noun(self) -> dict[int, RankSteps]:
        return {number: file.times for (noun, number), file in sorted(self._times.items()) if noun == self.noun}

    def _quiet_seconds(self) -> float:
        return max(0.0, self._clock() - self._written_at) if self._written_at else 0.0

    def _state(self) -> RunState:
        journal = self._journal.state
        if journal.began is not None:
            if journal.ended is not None and not self._journal.more:
                return "ended"
            if not self._locked and not self.behind:
                if self._was_locked:
                    return "killed"
                if self._quiet_seconds() > QUIET_SECONDS:
                    return "killed" if self._writer_was_here() else "quiet"
            return "running" if journal.version or journal.steps_closed else "waiting"
        if self._trace is not None:
            return "ended"
        times = list(self._of_noun().values())
        if not times or all(each.began is None for each in times):
            return "waiting"
        if self.behind:
            return "running"
        if all(each.ended is not None for each in times):
            return "ended"
        return "quiet" if self._quiet_seconds() > QUIET_SECONDS else "running"

    def _writer_was_here(self) -> bool:
        """Return whether the locks that are seen here would show who wrote the journal, by what its own times say."""
        written = _written_from(times_path(self.folder, "rank" if self.noun == "rank" else "server", 0))
        return bool(written) and written == seen_from() and _locks_are_seen(self._journal.tail.path)

    def _text(self, state: RunState) -> str:
        """Return the state in one sentence."""
        journal, trace = self._journal.state, self._trace
        if state == "waiting":
            return self._waiting_text()
        figures = self._figures()
        done = f"{figures['round']:,}" if figures.get("round") is not None else ""
        of = f" of {figures['rounds']:,}" if figures.get("rounds") else ""
        where = f"round {done}{of}" if done else f"step {figures['steps']:,}"
        if self.behind and state == "running":
            return f"reading the record, so far {where}"
        if state == "ended":
            if journal.ended is not None:
                reason = journal.ended.reason
            elif trace is not None:
                reason = trace.trace.ended or ("stopped early" if trace.trace.stopped else "all rounds done")
            else:
                reason = next((each.ended.reason for each in self._of_noun().values() if each.ended), "")
            diverged = ", diverged" if journal.diverged or (trace is not None and trace.trace.diverged) else ""
            return f"ended after {where}{diverged}: {reason}"
        if state == "killed":
            return f"killed at {where}: its process is gone, and has written no end"
        if state == "quiet":
            return f"quiet at {where}: {quiet_text(self._quiet_seconds())}; killed, or at work on another machine"
        return f"running: {where}"

    def _waiting_text(self) -> str:
        journal = self._journal.state
        if journal.began is not None:
            here = sum(worker.alive for worker in journal.workers.values())
            return f"waiting for {journal.noun}s: {here} of {journal.began.workers} here"
        if not self.folder.is_dir():
            return "waiting for a run: the folder is not there yet"
        return "waiting for a run: the folder holds no record yet"

    def _figures(self) -> Json:
        if self._journal.state.began is not None:
            return self._journal.state.figures(over=self.over)
        if self._trace is not None:
            return self._trace.figures()
        times = self._of_noun()
        if not times:
            return {}
        ended = [each for each in times.values() if each.ended is not None]
        return {
            "steps": max(each.steps for each in times.values()),
            "seconds": round(max(each.seconds for each in times.values()), 3),
            "steps_per_second": round(min((each.pace for each in times.values() if each.steps), default=0.0), 3),
            "here": len(times) - len(ended),
            "workers": max((each.began.workers for each in times.values() if each.began is not None), default=None),
        }

    @property
    def problems(self) -> list[str]:
        """What cannot be read or is missing, a sentence each."""
        found = [self._journal.problem, self._trace_problem, self._too_many_times]
        found += [*self._journal.state.missing, *(file.problem for file in self._times.values())]
        return [problem[:300] for problem in found if problem][:5]

    def document(self) -> dict[str, Any]:
        """Return the state as plain values that JSON can hold, of bounded size."""
        journal, trace, times = self._journal.state, self._trace, self._of_noun()
        state = self._state()
        shown = journal if journal.began is not None else trace
        counted = journal.rows(over=self.over) if journal.began is not None else [] if trace is None else trace.rows()
        rows = list(merged_rows(counted, times))
        quiet = self._clock() - QUIET_SECONDS
        for row in rows:
            file = self._times.get((self.noun, row["number"]))
            if row["state"] == "" and file is not None:
                row["state"] = "quiet" if file.grown_at < quiet and not self.behind else "running"
            if state == "killed" and row["state"] != "gone":
                row |= {"state": "gone", "remark": "the run was killed"}
        kept = shown_rows(rows, MOST_ROWS)
        curves = {} if shown is None else shown.curves()
        first = next(iter(times.values()), None)
        if first is not None:
            curves |= first.curves()
        figures = self._figures()
        if self.over:
            figures["here"] = 0
        began = self._any_times()
        strategy = "" if trace is None else trace.trace.strategy
        if journal.began is not None:
            strategy = journal.began.strategy
        elif began is not None and began.began is not None and not strategy:
            strategy = began.began.sync
        slow = "" if self.behind else waited_for(times, self.noun)
        return {
            "name": self.folder.absolute().name.encode("utf-8", "replace").decode("utf-8"),
            "kind": self.kind,
            "strategy": strategy,
            "noun": self.noun,
            "state": state,
            "text": self._text(state),
            "read": self._share_read(),
            "figures": figures,
            "rounds_closed": journal.rounds_closed if journal.began is not None else None,
            "rows": kept,
            "rows_left_out": len(rows) - len(kept),
            "curves": curves,
            "events": [[at, text] for at, text in journal.events],
            "warnings": [*journal.warnings(), *([slow] if slow else [])],
            "problems": self.problems,
        }

    def _share_read(self) -> float:
        if not self.behind:
            return 1.0
        files: list[_Journal | _TimesFile] = [self._journal, *self._times.values()]
        size = sum(file.size_bytes for file in files)
        return round(1.0 - sum(file.left_bytes for file in files) / size, 3) if size else 1.0


def _size_of(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:
        return 0


def _reason(error: Exception) -> str:
    return str(error.strerror or error) if isinstance(error, OSError) else str(error)


def _written_from(path: Path) -> str:
    """Return from where the lock of the writer of step times is seen; "" where the file does not say."""
    tail = FileTail(path, most_bytes=MOST_TIMES_BYTES, longest_line_bytes=LONGEST_TIMES_LINE)
    with suppress(OSError, ValueError):
        for line in tail.look(LEAST_BYTES).lines[:1]:
            began = times_record(line)
            return began.seen_from if isinstance(began, TimesBegan) else ""
    return ""


def _locks_are_seen(path: Path) -> bool:
    """Return whether LOCKS would name the lock of a file: its device is one of those that are mounted here.

    On btrfs, for one, a file says another device than its locks do.
    """
    try:
        device, mounts = path.stat().st_dev, MOUNTS.read_text(encoding="utf-8", errors="replace")
        LOCKS.read_bytes()
    except OSError:
        return False
    return f"{os.major(device)}:{os.minor(device)}" in {line.split()[2] for line in mounts.splitlines()}


def _is_locked(path: Path) -> bool:
    """Return whether a process of this machine holds the lock of a file; False where nobody can tell."""
    try:
        found, locks = path.stat(), LOCKS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    wanted = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    return any(wanted in line.split() and "FLOCK" in line and "->" not in line for line in locks.splitlines())
