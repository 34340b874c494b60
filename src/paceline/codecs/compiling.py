"""Kernels that numba compiles: in machine code, without Python's lock, kept on disk for the next process.

The first call in a process loads a kernel (a moment) or compiles it (seconds, once a machine). Compiling says so:
nobody should wonder why the first step is slow.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba

log = logging.getLogger("paceline.codecs")

TOLD_AFTER_SECONDS = 0.5

P = ParamSpec("P")
R = TypeVar("R")

_told = threading.Event()


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """A function of arrays and numbers as machine code. Division by zero gives inf, as it does in numpy.

    >>> @kernel
    ... def double(number):
    ...     return 2 * number
    >>> double(21)
    42
    """
    try:
        compiled = numba.njit(function, nogil=True, error_model="numpy", cache=True)
    except RuntimeError:  # nowhere to keep it: what is typed in, a file system that is read only
        compiled = numba.njit(function, nogil=True, error_model="numpy")
    return cast(Callable[P, R], compiled)


def call(compiled: Callable[..., Any], *arguments: Any) -> Any:
    """Call a kernel, and say so if this call must compile it first.

    >>> call(kernel(lambda number: number + 1), 1)
    2
    """
    if getattr(compiled, "signatures", True):
        return compiled(*arguments)
    timer = threading.Timer(TOLD_AFTER_SECONDS, _tell, [compiled])
    timer.daemon = True
    timer.start()
    try:
        return compiled(*arguments)
    finally:
        timer.cancel()


def _tell(compiled: Any) -> None:
    compiles = compiled.stats.cache_misses and not compiled.signatures  # else it loads, or runs
    if compiles and not _told.is_set():
        _told.set()
        log.warning("paceline compiles its codecs for this machine: some seconds, once")
