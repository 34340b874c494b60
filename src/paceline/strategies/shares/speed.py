"""How long one rank takes for a batch of so many samples, learned from the times of its batches.

    seconds(b)  =  fixed + per_sample * b  =  per_sample * (offset + b)

`offset` is the fixed part in samples: what a batch costs before its first sample counts. It belongs to the model and
the machine, and is zero until two sizes were seen. A machine that slows down is slower at both parts, so the offset
stays, and the times of the last few batches say all that has changed:

    seconds(b')  =  (median of the batches of b samples) * (offset + b') / (offset + b)

Two sizes b and b' with the medians t and t' give  offset = (t' b - t b') / (t - t').

    #      #  #                        one batch that took long: the median does not move
    #  ##  #  #   #  # #  #            a few in a row that took long: what was before them is forgotten
    ####  ##### | ########
                ^ the last RECENT differ by more than noise explains

Noise is the median of the differences between one batch and the next, which a machine that slows down for good changes
once. The error of a median of n batches is 1.25 * noise / sqrt(n).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

from paceline.decoding import Count, decode
from paceline.strategies.forms import Seconds

RECENT = 5  # batches in a row that tell a machine that has slowed down from one that was disturbed
KEPT = 32  # batches of the present size whose times are kept
SLOWER = 0.1  # a lasting change is at least so large, relative to the time before
FORGETS_AT = 4.0  # standard errors between the last RECENT and those before them
FEWEST = 3  # batches of a size that count as having seen it
FEW = 3  # a deviation that is estimated from n differences is taken (1 + FEW / n) times as large
DIFFERENT = 0.1  # sizes nearer to each other say nothing about the fixed part
MOST_OFFSET = 10.0  # the fixed part is at most that of so many batches of the present size
KEPT_OFFSETS = 5
LEAST_ERROR = 0.01  # of a median, relative: clocks and schedulers are no better


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What is known of one rank: the seconds of a batch of `samples`, their standard error, and the fixed part.

    `known` is how many batches that is from; below FEWEST there is nothing to decide by.

    >>> speed = Speed(samples=100, seconds=1.2, error_seconds=0.01, offset=20.0, known=8)
    >>> speed.predict(40)
    0.6
    >>> round(speed.fixed_seconds, 3), round(speed.sample_seconds, 3)
    (0.2, 0.01)
    """

    samples: int
    seconds: float
    error_seconds: float = 0.0
    offset: float = 0.0
    known: int = FEWEST

    @property
    def sample_seconds(self) -> float:
        """The seconds of one more sample."""
        return self.seconds / (self.offset + self.samples)

    @property
    def fixed_seconds(self) -> float:
        """The seconds of a batch that do not depend on its size."""
        return self.sample_seconds * self.offset

    def predict(self, samples: int) -> float:
        """Return the seconds of a batch of so many samples."""
        return self.seconds * (self.offset + samples) / (self.offset + self.samples)


