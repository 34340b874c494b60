"""One worker's state machine for averaging: when it enters an average, waits for it and merges it.

A *window* is the local steps that a worker takes between two averages that it enters. All strategies of `members.py`
share this state machine.

    hpsgd: training does not wait         # trains   | a step, nothing else   B begin an average
                                          M merge the average that is done, and begin the next
    w0 ######B######M######M######M       slow: every window has one step
    w1 ###B###|###M###|###M###|###M       fast: after the first, every window has two
             [ 0 ]  [ 1 ]  [ 2 ]          an average runs once the last worker has entered it

    local-sgd: training waits             . waits for a slower worker   ~ the average runs   M merge, and train on
    w0 ########B....~~~M########B....~~~M
    w1 ############B~~~M############B~~~M

Rules, on which all else rests:

1. A worker is in one average at a time, and enters number k + 1 after number k is done: the k-th of one worker meets
   the k-th of the others by order alone. There is no barrier, and no worker needs to be as fast as another.
2. No worker stops averaging on its own. One that waits in a flush or has finished training enters every further
   average, with no change, until in one average all workers have asked for at least the same (`Standing`). All read the
   same windows in the same average, so all stop there.
3. A window's change is in exactly one average.
"""

from __future__ import annotations

from typing import Any

from paceline.decoding import Count, decode
from paceline.events import (
    Asked,
    Averaged,
    Begin,
    Happening,
    Merge,
    Order,
    Release,
    Standing,
    Stepped,
    Wait,
    Window,
    is_merged,
)
from paceline.strategies.averaging.members import Averaging


class AveragingState:
    """One worker's state: it is told what happened (`handle`), and answers with what is to be done.

    >>> from paceline.strategies.averaging import make_averaging
    >>> state = AveragingState(make_averaging("local-sgd", period=2), workers=2)
    >>> state.handle(Stepped()), state.handle(Stepped())
    ([], [Begin(number=0, window=Window(steps=2, ...), scale=1.0), Wait(number=0)])
    >>> state.handle(Averaged(number=0, windows=(Window(steps=2), Window(steps=2))))
    [Merge(number=0, weight=0.5, open_steps=0)]
    """

    def __init__(self, member: Averaging, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers must be 1 or more (workers={workers})")
        self.member, self.workers = member, workers
        self.averages = 0  # begun so far
        self.in_flight = False
        self.standing = Standing.TRAINING
        self.finished = False
        self.open_steps = self._merged_after = 0  # steps of the open window, and of those the steps at the last merge

    def handle(self, event: Happening) -> list[Order]:
        """Take in what happened; return what is to be done, in order."""
        if self.finished:
            raise ValueError("this worker has left: averaging is over for it")
        match event:
            case Stepped():
                self.open_steps += 1
                return self._begin_if_due()
            case Averaged():
                return self._averaged(event)
            case Asked():
                return self._asked(event.standing)

    def _asked(self, standing: Standing) -> list[Order]:
        if standing is Standing.TRAINING or self.standing is not Standing.TRAINING:
            raise ValueError(
                f"a worker that is {self.standing.name.lower()} cannot be asked for {standing.name.lower()}"
            )
        if self.workers == 1:
            return self._release(standing)
        self.standing = standing
        return [Wait(number=self.averages - 1)] if self.in_flight else self._begin_and_wait()

    def _begin_if_due(self) -> list[Order]:
        period = self.member.period
        if self.workers == 1 or self.in_flight or period is None or self.open_steps < period:
            return []
        return [self._begin()] if self.member.overlap else self._begin_and_wait()

    def _begin_and_wait(self) -> list[Order]:
        return [self._begin(), Wait(number=self.averages - 1)]

    def _begin(self) -> Begin:
        window = Window(steps=self.open_steps, merged_after=self._merged_after, standing=self.standing)
        if self.standing is not Standing.SETTLING:
            self.open_steps = self._merged_after = 0
        scale = 1.0 / window.brought if self.member.normalize and window.brought else 1.0
        self.in_flight, self.averages = True, self.averages + 1
        return Begin(number=self.averages - 1, window=window, scale=scale)

    def _averaged(self, event: Averaged) -> list[Order]:
        self._check(event)
        self.in_flight, self._merged_after = False, self.open_steps
        orders: list[Order] = []
        if is_merged(event.windows):
            orders.append(Merge(number=event.number, weight=self._weight(event.windows), open_steps=self.open_steps))
        if self.standing is Standing.TRAINING:
            return orders + self._begin_if_due()
        # A worker that was asked while this average was under way had not said so in its window: it enters one more.
        if all(window.standing >= self.standing for window in event.windows):
            return orders + self._release(self.standing)
        return orders + self._begin_and_wait()

    def _release(self, standing: Standing) -> list[Order]:
        self.standing, self.finished = Standing.TRAINING, standing is Standing.LEAVING
        if standing is not Standing.SETTLING:
            self.open_steps = self._merged_after = 0
        return [Release(standing=standing)]

    def _weight(self, windows: tuple[Window, ...]) -> float:
        """Return the factor that turns the sum of what all sent into the mean change.

        1/N; with `normalize`, where each worker sends its change divided by its steps, 1/N times the mean number of
        steps of the workers that took any. For windows of equal length the two give the same mean.
        """
        if not any(window.brought for window in windows):
            return 0.0
        if not self.member.normalize:  # the usual case looks at no more windows than it must: there may be thousands
            return 1.0 / self.workers
        brought = [window.brought for window in windows if window.brought]
        return sum(brought) / len(brought) / self.workers

    def _check(self, event: Averaged) -> None:
        if not self.in_flight or event.number != self.averages - 1:
            under_way = f"number {self.averages - 1}" if self.in_flight else "none"
            raise ValueError(f"average {event.number} cannot be done: {under_way} is under way")
        if len(event.windows) != self.workers:
            raise ValueError(f"an average has {self.workers} windows, one for each worker (found {len(event.windows)})")

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on later, as plain values; only where everybody is at the same place."""
        if self.in_flight or self.standing is not Standing.TRAINING:
            raise ValueError("a worker's state can be taken between two averages only: ask for settling first")
        return {"averages": self.averages, "steps": self.open_steps, "merged_after": self._merged_after}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        if self.in_flight:
            raise ValueError("a state cannot be loaded while an average is under way")
        averages, steps, merged_after = (
            decode(Count, state[name], name) for name in ("averages", "steps", "merged_after")
        )
        if merged_after > steps:
            raise ValueError(f"merged_after must be at most the steps of the window ({merged_after} of {steps})")
        self.averages, self.open_steps, self._merged_after = averages, steps, merged_after
