"""Workers of one machine, forked: from a process that has loaded torch and nothing else, or from a user's script.

`paceline train`      python -m paceline.runs.local_workers ──┬── worker 0       code is named, and imported there
                                                              └── worker 1 ...
paceline.train(...)   the script ── forks ── a parent of workers ──┬── worker 0  objects are inherited
with objects                                                       └── worker 1 ...

A script's data and model reach its workers by the fork, and nothing is pickled. A forked worker computes in a new
thread: the pool of OpenMP's threads belongs to the thread that began it (`paceline.processes`).
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO

from paceline.errors import in_a_line, is_plain
from paceline.processes import Processes, end_with_parent, in_new_thread

MOST_REASON_BYTES = 500  # of a line


class Reasons:
    """A pipe in which workers say why they end: the first that fails says what went wrong.

    >>> reasons = Reasons()
    >>> tell_reason(reasons.writing, "worker 3: there is no my_models")
    >>> reasons.close_writing()
    >>> reasons.first
    'worker 3: there is no my_models'
    >>> reasons.close()
    """

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        for file in (self._reading, self.writing):
            os.set_blocking(file, False)
        self._said = b""

    @property
    def first(self) -> str:
        """The first reason that was given; "" if there is none."""
        with suppress(OSError):
            self._said = self._said or os.read(self._reading, 2 * MOST_REASON_BYTES)
        return self._said.partition(b"\n")[0].decode(errors="replace")

    def close_writing(self) -> None:
        """Close this process's end for writing, once the workers have theirs."""
        os.close(self.writing)

    def close(self) -> None:
        """Close the end for reading."""
        os.close(self._reading)


def tell_reason(file: int, reason: str) -> None:
    """Write a line into the pipe of reasons; where the pipe is full, the first ones are there."""
    line = " ".join(reason.split()).encode(errors="replace")[: MOST_REASON_BYTES - 1] + b"\n"
    with suppress(OSError):
        os.write(file, line)


class ForkedWorkers:
    """Workers that hold a script's objects, behind the face of a `subprocess.Popen`; they wait for a line on `stdin`.

    `work` is called in each with the line, which is the server's address, and the number of the worker. `reasons` is
    the open file in which they say why one failed.
    """

    def __init__(self, numbers: Sequence[int], work: Callable[[str, int], None], *, reasons: int) -> None:
        reading, writing = os.pipe()
        self._parent = Processes()
        self._parent.fork(functools.partial(_wait_and_work, reading, writing, numbers, work, reasons))
        os.close(reading)
        self.stdin: IO[bytes] = os.fdopen(writing, "wb")

    def poll(self) -> int | None:
        """Return the exit code, or None while workers run."""
        self._parent.running()
        return self._parent.codes[0]

    def wait(self, timeout: float) -> int:
        """Wait for the end, for so many seconds at most."""
        code = self._parent.wait(timeout)[0]
        if code is None:
            raise subprocess.TimeoutExpired("workers", timeout)
        return code

    def terminate(self) -> None:
        """Ask the workers to end."""
        self._parent.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the workers."""
        self._parent.send_signal(signal.SIGKILL)


def _wait_and_work(
    reading: int, writing: int, numbers: Sequence[int], work: Callable[[str, int], None], reasons: int
) -> int:
    os.close(writing)
    os.setsid()  # a Ctrl-C in the terminal is for the server, which then says what happens to its workers
    logging.getLogger("paceline.served").setLevel(logging.ERROR)  # the server is in the same terminal, and tells it
    with os.fdopen(reading, "r") as line:
        address = line.readline().strip()
    if not address:
        return 0  # the server has gone
    failed = run_workers(numbers, lambda number: in_new_thread(lambda: work(address, number)), reasons=reasons)
    return 1 if failed else 0


def run_workers(numbers: Sequence[int], work: Callable[[int], None], *, reasons: int | None = None) -> int:
    """Fork a worker for each number, wait for all, and return how many failed; each says why, in `reasons` too.

    No thread exists before the fork: a connection starts its own.
    """
    end_with_parent()
    workers = Processes()
    for number in numbers:
        workers.fork(functools.partial(_run_worker, number, work, reasons))
    signal.signal(signal.SIGTERM, lambda signum, frame: workers.send_signal(signum))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to every worker itself
    codes = workers.wait()
    for number, code in zip(numbers, codes, strict=True):
        if code and code < 0 and reasons is not None:
            tell_reason(reasons, f"worker {number} was ended by {signal.Signals(-code).name}")
    return sum(map(bool, codes))


def _run_worker(number: int, work: Callable[[int], None], reasons: int | None) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server says when it is over
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        from paceline.drivers.served.transport import tune_worker_process

        tune_worker_process()
        work(number)
        return 0
    except (Exception, SystemExit) as error:  # a model or a data set that ends the process has not done its work
        if not is_plain(error):
            traceback.print_exc()
        reason = f"worker {number}: {in_a_line(error)}"
        if reasons is not None:
            tell_reason(reasons, reason)
        print(f"paceline: {reason}", file=sys.stderr)
        return 1