class SpeedEstimate:
    """Learns the speed of one rank.

    >>> estimate = SpeedEstimate()
    >>> for seconds in (1.0, 1.1, 9.9, 1.0):
    ...     estimate.observe(10, seconds)
    >>> estimate.speed.predict(20)
    2.1
    >>> for _ in range(4):
    ...     estimate.observe(20, 1.55)
    >>> estimate.speed.fixed_seconds > 0.5
    True
    """

    def __init__(self) -> None:
        self._samples = 0
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self._changes: deque[float] = deque(maxlen=KEPT)  # from one batch to the next of the same size, relative
        self._before: tuple[int, float] | None = None  # the size before, and its median
        self._predicted = 0.0  # seconds of the present size, by those before it
        self._offsets: deque[float] = deque(maxlen=KEPT_OFFSETS)

    def observe(self, samples: int, seconds: float) -> None:
        """Take in a batch: its samples, and the seconds that the rank was busy with it."""
        if samples < 1 or not 0 < seconds < math.inf:
            return  # a clock that stood still, or was turned
        if samples != self._samples:
            self._begin_size(samples)
        elif self._seconds:
            last = self._seconds[-1]
            self._changes.append(abs(seconds - last) / max(seconds, last))
        self._seconds.append(seconds)
        self._forget_what_was_before()

    def _begin_size(self, samples: int) -> None:
        if self._samples:
            self._predicted = self.speed.predict(samples)
            found = self._offset_now()
            if found is not None:
                self._offsets.append(found)
            self._before = None
            if len(self._seconds) >= FEWEST:
                self._before = self._samples, statistics.median(self._seconds)
        self._samples = samples
        self._seconds.clear()

    def _forget_what_was_before(self) -> None:
        """Begin anew with the last few batches where they differ from those before by more than noise."""
        seconds = list(self._seconds)
        for recent in (RECENT, 2 * RECENT):
            if len(seconds) < recent + FEWEST:
                return
            before, now = statistics.median(seconds[:-recent]), statistics.median(seconds[-recent:])
            error = 1.25 * self._noise * max(before, now) * math.sqrt(1 / recent + 1 / (len(seconds) - recent))
            if abs(now - before) > max(SLOWER * before, FORGETS_AT * error):
                self._seconds = deque(seconds[-recent:], maxlen=KEPT)
                self._before = None  # its time was that of another speed
                return

    @property
    def _noise(self) -> float:
        """The standard deviation of a batch's time, relative."""
        changes = self._changes
        if not changes:
            return 0.0
        of_median = 1.4826 * statistics.median(changes) / math.sqrt(2)
        of_mean = 0.886 * statistics.fmean(changes)  # sees what happens rarely
        return max(of_median, of_mean) * (1 + FEW / len(changes))

    def _offset_now(self) -> float | None:
        """Return the fixed part, in samples, that the present size and the one before give; None if they do not."""
        if self._before is None or len(self._seconds) < FEWEST:
            return None
        samples, before = self._before
        if abs(samples - self._samples) < DIFFERENT * max(samples, self._samples):
            return None
        now, most = statistics.median(self._seconds), MOST_OFFSET * max(samples, self._samples)
        if (now - before) * (self._samples - samples) <= 0:
            return most  # more samples took no longer
        return min(most, max(0.0, (now * samples - before * self._samples) / (before - now)))

    @property
    def offset(self) -> float:
        """The fixed part of a batch's time, in samples; 0 until two sizes were seen."""
        now = self._offset_now()
        offsets = [*self._offsets, *([] if now is None else [now])]
        return statistics.median(offsets) if offsets else 0.0

    @property
    def speed(self) -> Speed:
        """What is known by now; `known` is 0 before the first batch."""
        if not self._samples:
            return Speed(samples=1, seconds=1.0, known=0)
        known = len(self._seconds)
        seconds = statistics.median(self._seconds) if known >= FEWEST or not self._predicted else self._predicted
        error = max(LEAST_ERROR, 1.25 * self._noise / math.sqrt(max(1, known))) * seconds
        return Speed(samples=self._samples, seconds=seconds, error_seconds=error, offset=self.offset, known=known)

    # -- going on later --------------------------------------------------------------------------------------------

    FORM = {  # noqa: RUF012 - types of a state_dict that was kept as JSON
        "samples": Count,
        "seconds": tuple[Seconds, ...],
        "changes": tuple[Seconds, ...],
        "before": tuple[Count, Seconds] | None,
        "predicted": Seconds,
        "offsets": tuple[Seconds, ...],
    }

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on later, as plain values."""
        return {
            "samples": self._samples,
            "seconds": list(self._seconds),
            "changes": list(self._changes),
            "before": self._before,
            "predicted": self._predicted,
            "offsets": list(self._offsets),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        held = decode(self.FORM, state, "speed")
        self._samples, self._before = held["samples"], held["before"]
        self._predicted = held["predicted"]
        self._seconds = deque(held["seconds"], maxlen=KEPT)
        self._changes = deque(held["changes"], maxlen=KEPT)
        self._offsets = deque(held["offsets"], maxlen=KEPT_OFFSETS)
