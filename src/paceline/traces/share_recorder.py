"""What shares by speed came to in a run, from its arrivals and rounds alone: a simulated run's, or those of a journal.

A worker's share is the size of its newest batch. How long a round would have been open with equal shares is computed
from the very batches of that round, so that rounds of good and of bad luck are compared with themselves:

    seconds of worker i with e samples   =  its seconds * (offset_i + e) / (offset_i + b_i)
    round with equal shares              =  the round  +  K-th smallest of those  -  K-th smallest of its seconds

`offset` is the fixed part of a batch (`strategies/shares/speed.py`). What a round costs beside its batches, such as the
server's work and late starts, is in both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from paceline.strategies.shares import SpeedEstimate
from paceline.traces.records import Round, ShareSummary, WorkerShare


class ShareRecorder:
    """Hears of a run's gradients and rounds, and says what its shares came to.

    >>> recorder = ShareRecorder()
    >>> for version, sizes in enumerate([(12, 12)] * 3 + [(18, 6)] * 3):
    ...     for worker, (samples, sample_seconds) in enumerate(zip(sizes, (0.25, 0.75))):
    ...         recorder.arrived(worker=worker, version=version, samples=samples, seconds=samples * sample_seconds)
    ...     slowest = max(samples * each for samples, each in zip(sizes, (0.25, 0.75)))
    ...     recorder.closed(Round(version=version, opened_seconds=0.0, closed_seconds=slowest, k=2, used=2, late=0))
    >>> summary = recorder.summary()
    >>> summary.since, [share.samples for share in summary.workers]
    (3, [18, 6])
    >>> summary.predicted_seconds, summary.round_seconds, summary.equal_seconds
    (4.5, 4.5, 9.0)
    """

    def __init__(self) -> None:
        self._speeds: dict[int, SpeedEstimate] = {}
        self._samples: dict[int, int] = {}
        self._predicted: dict[int, float] = {}
        self._changed: set[int] = set()  # versions of the first batches of another size
        self._batches: dict[int, dict[int, tuple[int, float]]] = {}  # by version and worker: samples, seconds
        self._rounds: dict[int, Round] = {}  # closed, and their late gradients may still come
        self._since = 0
        self._told: list[tuple[float, float]] = []  # of rounds since then: their seconds, and those with equal shares
        self._k = 1

    def arrived(self, *, worker: int, version: int, samples: int, seconds: float) -> None:
        """Hear of a gradient: the samples of the whole batch, and the seconds of such a batch with its messages."""
        speed = self._speeds.setdefault(worker, SpeedEstimate())
        before = self._samples.get(worker)
        if before is not None and before != samples:
            self._predicted[worker] = speed.speed.predict(samples)
            self._changed.add(version)
            if version > self._since:
                self._since = version
                self._told.clear()
        self._samples[worker] = samples
        speed.observe(samples, seconds)
        self._batches.setdefault(version, {})[worker] = samples, seconds

    def left(self, worker: int) -> None:
        """Hear that a worker is gone: the others share its samples."""
        for held in (self._speeds, self._samples, self._predicted):
            held.pop(worker, None)

    def closed(self, closed: Round) -> None:
        """Hear that a round closed."""
        self._rounds[closed.version], self._k = closed, closed.k
        settled = [version for version in self._rounds if version <= closed.version - 2]  # late gradients are there
        self._told += self._compared(settled)
        for version in settled:
            del self._rounds[version]
        for version in [version for version in self._batches if version <= closed.version - 2]:
            del self._batches[version]

    def summary(self) -> ShareSummary:
        """Return what the shares came to by now."""
        equal, workers = self._equal_samples, sorted(self._samples)
        shares = []
        for worker in workers:
            speed, samples = self._speeds[worker].speed, self._samples[worker]
            now = speed.predict(samples)
            shares.append(
                WorkerShare(
                    worker=worker,
                    samples=samples,
                    predicted_seconds=self._predicted.get(worker, now),
                    seconds=now,
                    equal_seconds=now * (speed.offset + equal) / (speed.offset + samples),
                )
            )
        told = [*self._told, *self._compared(self._rounds)]
        return ShareSummary(
            workers=tuple(shares),
            changes=len(self._changed),
            since=self._since,
            predicted_seconds=_at([share.predicted_seconds for share in shares], self._k),
            round_seconds=statistics.fmean(seconds for seconds, _ in told) if told else None,
            equal_seconds=statistics.fmean(seconds for _, seconds in told) if told else None,
        )

    @property
    def _equal_samples(self) -> float:
        return sum(self._samples.values()) / max(1, len(self._samples))

    def _compared(self, versions: Iterable[int]) -> list[tuple[float, float]]:
        """Return the seconds of rounds since the newest shares, and what each would have taken with equal ones."""
        equal, found = self._equal_samples, []
        for version in sorted(version for version in versions if version >= self._since):
            closed, batches = self._rounds[version], self._batches.get(version, {})
            taken, otherwise = list[float](), list[float]()
            for worker, estimate in self._speeds.items():
                # Nothing is known of a batch that was still under way at the end: it was none of the first K.
                samples, seconds = batches.get(worker, (self._samples[worker], math.inf))
                usual = seconds if worker in batches else estimate.speed.predict(samples)
                taken.append(seconds)
                otherwise.append(usual * (estimate.offset + equal) / (estimate.offset + samples))
            as_it_was, with_equal = _at(taken, closed.k), _at(otherwise, closed.k)
            if as_it_was is not None and with_equal is not None and as_it_was < math.inf:
                found.append((closed.seconds, closed.seconds + with_equal - as_it_was))
        return found


def _at(seconds: Sequence[float], k: int) -> float | None:
    """Return the K-th smallest, or None where there are fewer."""
    return sorted(seconds)[k - 1] if 1 <= k <= len(seconds) else None
