"""Work split over threads: as many as torch uses. What is computed does not depend on how many there are."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

LEAST_ELEMENTS = 65_536  # a thread is not worth waking for less


def in_threads(
    compiled: Callable[..., Any], units: int, unit_elements: int, *arguments: Any, most: int | None = None
) -> list[Any]:
    """Call a kernel as kernel(first, last, *arguments) for parts that make up units 0 .. `units`; what each returned.

    >>> in_threads(lambda first, last: last - first, 10, 512)
    [10]
    """
    from paceline.codecs.compiling import call  # numba is not for everybody who imports a codec

    parts = min(most or torch.get_num_threads(), max(1, units * unit_elements // LEAST_ELEMENTS))
    edges = [units * part // parts for part in range(parts + 1)]
    waiting = [_pool(parts).submit(call, compiled, *edges[part : part + 2], *arguments) for part in range(parts - 1)]
    last = call(compiled, *edges[-2:], *arguments)  # this thread works too
    return [future.result() for future in waiting] + [last]


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="paceline-codec")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork: a child makes its own
