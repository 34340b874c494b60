"""Work split over threads: as many as torch uses. What is computed does not depend on how many there are."""

from __future__ import annotations

import functools
import itertools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

LEAST_ELEMENTS = 65_536  # a thread is not worth waking for less
# After an operation torch's own threads spin for some milliseconds, in case there is more to do, and ours get half a
# core. Whoever gets on takes more parts: with one part each all would wait for the slowest.
PARTS_EACH = 8


def in_threads(
    compiled: Callable[..., Any], units: int, unit_elements: int, *arguments: Any, most: int | None = None
) -> list[Any]:
    """Call a kernel as kernel(first, last, *arguments) for parts that make up units 0 .. `units`; what each returned.

    >>> in_threads(lambda first, last: last - first, 10, 512)
    [10]
    """
    from paceline.codecs.compiling import call  # numba is not for everybody who imports a codec

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

    helpers = [_pool(threads).submit(work) for _ in range(min(threads, parts) - 1)]
    try:
        work()  # this thread works too
    finally:
        for helper in helpers:
            if not helper.cancel():  # else it never got a turn, and there is nothing left for it
                helper.result()
    return found


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="paceline-codec")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork: a child makes its own
