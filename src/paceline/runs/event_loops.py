"""A coroutine run to its end wherever a script calls it: also in a notebook, whose thread runs an event loop already.

    no loop runs in this thread    asyncio.run here; the run itself hears of signals
    one does                       asyncio.run in a thread of its own; this one waits, and passes signals on

The first SIGINT or SIGTERM ends the run with a checkpoint. A second SIGINT waits for nothing: it is raised here, and
the run is cancelled where it is.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
StopReason = Callable[[], str | None]

LOOK_SECONDS = 0.5


def run_to_end(work: Callable[[StopReason], Coroutine[Any, Any, Result]]) -> Result:
    """Run the coroutine of `work`, which is given a function that says why the run must stop, if it must.

    >>> async def two(reason):
    ...     return 2
    >>> async def cell():
    ...     return run_to_end(two)
    >>> asyncio.run(cell())
    2
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work(lambda: None))
    return _InThread(work).result()


class _InThread(Generic[Result]):
    """A coroutine in a thread of its own, and the thread that waits for it."""

    def __init__(self, work: Callable[[StopReason], Coroutine[Any, Any, Result]]) -> None:
        self._work, self._stop = work, ""
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._run,), name="paceline-run", daemon=True
        )

    def result(self) -> Result:
        """Return what the coroutine returns, or raise what it raises."""
        with self._hearing_signals():
            try:
                self._thread.start()
                while not self._ended.wait(LOOK_SECONDS):  # a join that is interrupted would take the thread for ended
                    pass
            except BaseException:  # a second Ctrl-C
                self._cancel()
                raise
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        async def main() -> Result:
            task = asyncio.current_task()
            assert task is not None
            self._running = asyncio.get_running_loop(), task
            return await self._work(lambda: self._stop or None)

        try:
            self._results.append(asyncio.run(main()))
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def _cancel(self) -> None:
        if self._running is not None:
            loop, task = self._running
            with suppress(RuntimeError):  # it has ended just now
                loop.call_soon_threadsafe(task.cancel)

    @contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM as reasons to stop: an event loop that runs here would keep them for itself."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def hear(number: int, frame: object) -> None:
            if self._stop and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._stop = self._stop or f"stopped by {signal.Signals(number).name}"

        before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
