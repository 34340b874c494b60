"""The one supervisor of processes that are forked on this machine: ranks, workers.

    parent ── imports torch once, then forks ──┬── child 0
                                               └── child 1 ...

Importing torch takes a second or two of processor time, and forking takes milliseconds. A child runs one function and
exits with the code that it returns, or 1 after an exception: it never returns into the parent's code. On Linux children
are killed when the thread that forked them ends.

Forking beside other threads is not safe: a child has only the thread that forked, and a lock that another one held
stays locked in it for ever (Python 3.12 and later warn of it). So fork before threads exist: load torch, but compute
nothing and connect to nothing. Importing torch, numpy and scipy is no harm: their BLAS starts a pool of threads when it
is loaded, and ends it by itself at every fork (pthread_atfork), so that the process is down to one thread, and Python
has nothing to warn of. The pool of OpenMP, which the first large product starts, does not: whoever has computed forks
with threads, and its children compute in a thread of their own, if at all (`LocalRanks` does so).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")

POLL_SECONDS = 0.05
END_SECONDS = 3.0
MOST_PROCESSES = 1_024  # on one machine
_ENDING = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1


def check_processes(number: int) -> None:
    """Refuse more processes than one machine is for.

    >>> check_processes(1_000_000)
    Traceback (most recent call last):
    ValueError: 1,000,000 processes are too many for one machine (at most 1,024); use several, or `paceline simulate`
    """
    if number > MOST_PROCESSES:
        limit = f"(at most {MOST_PROCESSES:,}); use several, or `paceline simulate`"
        raise ValueError(f"{number:,} processes are too many for one machine {limit}")


def seen_from() -> str:
    """Return what processes share that see each other's locks: this machine's boot, and the PID namespace.

    It is empty where that is not known: elsewhere than on Linux.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


class Processes:
    """Children of this process, numbered in the order in which they are forked.

    `codes` has the exit code of each, negative for a signal, and None while it runs.

    >>> children = Processes()
    >>> children.fork(lambda: 3)
    >>> children.wait()
    [3]
    """

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.codes: list[int | None] = []

    def fork(self, run: Callable[[], int], *, log: Path | None = None) -> None:
        """Fork a child that runs a function and exits with what it returns.

        With `log` all that it writes goes to that file, and it has nothing to read.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # inherited: the kernel would keep no exit codes for us
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        parent = os.getpid()
        # Block signals: the child must not run the parent's handlers, and the parent's must find the child in `pids`.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            pid = os.fork()
            if not pid:
                _run_child(run, parent, before, log)
            self.pids.append(pid)
            self.codes.append(None)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def running(self) -> list[int]:
        """Return the numbers of the children that have not ended."""
        for number, pid in enumerate(self.pids):
            if self.codes[number] is None:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[number] = os.waitstatus_to_exitcode(status)
        return [number for number, code in enumerate(self.codes) if code is None]

    def wait(
        self,
        seconds: float = float("inf"),
        *,
        until_failure: bool = False,
        pause: Callable[[float], object] = time.sleep,
    ) -> list[int | None]:
        """Wait until all have ended, but no longer than so many seconds, or than until one fails; return `codes`.

        Between two looks at them `pause` is called with the seconds that it may take.
        """
        deadline = time.monotonic() + seconds
        while self.running() and not (until_failure and any(self.codes)) and time.monotonic() < deadline:
            pause(POLL_SECONDS)
        return self.codes

    def send_signal(self, number: int) -> None:
        """Send a signal to all that have not ended; a signal handler may call it, for it waits for none."""
        for pid, code in zip(self.pids, self.codes, strict=True):
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def end(self) -> None:
        """End those that have not ended: by SIGTERM, and if that is not heard, by SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.send_signal(number)
            self.wait(END_SECONDS)


def _run_child(run: Callable[[], int], parent: int, signals: set[Any], log: Path | None) -> NoReturn:
    code = 1
    try:
        end_with_parent(signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl was called
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        if log is not None:
            with log.open("wb") as output, open(os.devnull, "rb") as nothing:
                for number, file in enumerate((nothing, output, output)):
                    os.dup2(file.fileno(), number)
        code = run()
    except BaseException:
        with contextlib.suppress(Exception):
            traceback.print_exc()
    finally:
        try:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # a broken pipe, or closed already: there is nobody to tell
                    stream.flush()
        finally:
            os._exit(code)


def in_new_thread(call: Callable[[], Result]) -> Result:
    """Call a function in a thread of its own, and return what it does.

    For a forked child: its parent may have computed, and then OpenMP's pool of threads belongs to the thread that
    forked, and was not inherited. A new thread begins a new one.

    >>> in_new_thread(lambda: 3)
    3
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="paceline-forked", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel to send this process a signal when the thread that forked it is gone (Linux; else do nothing)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
