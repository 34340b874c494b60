"""A real run while it goes on: a bar for the rounds, a lane per worker, and what happens above them. On stderr."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from paceline.drivers.served.membership import WorkerStatus
    from paceline.drivers.served.run import RunStatus

MOST_LANES = 24
_PACE_SECONDS = 10.0
_STYLES = {"on time": "green", "late": "yellow", "gone": "red", "joined": "cyan"}


@contextmanager
def told(console: Console) -> Iterator[None]:
    """What server and workers log is printed, a line each.

    >>> with told(Console(quiet=True)):
    ...     logging.getLogger("paceline.served").info("worker 3 joined")
    """
    log, handler = logging.getLogger("paceline.served"), _AboveHandler(console)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = True


class LiveRun:
    """Shows where a real run stands; what the server logs is printed above."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._told = told(console)
        self._seen: deque[tuple[float, int]] = deque()

    def __enter__(self) -> LiveRun:
        self._told.__enter__()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        self._told.__exit__(kind, error, traceback)

    def note(self, text: str) -> None:
        """A line above the view."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def show(self, standing: RunStatus) -> None:
        """The run stands here now."""
        self._seen.append((time.monotonic(), standing.round))
        while self._seen[-1][0] - self._seen[0][0] > _PACE_SECONDS:
            self._seen.popleft()
        if self._console.is_terminal:
            self._live.update(Group(*view(standing, self._rounds_per_second())), refresh=True)

    def _rounds_per_second(self) -> float:
        (first, before), (last, now) = self._seen[0], self._seen[-1]
        return (now - before) / (last - first) if last > first else 0.0


def view(standing: RunStatus, rounds_per_second: float) -> list[Table | Text]:
    """The bar and the lanes.

    >>> from paceline.drivers.served.run import RunStatus
    >>> len(view(RunStatus(round=1, rounds=9, seconds=1.0, loss=0.5, accuracy=0.8, begun=True, workers=()), 2.0))
    2
    """
    head = Table.grid(padding=(0, 1), expand=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True)
    facts = [f"{standing.round}/{standing.rounds}", f"{standing.seconds:.1f} s", f"{rounds_per_second:.1f} rounds/s"]
    if standing.loss is not None:
        facts.append(f"loss {standing.loss:.4f}")
    if standing.accuracy is not None:
        facts.append(f"test {standing.accuracy:.1%}")
    head.add_row(ProgressBar(total=standing.rounds, completed=standing.round), "  ".join(facts))
    return [head, _lanes(standing)]


def _lanes(standing: RunStatus) -> Table | Text:
    if not standing.begun:
        here = sum(worker.alive for worker in standing.workers)
        return Text(f"waiting for workers: {here} here", style="cyan")
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for worker in standing.workers[:MOST_LANES]:
        counts = f"{worker.used} on time, {worker.late} late, {worker.dropped} dropped"
        counts += f", {worker.refused} refused" if worker.refused else ""
        table.add_row(f"worker {worker.worker}", _state(worker), counts, "" if worker.alive else worker.last)
    if len(standing.workers) > MOST_LANES:
        gone = sum(not worker.alive for worker in standing.workers)
        table.add_row(f"and {len(standing.workers) - MOST_LANES} more", "", f"{gone} of all are gone", "")
    return table


def _state(worker: WorkerStatus) -> Text:
    word = "gone" if not worker.alive else worker.last if worker.last in _STYLES else "refused"
    return Text(word, style=_STYLES.get(word, "red"))


class _AboveHandler(logging.Handler):
    """Log lines above the live view."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else "dim"
        self._console.print(Text(record.getMessage(), style=style), soft_wrap=True)
