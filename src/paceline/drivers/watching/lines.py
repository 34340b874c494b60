"""Records of steps that are over, on their way into a file: a thread writes them, a fifth of a second later.

A training step only leaves what its clock has measured. To make a line of it takes ten times as long, and less where
many are made in a row, with all that it needs in the processor's caches.

    the step's thread  ── keep ──>  waiting  ── flush, DELAY_SECONDS after the first ──>  TimesWriter  ──>  the file

So a process that is killed loses at most the last DELAY_SECONDS, also if it stood still for long before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from paceline.traces.step_clock import MeasuredStep
from paceline.traces.step_times import TimesRecord, TimesWriter

DELAY_SECONDS = 0.2
JOIN_SECONDS = 5.0


class DelayedLines:
    """Hands records to a writer from a thread of its own; `on_flush` is called after each time.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from paceline.traces.step_times import TimesEnded
    >>> file = Path(tempfile.mkdtemp(), "rank-0.jsonl")
    >>> lines = DelayedLines(TimesWriter(file))
    >>> lines.keep(TimesEnded(at_seconds=1.5, reason="the script ended"))
    >>> lines.close()
    >>> file.read_text().count("the script ended")
    1
    """

    def __init__(self, writer: TimesWriter, on_flush: Callable[[], None] = lambda: None) -> None:
        self._writer, self._on_flush = writer, on_flush
        self._waiting: deque[MeasuredStep | TimesRecord] = deque()
        self._lock, self._wake, self._stop = threading.Lock(), threading.Event(), threading.Event()
        self._woken = False
        self._last: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-watch-lines", daemon=True)
        self._thread.start()

    def keep(self, record: MeasuredStep | TimesRecord) -> None:
        """Have a record written soon."""
        self._waiting.append(record)
        if not self._woken:
            self._woken = True
            self._wake.set()

    def flush(self) -> None:
        """Write all that waits, now."""
        with self._lock:
            while self._waiting:
                record = self._waiting.popleft()
                self._writer.write(record.times() if isinstance(record, MeasuredStep) else record)
        self._on_flush()

    def end_with(self, last: Callable[[], None]) -> None:
        """Have the thread call `last`, and end: for whoever must not wait, as in the garbage collector."""
        self._last = last
        self._stop.set()
        self._wake.set()

    def join(self) -> None:
        """End the thread; once more does no harm."""
        self._stop.set()
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def close(self) -> None:
        """End the thread, write what waits, and close the file."""
        self.join()
        self.flush()
        self._writer.close()

    def forget(self) -> None:
        """Write nothing of what waits: in a forked child, which has the file but not the thread."""
        self._waiting.clear()
        self._lock = threading.Lock()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            self._stop.wait(DELAY_SECONDS)
            self._woken = False
            if self._stop.is_set():
                break
            self.flush()
        if self._last is not None:
            self._last()
