"""A clock that splits a step into phases, for whoever takes the steps: a script's hooks, a recipe's loop.

    clock.enter("forward")    what came before was another phase; from now on it is this one
    clock.enter("backward")
    clock.bucket_ready(0)     its gradients are there          bucket_done(0) may come from another thread
    clock.enter("wait")
    clock.end_step()          -> one StepTimes; the next step begins, in "input"

What a stretch of time was is sometimes known at its end: `enter("optimiser", counting="optimiser")` counts what is
being measured as the optimiser's, whatever it was begun as.

A bucket may be done, by the backend's thread, a moment after the step has ended that waited for it. So a step is
written once its buckets are all done, at the latest when the next step ends; `flush` writes the last one. Whoever has
no time to spare in a step takes a MeasuredStep with `keep`, and makes StepTimes of it later.

Time in "other" is in no phase. A phase may be entered many times in a step (accumulated gradients): its times add up.

A part of the library that waits for other ranks inside a script's step finds the script's clock by its model, with
`clock_of(model)`, and enters "wait" while it waits; where nobody watches, there is none. A part that brings gradients
or models together itself says so once: `clock.tell_sync("averaging")`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from paceline.traces.step_times import StepTimes, Sync

Phase: TypeAlias = Literal["input", "forward", "backward", "wait", "optimiser", "other"]
PHASES: tuple[Phase, ...] = ("input", "forward", "backward", "wait", "optimiser")
_NO_BUCKETS: tuple[tuple[float, float], ...] = ()
_NONE: dict[Phase, float] = dict.fromkeys((*PHASES, "other"), 0.0)
_CLOCKS: WeakKeyDictionary[Any, StepClock] = WeakKeyDictionary()
_NOBODY: AbstractContextManager[None] = nullcontext()


class MeasuredStep(NamedTuple):
    """What a clock knows of a step that is over, by its own times."""

    step: int
    version: int | None
    zero: float  # when the clock began
    started: float
    ended: float
    processor_seconds: float
    seconds: dict[Phase, float]
    ready: dict[int, float]
    done: dict[int, float]

    def has_all_buckets(self) -> bool:
        """Whether all buckets are done; what was done before it was ready was done in an earlier pass of the step."""
        done = self.done
        return all(done.get(bucket, -1.0) >= at for bucket, at in self.ready.items())

    def times(self) -> StepTimes:
        """Return the times of the step, without its buckets if one of them is not done."""
        step, version, zero, started, ended, processor_seconds, seconds, ready, done = self
        buckets = _NO_BUCKETS
        if ready and self.has_all_buckets():
            buckets = tuple([(ready[each] - started, done[each] - started) for each in sorted(ready)])
        return StepTimes(
            step=step,
            version=version,
            started_seconds=started - zero,
            seconds=ended - started,
            processor_seconds=processor_seconds,
            input_seconds=seconds["input"],
            forward_seconds=seconds["forward"],
            backward_seconds=seconds["backward"],
            wait_seconds=seconds["wait"],
            optimiser_seconds=seconds["optimiser"],
            buckets=buckets,
        )


class StepClock:
    """Measures one step after the other, and hands each to `write`, or, before StepTimes are made of it, to `keep`.

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
        keep: Callable[[MeasuredStep], None] | None = None,
        first_step: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        processor: Callable[[], float] = time.process_time,
        on_sync: Callable[[Sync], None] = lambda sync: None,
    ) -> None:
        self.step = first_step
        self.tell_sync = on_sync  # how gradients come together, where whoever made the clock cannot know it
        self.phase: Phase = "input"
        self._write, self._keep, self._clock, self._processor = write, keep, clock, processor
        self._zero = self._started = self._entered = clock()
        self._processor_started = processor()
        self._seconds: dict[Phase, float] = dict(_NONE)
        self._ready: dict[int, float] = {}
        self._done: dict[int, float] = {}
        self._held: MeasuredStep | None = None  # a step that is over and not written yet

    @property
    def now(self) -> float:
        """The seconds since the clock began."""
        return self._clock() - self._zero

    def enter(self, phase: Phase, *, counting: Phase | None = None) -> None:
        """Begin a phase; what is being measured ends, and was a part of `counting`, if that is given."""
        now = self._clock()
        self._seconds[counting or self.phase] += now - self._entered
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

    def begin_buckets(self) -> None:
        """Forget the buckets of an earlier backward pass of this step: those of the last one are kept."""
        self._ready, self._done = {}, {}

    def bucket_ready(self, bucket: int) -> Callable[[], None]:
        """Note that the gradients of a bucket are there, and that they are sent.

        Return what to call when their mean is there: it belongs to this step, also when the step is over by then.
        """
        clock, done = self._clock, self._done
        self._ready[bucket] = clock()

        def mark_done() -> None:
            done[bucket] = clock()

        return mark_done

    def bucket_done(self, bucket: int) -> None:
        """Note that the mean of a bucket of this step is there; any thread may say so."""
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
        if self._held is not None:
            self.flush()
        processor = self._processor()
        self._held = held = MeasuredStep(
            self.step,
            version,
            self._zero,
            self._started,
            self._entered,
            processor - self._processor_started,
            self._seconds,
            self._ready,
            self._done,
        )
        if not held.ready or held.has_all_buckets():
            self.flush()
        self._begin(processor)
        self.step += 1

    def flush(self, *, within_seconds: float = 0.0) -> None:
        """Write the step that waits for its buckets, if there is one; without them, if one is not done in time."""
        if self._held is None:
            return
        held, self._held = self._held, None
        deadline = time.monotonic() + within_seconds if within_seconds else 0.0
        while within_seconds and not held.has_all_buckets() and time.monotonic() < deadline:
            time.sleep(0.001)
        if self._keep is not None:
            self._keep(held)
        else:
            self._write(held.times())

    def recount(self, phase: Phase, counting: Phase) -> None:
        """Count what was measured of a phase in this step as another's."""
        self._seconds[counting] += self._seconds[phase]
        self._seconds[phase] = 0.0

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Measure nothing for a while: what is done in it belongs to no step.

        >>> seen = []
        >>> clock = StepClock(seen.append, clock=iter([0.0, 1.0, 51.0, 53.0]).__next__, processor=lambda: 0.0)
        >>> with clock.left_out():
        ...     pass
        >>> clock.end_step()
        >>> seen[0].input_seconds, seen[0].seconds
        (3.0, 3.0)
        """
        self.enter(self.phase)
        before, processor = self._entered, self._processor()
        try:
            yield
        finally:
            self._entered = self._clock()
            self._started += self._entered - before
            self._processor_started += self._processor() - processor

    def skip(self) -> None:
        """Forget what was measured since the last step ended, and begin the next one now, in "input"."""
        self.enter("input")
        self._begin(self._processor())

    def _begin(self, processor: float) -> None:
        self._started, self._processor_started = self._entered, processor
        self._seconds = dict(_NONE)
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
