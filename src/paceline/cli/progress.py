"""Progress on stderr: of a loop of steps, of simulated runs side by side, and of a real run.

in a terminal    bars, which move; a real run has a line for each worker as well, and its log above them
elsewhere        a line every few seconds (`traces.run_status.PeriodicLines`), for logs of batch systems and containers
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.cli.output import note
from paceline.drivers.simulated.progress import Progress as RunProgress
from paceline.loggers import Log, named_log
from paceline.quantities import duration_text
from paceline.terminal import WIDTH
from paceline.traces.run_status import (
    Pace,
    PeriodicLines,
    RunStatus,
    StatusLines,
    StatusLog,
    WorkerStatus,
    status_facts,
    waiting_text,
)
from paceline.traces.worker_counts import mostly_dropped

MOST_WORKERS = 24
VIEW_SECONDS = 0.1
_STYLES = {"on time": "green", "late": "yellow", "dropped": "red", "gone": "red", "joined": "cyan"}


@contextmanager
def step_bar(
    console: Console, name: str, *, total: int | None = None, visible: bool = True, after_seconds: float = 0.0
) -> Iterator[Callable[..., None]]:
    """Show one bar, which vanishes at the end, once the work has taken `after_seconds`; without a terminal, lines.

    The function that is yielded changes the bar; it takes what rich's `Progress.update` does: `description`,
    `completed`, `total`, `advance` or `visible`.

    >>> with step_bar(Console(quiet=True), "replaying", total=2) as update:
    ...     update(advance=1)
    """
    columns = (TextColumn("{task.description:<30}"), BarColumn(bar_width=None), TimeRemainingColumn())
    progress = Progress(*columns, console=console, expand=True, transient=True, disable=not console.is_terminal)
    task, begin = progress.add_task(name, total=total, visible=visible), time.monotonic()
    lines = _lines(console)

    def update(**changes: Any) -> None:
        progress.update(task, **changes)
        lines.offer(lambda: _step_line(progress.tasks[0], time.monotonic() - begin))
        if time.monotonic() - begin >= after_seconds:
            progress.start()

    if not after_seconds:
        progress.start()
    try:
        yield update
    finally:
        progress.stop()


def _lines(console: Console) -> PeriodicLines:
    """Return the lines of a console that is no terminal; a terminal has bars instead."""
    return PeriodicLines(lambda text: None if console.is_terminal else note(console, text))


def _step_line(task: Task, seconds: float) -> str:
    """Return how far a loop has come.

    >>> _step_line(Task(0, "replaying", 400, 120, _get_time=time.monotonic), 12.0)  # type: ignore[arg-type]
    'replaying: 120 of 400, 12 s'
    """
    done = f"{task.completed:g} of {task.total:g}, " if task.total else ""
    return f"{task.description}: {done}{duration_text(seconds, trim=True)}"


class RunBars:
    """A bar per run: its rounds, the cluster's time, the loss and the accuracy.

    >>> with RunBars(Console(quiet=True), ["lgc"], rounds=10) as bars:
    ...     bars.show(0, RunProgress(round=3, seconds=0.2, loss=1.5, accuracy=0.4))
    """

    def __init__(self, console: Console, names: Sequence[str], *, rounds: int) -> None:
        width, self._rounds, self._names = max(len(name) for name in names), rounds, names
        self._progress = Progress(
            TextColumn("{task.description:<%d}" % width),  # noqa: UP031 - the braces are rich's
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[clock]:>9}"),
            TextColumn("{task.fields[loss]:<12}{task.fields[accuracy]:>11}"),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self._tasks = [
            self._progress.add_task(name, total=rounds, clock="0.0 s", loss="", accuracy="") for name in names
        ]
        self._lines, self._last = _lines(console), [RunProgress(round=0, seconds=0.0) for _ in names]

    def __enter__(self) -> RunBars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, run: int, progress: RunProgress) -> None:
        """Show how far a run has come."""
        self._last[run] = progress
        self._lines.offer(lambda: race_line(self._names, self._last, self._rounds))
        self._progress.update(
            self._tasks[run],
            completed=min(progress.round, self._rounds),  # windows in flight at the end may make it more
            clock=f"{progress.seconds:.1f} s",
            loss="" if progress.loss is None else f"loss {progress.loss:.4f}",
            accuracy="" if progress.accuracy is None else f"test {progress.accuracy:.1%}",
        )


def race_line(names: Sequence[str], runs: Sequence[RunProgress], rounds: int) -> str:
    """Return how far runs have come, side by side in one line: the round of each, and its loss in brackets.

    >>> race_line(["full", "lgc"], [RunProgress(round=3, seconds=1.0, loss=0.5), RunProgress(round=9, seconds=1.0)], 20)
    'round of 20: full 3 (loss 0.5000), lgc 9'
    """
    line, shown = f"round of {rounds}: ", 0
    for name, run in zip(names, runs, strict=True):
        loss = "" if run.loss is None else f" (loss {run.loss:.4f})"
        lane = f"{name} {min(run.round, rounds)}{loss}"
        rest = f" and {len(names) - shown} more"
        if shown and len(line) + len(lane) + len(rest) > WIDTH:
            return line.removesuffix(", ") + rest
        line, shown = f"{line}{lane}, ", shown + 1
    return line.removesuffix(", ")


@contextmanager
def printed_log(console: Console, *, level: int = logging.INFO) -> Iterator[None]:
    """Print what paceline logs: of server and workers, of ranks, of codecs.

    >>> with printed_log(Console(quiet=True)):
    ...     logging.getLogger("paceline.served").info("worker 3 joined")
    """
    log, handler = logging.getLogger("paceline"), _ConsoleHandler(console)
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        log.propagate = True


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else "dim"
        self._console.print(Text(record.getMessage(), style=style), soft_wrap=True)


class RunView:
    """A real run while it goes on: a bar for the rounds and a line per worker, with the log above them.

    Of a run of ranks one rank shows the run, and the others (`shown=False`) only what they warn of. Figures go
    to `log`.
    """

    def __init__(self, console: Console, *, shown: bool = True, log: Log | None = None) -> None:
        self._figures = StatusLog(log)
        self._console, self._draws = console, shown and console.is_terminal
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._log = printed_log(console, level=logging.INFO if shown else logging.WARNING)
        self._shown, self._pace, self._drawn = shown, Pace(), 0.0
        self._lines = StatusLines(self.note)
        self._last: Group | None = None

    def __enter__(self) -> RunView:
        self._log.__enter__()
        if self._draws:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._draws:
            if self._last is not None:
                self._live.update(self._last, refresh=True)
            self._live.stop()
        self._log.__exit__(kind, error, traceback)

    def note(self, text: str) -> None:
        """Print a line above the view."""
        if self._shown:
            note(self._console, text)

    def show(self, status: RunStatus) -> None:
        """Show where the run stands now."""
        self._figures.show(status)
        now = time.monotonic()
        if not self._draws:
            self._lines.show(status)
            return
        self._last = Group(*run_view(status, self._pace.add(status, now=now)))
        if now - self._drawn >= VIEW_SECONDS:  # ranks call this after every step
            self._drawn = now
            self._live.update(self._last, refresh=True)


@contextmanager
def logging_view(console: Console, log: str, folder: Path, *, shown: bool = True) -> Iterator[RunView]:
    """Show a run, and hand its figures to the log that is named; of a run of ranks, the rank that is shown does."""
    with ExitStack() as stack:
        named = named_log(log, folder) if shown else None
        if isinstance(named, AbstractContextManager):
            stack.enter_context(named)
        yield stack.enter_context(RunView(console, shown=shown, log=named))


def run_view(status: RunStatus, rounds_per_second: float) -> list[Table | Text]:
    """Return the bar of the rounds and the lines of the workers.

    >>> len(run_view(RunStatus(round=1, rounds=9, seconds=1.0, loss=0.5, accuracy=0.8, begun=True, workers=()), 2.0))
    2
    """
    head = Table.grid(padding=(0, 1), expand=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True)
    facts = [f"{status.round}/{status.rounds}", *status_facts(status, rounds_per_second)]
    head.add_row(ProgressBar(total=status.rounds, completed=status.round), "  ".join(facts))
    return [head, _worker_lines(status)]


def _worker_lines(status: RunStatus) -> Table | Text:
    if not status.begun:
        return Text(waiting_text(status), style="cyan")
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column(no_wrap=True)  # what does not fit ends in an ellipsis
    for worker in status.workers[:MOST_WORKERS]:
        counts = f"{worker.used} on time, {worker.late} late, {worker.dropped} dropped"
        counts += f", {worker.refused} refused" if worker.refused else ""
        table.add_row(f"{status.noun} {worker.worker}", _state(worker), counts, _remark(worker))
    if len(status.workers) > MOST_WORKERS:
        gone = sum(not worker.alive for worker in status.workers)
        table.add_row(f"and {len(status.workers) - MOST_WORKERS} more", "", f"{gone} of all are gone", "")
    return table


def _remark(worker: WorkerStatus) -> Text:
    """Return why a worker is gone, or that its work is in vain; the log has said what helps."""
    if not worker.alive:
        return Text(worker.last)
    return Text("mostly dropped", style="bold red") if mostly_dropped([worker.counts]) else Text("")


def _state(worker: WorkerStatus) -> Text:
    word = "gone" if not worker.alive else worker.last if worker.last in _STYLES else "refused"
    return Text(word, style=_STYLES.get(word, "red"))
