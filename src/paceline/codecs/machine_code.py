"""Kernels in machine code: numba compiles them, and they run in as many threads as torch uses.

The first call in a process loads a kernel (a moment) or compiles it (seconds, once a machine; it is kept on disk).
Compiling is logged: nobody should wonder why the first step is slow. Of the ranks and workers of one machine, which all
compile at the same moment, the first says so for all. A kernel releases Python's lock. Its result does
not depend on the number of threads.

Whose threads: after an operation of torch its OpenMP threads spin for some milliseconds, in case there is more to do,
and threads beside them get half a core. So kernels run on torch's own threads, as one more parallel region of theirs.
A region ends when every thread of the team has had its turn, though, which on a crowded machine is long after all the
work is done. Then, and wherever torch has no OpenMP, a pool of our own does better: whoever gets no turn is not needed.

Numba's own threads are not used: its layer ends the process when two threads use it at once.

    torch, then a kernel    main  [torch][kernel parts]               main  [torch][kernel parts      ]
                            team  [torch][kernel parts]spin           team  [torch]spin spin spin
                                                                      pool         [part ][part ][part]
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar, cast

import torch

log = logging.getLogger("paceline.codecs")

ANNOUNCED_AFTER_SECONDS = 0.5
LEAST_ELEMENTS = 65_536  # a thread is not worth waking for less
PARTS_EACH = 8  # whoever gets on takes more parts: with one part each all would wait for the slowest
LATE_SECONDS = 0.001  # a thread of the team that begins later than this had no core
CALLS_WITHOUT_TEAM = 32  # after one that was late

P = ParamSpec("P")
R = TypeVar("R")

_announced = threading.Event()


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function of arrays and numbers. Division by zero gives inf, as it does in numpy.

    >>> @kernel
    ... def double(number):
    ...     return 2 * number
    >>> double(21)
    42
    """
    import numba  # not for everybody who imports a codec

    try:
        compiled = numba.njit(function, nogil=True, error_model="numpy", cache=True)
    except RuntimeError:  # nowhere to keep it: what is typed in, a file system that is read only
        compiled = numba.njit(function, nogil=True, error_model="numpy")
    return cast(Callable[P, R], compiled)


def call(compiled: Callable[..., Any], *arguments: Any) -> Any:
    """Call a kernel, and log it if this call must compile the kernel first.

    >>> call(kernel(lambda number: number + 1), 1)
    2
    """
    if getattr(compiled, "signatures", True):
        return compiled(*arguments)
    timer = threading.Timer(ANNOUNCED_AFTER_SECONDS, _announce, [compiled])
    timer.daemon = True
    timer.start()
    try:
        return compiled(*arguments)
    finally:
        timer.cancel()


def _announce(compiled: Any) -> None:
    compiles = compiled.stats.cache_misses and not compiled.signatures  # else it loads, or runs
    if compiles and not _announced.is_set():
        _announced.set()
        if _is_first_to_compile(compiled.stats.cache_path):
            log.warning("paceline compiles its kernels for this machine: some seconds, once")


def _is_first_to_compile(cache_path: str | None) -> bool:
    """Whether no other process compiles into this folder now: the folder is locked while this process lives."""
    if cache_path is None:  # nothing is kept, so each process compiles for itself
        return True
    try:
        os.makedirs(cache_path, exist_ok=True)
        fcntl.flock(os.open(cache_path, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def in_threads(
    compiled: Callable[..., Any], units: int, unit_elements: int, *arguments: Any, most: int | None = None
) -> list[Any]:
    """Call kernel(first, last, *arguments) for parts that make up units 0 .. `units`; return what each call returned.

    >>> in_threads(lambda first, last: last - first, 10, 512)
    [10]
    """
    threads = most or torch.get_num_threads()
    parts = min(PARTS_EACH * threads if threads > 1 else 1, max(1, units * unit_elements // LEAST_ELEMENTS))
    edges = [units * part // parts for part in range(parts + 1)]
    left = deque(enumerate(itertools.pairwise(edges)))
    found: list[Any] = [None] * parts

    def work() -> None:
        while left:
            try:
                number, part = left.popleft()
            except IndexError:  # another thread was quicker
                return
            found[number] = call(compiled, *part, *arguments)

    if parts == 1:
        work()
    elif not (getattr(compiled, "signatures", True) and _team.run(work, threads)):  # to compile wants a large stack
        _run_in_pool(work, threads, min(threads, parts) - 1)
    return found


def _run_in_pool(work: Callable[[], None], threads: int, helpers: int) -> None:
    futures = [_pool(threads).submit(work) for _ in range(helpers)]
    try:
        work()  # this thread works too
    finally:
        for future in futures:
            if not future.cancel():  # else it never got a turn, and there is nothing left for it
                future.result()


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="paceline-codec")


_REGION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Team:
    """The OpenMP threads that torch's operations run on, while they are there at once."""

    def __init__(self) -> None:
        self._calls_without = 0
        self._forked_thread: int | None = None  # has a team by OpenMP's account, of threads that did not come along

    def run(self, work: Callable[[], None], threads: int) -> bool:
        """Call `work` on each of so many threads, this one among them; return False if the team is not to be used."""
        if self._calls_without > 0:
            self._calls_without -= 1
            return False
        parallel = _parallel_region()
        if parallel is None or threading.get_ident() == self._forked_thread:
            return False
        begun: list[float] = []
        errors: list[BaseException] = []

        def turn(_: int | None) -> None:
            try:
                begun.append(time.perf_counter())
                work()
            except BaseException as error:  # C would ignore it
                errors.append(error)

        started = time.perf_counter()
        parallel(_REGION(turn), None, threads, 0)
        if errors:
            raise errors[0]
        if max(begun, default=started) - started > LATE_SECONDS:
            self._calls_without = CALLS_WITHOUT_TEAM
        work()  # nothing is left to do, unless an interrupt has come before a turn began
        return True

    def forked(self) -> None:
        """Take note, in a child, of the thread that forked."""
        self._forked_thread = threading.get_ident()


@functools.cache
def _parallel_region() -> Callable[..., None] | None:
    """Return `GOMP_parallel` of the OpenMP library that torch itself runs on; None if it runs on another kind."""
    try:
        parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = [_REGION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return cast(Callable[..., None], parallel)


_team = _Team()

# Threads do not survive a fork: a child makes its own.
os.register_at_fork(after_in_child=_pool.cache_clear)
os.register_at_fork(after_in_child=_team.forked)
