"""A clock that splits a step into phases, for whoever takes the steps: a script's hooks, a recipe's loop.

    clock.enter("forward")    what came before was another phase; from now on it is this one
    clock.enter("backward")
    clock.bucket_ready(0)     its gradients are there          bucket_done(0) may come from another thread
    clock.enter("wait")
    clock.end_step()          -> one StepTimes; the next step begins, in "input"

Time in "other" is in no phase. A phase may be entered many times in a step (accumulated gradients): its times add up.

A part of the library that waits for other ranks inside a script's step finds the script's clock by its model, with
`clock_of(model)`, and enters "wait" while it waits; where nobody watches, there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

from paceline.traces.step_times import StepTimes

Phase: TypeAlias = Literal["input", "forward", "backward", "wait", "optimiser", "other"]
PHASES: tuple[Phase, ...] = ("input", "forward", "backward", "wait", "optimiser")
_CLOCKS: WeakKeyDictionary[Any, StepClock] = WeakKeyDictionary()
_NOBODY: AbstractContextManager[None] = nullcontext()


class StepClock:
    """Measures one step after the other, and hands each to `write`.

    >>> seen = []
    >>> clock = StepClock(seen.append, clock=iter([0.0, 1.0, 3.0, 6.0]).__next__, processor=lambda: 0.0)
    >>> clock.enter("forward")
    >>> clock.enter("backward")
    >>> clock.end_step()
    >>> seen[0].input_seconds, seen[0].forward_seconds, seen[0].backward_seconds, seen[0].seconds
    (1.0, 2.0, 3.0, 6.0)
    """

    def __init__(
        self,
        write: Callable[[StepTimes], None],
        *,
        first_step: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        processor: Callable[[], float] = time.process_time,
    ) -> None:
        self.step = first_step
        self.phase: Phase = "input"
        self._write, self._clock, self._processor = write, clock, processor
        self._zero = self._started = self._entered = clock()
        self._processor_started = processor()
        self._seconds: dict[Phase, float] = dict.fromkeys((*PHASES, "other"), 0.0)
        self._ready: dict[int, float] = {}
        self._done: dict[int, float] = {}

    @property
    def now(self) -> float:
        """The seconds since the clock began."""
        return self._clock() - self._zero

    def enter(self, phase: Phase) -> None:
        """Begin a phase; what is being measured ends."""
        now = self._clock()
        self._seconds[self.phase] += now - self._entered
        self._entered, self.phase = now, phase

    @contextmanager
    def entered(self, phase: Phase) -> Iterator[None]:
        """Be in a phase for a while, then in the one before again."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def bucket_ready(self, bucket: int) -> None:
        """Note that the gradients of a bucket are there, and that they are sent."""
        self._ready[bucket] = self._clock()

    def bucket_done(self, bucket: int) -> None:
        """Note that the mean of a bucket is there; any thread may say so."""
        self._done[bucket] = self._clock()

    def bucket_between(self, ready: float, done: float) -> None:
        """Note one more bucket, of past moments of this clock; one that was ready before this step is left out.

        >>> seen = []
        >>> clock = StepClock(seen.append, clock=iter([10.0, 13.0]).__next__, processor=lambda: 0.0)
        >>> clock.bucket_between(9.5, 11.0)
        >>> clock.bucket_between(11.0, 12.5)
        >>> clock.end_step()
        >>> seen[0].buckets
        ((1.0, 2.5),)
        """
        if ready >= self._started:
            bucket = len(self._ready)
            self._ready[bucket], self._done[bucket] = ready, done

    def end_step(self, *, version: int | None = None) -> None:
        """End the step, and begin the next one in "input"."""
        self.enter("input")
        end, processor = self._entered, self._processor()
        ready, done = self._ready, self._done
        whole = ready.keys() <= done.keys()  # else one of them has failed
        self._write(
            StepTimes(
                step=self.step,
                version=version,
                started_seconds=self._started - self._zero,
                seconds=end - self._started,
                processor_seconds=processor - self._processor_started,
                input_seconds=self._seconds["input"],
                forward_seconds=self._seconds["forward"],
                backward_seconds=self._seconds["backward"],
                wait_seconds=self._seconds["wait"],
                optimiser_seconds=self._seconds["optimiser"],
                buckets=tuple((ready[each] - self._started, done[each] - self._started) for each in sorted(ready))
                if whole
                else (),
            )
        )
        self._begin(processor)
        self.step += 1

    def skip(self) -> None:
        """Forget what was measured since the last step ended, and begin the next one now, in "input"."""
        self.enter("input")
        self._begin(self._processor())

    def _begin(self, processor: float) -> None:
        self._started, self._processor_started = self._entered, processor
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._ready, self._done = {}, {}


def register_clock(model: object, clock: StepClock | None) -> None:
    """Make a clock the one of a model, or none."""
    if clock is None:
        _CLOCKS.pop(model, None)
    else:
        _CLOCKS[model] = clock


def clock_of(model: object) -> StepClock | None:
    """Return the clock by which somebody watches the steps of a model, if somebody does.

    >>> class Model: ...
    >>> model, clock = Model(), StepClock(print)
    >>> register_clock(model, clock)
    >>> clock_of(model) is clock, clock_of(Model())
    (True, None)
    """
    return _CLOCKS.get(model)


def in_phase(model: object, phase: Phase) -> AbstractContextManager[None]:
    """Return a context in which the clock of a model is in a phase, if somebody watches that model.

    >>> class Model: ...
    >>> model, clock = Model(), StepClock(print)
    >>> register_clock(model, clock)
    >>> with in_phase(model, "wait"), in_phase(Model(), "optimiser"):
    ...     clock.phase
    'wait'
    """
    clock = clock_of(model)
    return _NOBODY if clock is None else clock.entered(phase)
