"""The time that a part of ours takes inside another program's: every way into it is wrapped."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any


class InsideTime:
    """It adds up the time of threads inside wrapped functions, by the clock and of the processor.

    A wrapped function that another calls counts once.

    >>> inside = InsideTime()
    >>> step = inside.wrapped(lambda: time.sleep(0.01))
    >>> inside.wrapped(step)()
    >>> inside.calls, 0.01 <= inside.seconds, inside.processor_seconds < inside.seconds
    (1, True, True)
    """

    def __init__(self) -> None:
        self._lock, self._local = threading.Lock(), threading.local()
        self.clear()

    def clear(self) -> None:
        """Count from nothing again."""
        self.seconds, self.processor_seconds, self.left_out_seconds, self.calls = 0.0, 0.0, 0.0, 0

    def wrap(self, owner: type, *names: str) -> None:
        """Wrap functions of a class."""
        for name in names:
            own = inspect.getattr_static(owner, name)
            made = self.wrapped(getattr(owner, name))
            setattr(owner, name, staticmethod(made) if isinstance(own, staticmethod) else made)

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and is timed."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._local, "inside", False):
                return call(*args, **kwargs)
            self._local.inside = True
            began, processor = time.perf_counter_ns(), time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                processor_seconds = (time.thread_time_ns() - processor) / 1e9
                seconds = (time.perf_counter_ns() - began) / 1e9
                self._local.inside = False
                with self._lock:
                    self.seconds += seconds
                    self.processor_seconds += processor_seconds
                    self.calls += 1

        return timed

    def left_out(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same; its processor time counts as `left_out_seconds` instead."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                took = (time.thread_time_ns() - began) / 1e9
                with self._lock:
                    self.left_out_seconds += took
                    if getattr(self._local, "inside", False):
                        self.processor_seconds -= took

        return timed


def around_nothing(calls: int) -> InsideTime:
    """Return what the wrapper itself counts, called so often around nothing: it is in every figure, and taken off."""
    empty = InsideTime()
    nothing = empty.wrapped(lambda: None)
    for _ in range(calls):
        nothing()
    return empty
