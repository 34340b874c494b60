"""Live progress on stderr: a bar for a loop of steps, a bar per simulated run, and the view of a real run.

Without a terminal bars are not drawn, and only lines that stay are printed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.cli.output import note
from paceline.drivers.simulated.progress import Progress as RunProgress

if TYPE_CHECKING:
    from paceline.drivers.served.membership import WorkerStatus
    from paceline.drivers.served.run import RunStatus

MOST_WORKERS = 24
_PACE_SECONDS = 10.0
_STYLES = {"on time": "green", "late": "yellow", "gone": "red", "joined": "cyan"}


@contextmanager
def step_bar(
    console: Console, name: str, *, total: int | None = None, visible: bool = True, after_seconds: float = 0.0
) -> Iterator[Callable[..., None]]:
    """Show one bar, which vanishes at the end, once the work has taken `after_seconds`.

    The function that is yielded changes the bar; it takes what rich's `Progress.update` does: `description`,
    `completed`, `total`, `advance` or `visible`.

    >>> with step_bar(Console(quiet=True), "replaying", total=2) as update:
    ...     update(advance=1)
    """
    columns = (TextColumn("{task.description:<30}"), BarColumn(bar_width=None), TimeRemainingColumn())
    progress = Progress(*columns, console=console, expand=True, transient=True, disable=not console.is_terminal)
    task, begin = progress.add_task(name, total=total, visible=visible), time.monotonic()

    def update(**changes: Any) -> None:
        progress.update(task, **changes)
        if time.monotonic() - begin >= after_seconds:
            progress.start()

    if not after_seconds:
        progress.start()
    try:
        yield update
    finally:
        progress.stop()


class RunBars:
    """A bar per run: its rounds, the cluster's time, the loss and the accuracy.

    >>> with RunBars(Console(quiet=True), ["lgc"], rounds=10) as bars:
    ...     bars.show(0, RunProgress(round=3, seconds=0.2, loss=1.5, accuracy=0.4))
    """

    def __init__(self, console: Console, names: Sequence[str], *, rounds: int) -> None:
        width, self._rounds = max(len(name) for name in names), rounds
        self._progress = Progress(
            TextColumn("{task.description:<%d}" % width),  # noqa: UP031 - the braces are rich's
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[clock]:>9}"),
            TextColumn("{task.fields[loss]:<12}{task.fields[accuracy]:>11}"),
            console=console,
            expand=True,
        )
        self._tasks = [
            self._progress.add_task(name, total=rounds, clock="0.0 s", loss="", accuracy="") for name in names
        ]

    def __enter__(self) -> RunBars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        note(self._progress.console, text)

    def show(self, run: int, progress: RunProgress) -> None:
        """Show how far a run has come."""
        self._progress.update(
            self._tasks[run],
            completed=min(progress.round, self._rounds),  # windows in flight at the end may make it more
            clock=f"{progress.seconds:.1f} s",
            loss="" if progress.loss is None else f"loss {progress.loss:.4f}",
            accuracy="" if progress.accuracy is None else f"test {progress.accuracy:.1%}",
        )


@contextmanager
def printed_log(console: Console) -> Iterator[None]:
    """Print the log lines of server and workers.

    >>> with printed_log(Console(quiet=True)):
    ...     logging.getLogger("paceline.served").info("worker 3 joined")
    """
    log, handler = logging.getLogger("paceline.served"), _ConsoleHandler(console)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = True


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else "dim"
        self._console.print(Text(record.getMessage(), style=style), soft_wrap=True)


class RunView:
    """A real run while it goes on: a bar for the rounds and a line per worker, with the log above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._log = printed_log(console)
        self._seen: deque[tuple[float, int]] = deque()

    def __enter__(self) -> RunView:
        self._log.__enter__()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        self._log.__exit__(kind, error, traceback)

    def note(self, text: str) -> None:
        """Print a line above the view."""
        note(self._console, text)

    def show(self, status: RunStatus) -> None:
        """Show where the run stands now."""
        self._seen.append((time.monotonic(), status.round))
        while self._seen[-1][0] - self._seen[0][0] > _PACE_SECONDS:
            self._seen.popleft()
        if self._console.is_terminal:
            (first, before), (last, now) = self._seen[0], self._seen[-1]
            pace = (now - before) / (last - first) if last > first else 0.0
            self._live.update(Group(*run_view(status, pace)), refresh=True)


def run_view(status: RunStatus, rounds_per_second: float) -> list[Table | Text]:
    """Return the bar of the rounds and the lines of the workers.

    >>> from paceline.drivers.served.run import RunStatus
    >>> len(run_view(RunStatus(round=1, rounds=9, seconds=1.0, loss=0.5, accuracy=0.8, begun=True, workers=()), 2.0))
    2
    """
    head = Table.grid(padding=(0, 1), expand=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True)
    facts = [f"{status.round}/{status.rounds}", f"{status.seconds:.1f} s", f"{rounds_per_second:.1f} rounds/s"]
    if status.loss is not None:
        facts.append(f"loss {status.loss:.4f}")
    if status.accuracy is not None:
        facts.append(f"test {status.accuracy:.1%}")
    head.add_row(ProgressBar(total=status.rounds, completed=status.round), "  ".join(facts))
    return [head, _worker_lines(status)]


def _worker_lines(status: RunStatus) -> Table | Text:
    if not status.begun:
        here = sum(worker.alive for worker in status.workers)
        return Text(f"waiting for workers: {here} here", style="cyan")
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column(no_wrap=True)  # what does not fit ends in an ellipsis
    for worker in status.workers[:MOST_WORKERS]:
        counts = f"{worker.used} on time, {worker.late} late, {worker.dropped} dropped"
        counts += f", {worker.refused} refused" if worker.refused else ""
        table.add_row(f"worker {worker.worker}", _state(worker), counts, "" if worker.alive else worker.last)
    if len(status.workers) > MOST_WORKERS:
        gone = sum(not worker.alive for worker in status.workers)
        table.add_row(f"and {len(status.workers) - MOST_WORKERS} more", "", f"{gone} of all are gone", "")
    return table


def _state(worker: WorkerStatus) -> Text:
    word = "gone" if not worker.alive else worker.last if worker.last in _STYLES else "refused"
    return Text(word, style=_STYLES.get(word, "red"))
