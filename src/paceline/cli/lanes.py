"""Live progress with a lane per run, on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from paceline.drivers.simulated.progress import Progress as Standing


class Lanes:
    """A bar per run: its rounds, the cluster's time, the loss and the accuracy.

    >>> with Lanes(Console(quiet=True), ["lgc"], rounds=10) as lanes:
    ...     lanes.show(0, Standing(round=3, seconds=0.2, loss=1.5, accuracy=0.4))
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
        self._tasks: list[TaskID] = [
            self._progress.add_task(name, total=rounds, clock="0.0 s", loss="", accuracy="") for name in names
        ]

    def __enter__(self) -> Lanes:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """Say something above the bars."""
        self._progress.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def show(self, lane: int, standing: Standing) -> None:
        """A run has come this far."""
        loss = "" if standing.loss is None else f"loss {standing.loss:.4f}"
        accuracy = "" if standing.accuracy is None else f"test {standing.accuracy:.1%}"
        self._progress.update(
            self._tasks[lane],
            completed=min(standing.round, self._rounds),  # windows in flight at the end may make it more
            clock=f"{standing.seconds:.1f} s",
            loss=loss,
            accuracy=accuracy,
        )
