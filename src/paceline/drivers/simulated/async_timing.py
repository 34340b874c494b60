"""Only the times of an asynchronous run: every worker goes its own way, so its times are one running sum.

A round is as many gradients as there are workers. Its end is found window by window: all arrivals up to a horizon are
counted, and only those of the window in which the round ends are sorted.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from paceline.drivers.simulated.progress import Progress
from paceline.drivers.simulated.setup import Setup
from paceline.traces import Trace


class AsyncTimes:
    """The rounds of `async`, without training; iterate over it, then ask for its `trace`.

    >>> from paceline.drivers.simulated.delays import Recorded
    >>> from paceline.strategies import Async
    >>> delays = Recorded(rows=((1.0, 2.5),))
    >>> run = AsyncTimes(Setup(name="async", strategy=Async(), workers=2, rounds=2, delays=delays))
    >>> [progress.seconds for progress in run]
    [2.0, 3.0]
    """

    def __init__(self, setup: Setup) -> None:
        self._setup, self._latency = setup, setup.network.latency_seconds
        workers = setup.workers
        self._workers = np.arange(workers, dtype=np.int64)
        self._draws = np.zeros(workers, dtype=np.int64)
        self._last_arrival = np.zeros(workers)
        self._rounds_done = 0
        self._seconds = 0.0

    def __iter__(self) -> Iterator[Progress]:
        self._last_turnaround = self._turnaround(self._draws)
        arrival = self._last_turnaround.copy()
        horizon, counted = 0.0, 0
        while self._rounds_done < self._setup.rounds:
            # Half a round at the present pace: a worker far faster than the others must not fill a window alone.
            half_a_round = self._setup.workers / 2 / float((1 / self._last_turnaround).sum())
            horizon = max(horizon, float(arrival.min())) + half_a_round
            owners, window = self._advance(arrival, horizon)
            while self._rounds_done < self._setup.rounds:
                rank = (self._rounds_done + 1) * self._setup.workers - counted - 1
                if rank >= len(window):
                    break
                self._seconds = float(np.partition(window, rank)[rank])
                self._rounds_done += 1
                yield Progress(round=self._rounds_done, seconds=self._seconds)
            counted += len(window)
            ended = self._rounds_done == self._setup.rounds
            taken = window <= (self._seconds if ended else np.inf)
            np.maximum.at(self._last_arrival, owners[taken], window[taken])

    def _advance(self, arrival: NDArray[np.float64], horizon: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Who delivered when, up to the horizon and not told before; moves each worker's next arrival beyond it."""
        owners, times = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
        while len(due := np.flatnonzero(arrival <= horizon)):
            owners.append(due)
            times.append(arrival[due])
            self._draws[due] += 1
            self._last_turnaround[due] = self._turnaround(self._draws[due], due)
            arrival[due] += self._last_turnaround[due]
        return np.concatenate(owners), np.concatenate(times)

    def _turnaround(self, draws: NDArray[np.int64], workers: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """From the model being sent to the gradient being in."""
        delays = self._setup.delays.seconds(self._workers if workers is None else workers, draws)
        return delays + 2 * self._latency

    @property
    def trace(self) -> Trace:
        """What happened so far."""
        # Whoever had the model again before the end was at work on a gradient that nobody took.
        at_work = int((self._last_arrival + self._latency < self._seconds).sum())
        return Trace(
            strategy=self._setup.name,
            seed=self._setup.seed,
            workers=self._setup.workers,
            recipe=self._setup.recipe,
            rounds_done=self._rounds_done,
            seconds=self._seconds,
            late_work=self._setup.late_work,
            used=self._rounds_done * self._setup.workers,
            dropped={"the run ended": at_work} if self._rounds_done == self._setup.rounds and at_work else {},
        )
