"""Seconds of work, measured so that other work on the same machine does not count.

    wall time    |##########........####..########|       # the thread runs   . it could run, but others do
    others                   ^^^^^^^^    ^^
    seconds      |######################|                 what `stop` returns: the wall time without the others' part

A thread that computes on a busy machine loses time while it is runnable and another one has its core. Linux counts that
time for each thread (the second number of /proc/thread-self/schedstat); the rest of the wall time is the thread's own.
It includes time that the thread sleeps or waits for other threads, so layers that wait on purpose, and kernels that
run on a pool of threads while their caller waits, are measured as on an idle machine.

Which clock is read, by what the machine has:

    clock        seconds are                        where
    scheduler    wall time - time others had it     Linux
    processor    processor time of the thread       elsewhere, for work that its own thread does
    wall         wall time                          elsewhere, for work that may wait; and where a device computes
                                                    (`synchronise` waits for it at both ends)

With several intra-op threads the calling thread computes one share of every operator, and waits for the others at its
end. Its seconds are never less than its own share takes. A share that another thread was kept from may lengthen them.
Memory bandwidth, caches and a hyperthread's sibling are shared with others too, and no clock shows it: so repeat the
work, and take the least of its times. `TimedTurns` keeps them, and says how far the usual is above the least.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

ClockName: TypeAlias = Literal["scheduler", "processor", "wall"]
SCHEDSTAT = "/proc/thread-self/schedstat"
NANO = 1e-9
UNDISTURBED_SECONDS = 50e-6  # reading the clocks takes less, unless the thread lost its core meanwhile
MOST_READINGS = 20
FINE_SECONDS = 1e-5  # a coarser clock cannot time a layer
STILL_FALLING = 0.01
PATIENCE = 3


class Stopwatch:
    """Measures work of the thread that made it, one stretch after the other.

    `waits` says that the work may wait for other threads, so that its processor time is not all of it. With
    `wall_clock` the time of others counts as well.

    >>> watch = Stopwatch()
    >>> watch.start()
    >>> sum(range(1000))
    499500
    >>> 0 < watch.stop() < 10
    True
    """

    def __init__(
        self, *, waits: bool = False, wall_clock: bool = False, synchronise: Callable[[], None] | None = None
    ) -> None:
        self._synchronise = synchronise
        wall_clock = wall_clock or synchronise is not None
        self._file = -1 if wall_clock else _open_schedstat()
        self._thread = threading.get_ident()
        self.clock: ClockName
        if self._file >= 0:
            self.clock = "scheduler"
        else:
            self.clock = "wall" if wall_clock or waits or not _has_thread_clock() else "processor"
        self._wall = self._processor = self._kept_out = 0.0

    def start(self) -> None:
        """Begin to measure."""
        if self._synchronise is not None:
            self._synchronise()
        if self.clock == "scheduler":
            self._check_thread()
            for _ in range(MOST_READINGS):
                before = time.perf_counter()
                self._kept_out, self._processor = self._read_kept_out(), time.thread_time()
                self._wall = time.perf_counter()
                if self._wall - before < UNDISTURBED_SECONDS:
                    break
            return
        if self.clock == "processor":
            self._processor = time.thread_time()
        self._wall = time.perf_counter()

    def stop(self) -> float:
        """Return the seconds since `start`, without those that others had this thread's core."""
        if self._synchronise is not None:
            self._synchronise()
        now = time.perf_counter()
        wall = now - self._wall
        if self.clock == "wall":
            return wall
        processor = time.thread_time() - self._processor
        if self.clock == "processor":
            return processor
        kept_out = self._read_kept_out() - self._kept_out
        reading = time.perf_counter() - now
        if reading > UNDISTURBED_SECONDS:  # the core may have been lost after `now`: that is not part of the wall time
            kept_out -= reading
        # Never less than was computed, whatever the moment at which the two clocks were read.
        return min(wall, max(wall - max(kept_out, 0.0), processor))

    def _read_kept_out(self) -> float:
        return NANO * int(os.pread(self._file, 64, 0).split()[1])

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("a stopwatch measures the thread that made it: make one in each thread that measures")

    def close(self) -> None:
        """Close the file that the scheduler's figures are read from; once more does no harm."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)
            self.clock = "wall"

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self.close()


def _open_schedstat() -> int:
    """Return the open file of this thread's scheduler figures; -1 where there is none, or it does not count."""
    try:
        file = os.open(SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        _, _, slices = (int(part) for part in os.pread(file, 64, 0).split())
        if slices > 0:  # a kernel without these figures says 0 0 0
            return file
    except (OSError, ValueError):
        pass
    os.close(file)
    return -1


def _has_thread_clock() -> bool:
    try:
        return time.get_clock_info("thread_time").resolution <= FINE_SECONDS
    except ValueError:
        return False


@dataclass(kw_only=True)
class TimedTurns:
    """The seconds of one piece of work, turn by turn. The least counts: nothing makes work faster than it is.

    `spread` is how far the median is above the least, as a share of the least.

    >>> turns = TimedTurns(turns=[1.3, 1.0, 1.1])
    >>> turns.least, round(turns.spread, 6), TimedTurns(turns=[0.0]).spread
    (1.0, 0.1, 0.0)
    """

    turns: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        self.turns.append(seconds)

    @property
    def least(self) -> float:
        return min(self.turns)

    @property
    def median(self) -> float:
        return statistics.median(self.turns)

    @property
    def spread(self) -> float:
        return spread_of(self.median, self.least)


def spread_of(median: float, least: float) -> float:
    """Return how far a median is above the least, as a share of the least; 0 where the least is.

    >>> round(spread_of(1.2, 1.0), 6), spread_of(0.0, 0.0)
    (0.2, 0.0)
    """
    return max(median / least - 1.0, 0.0) if least > 0 else 0.0


def settled(leasts: Sequence[float], *, patience: int = PATIENCE, share: float = STILL_FALLING) -> bool:
    """Return whether the least has stopped falling: by no more than `share` in the last `patience` rounds.

    `leasts` is the least of all rounds so far, after each round.

    >>> settled([3.0, 2.0, 1.5, 1.5]), settled([3.0, 1.5, 1.5, 1.5, 1.495]), settled([1.0])
    (False, True, False)
    """
    return len(leasts) > patience and leasts[-1 - patience] - leasts[-1] <= share * leasts[-1]
