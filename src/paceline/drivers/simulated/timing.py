"""Only the times of a run, for clusters too large to play event by event.

A round of all workers is a few array operations; the result is what `cluster` would have come to, which tests
compare. With a server messages cost their latency and nothing else here: a limited bandwidth makes workers wait for
each other, and needs the event queue. On ranks a round's messages are one ring, which costs the same in every round,
so bandwidth is counted.

One synchronous round with `late_work="partial"`, for all workers at once (`RoundTimes`):

    start      when the worker gets the model, or is done with its last block of the round before
    finish     start + its delay
    closed     the K-th smallest finish + latency
    hears      closed + latency, on ranks closed + latency + ring: when all have the new model
    stop       finish, or the first block boundary after it hears of `closed`; the next start

Under `async` no worker waits for another, so its times are one running sum (`AsyncTimes`). A round is as many gradients
as there are workers. Its end is found window by window: all arrivals up to a horizon are counted, and only those of the
window in which the round ends are sorted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from paceline.drivers.simulated.cluster import Setup, blocks_by
from paceline.drivers.simulated.network import traffic_seconds
from paceline.drivers.simulated.progress import Progress
from paceline.strategies import LGC
from paceline.strategies.auto_k import AutoK
from paceline.strategies.rounds import Rounds
from paceline.traces import Round, Trace
from paceline.traffic import NO_TRAFFIC, Traffic

Times = NDArray[np.float64]


def _refuse_costs(setup: Setup) -> None:
    """Refuse what only the event queue knows.

    While a server is busy gradients wait, for as long as it takes; and shares by speed are the strategy's, which is not
    run here.
    """
    if setup.costs:
        raise ValueError("a run with measured costs is played event by event: use Cluster or Simulation")
    if setup.shares is not None:
        raise ValueError("a run with shares by speed is played event by event: use Cluster or Simulation")


class RoundTimes:
    """The times of a synchronous run, without training; iterate over it, then read its `trace`.

    `round_traffic` is what ranks put on the network to come to the sum of a round.

    >>> from paceline.drivers.simulated.delays import Recorded
    >>> rows = ((1.0, 1.2, 2.0), (1.1, 1.5, 2.0), (1.0, 1.3, 2.5))
    >>> setup = Setup(name="lgc", strategy=LGC(k=2), workers=3, rounds=3, delays=Recorded(rows=rows),
    ...               late_work="complete")
    >>> run = RoundTimes(setup)
    >>> [round(progress.seconds, 6) for progress in run]
    [1.2, 2.7, 4.0]
    """

    def __init__(self, setup: Setup, *, round_traffic: Traffic = NO_TRAFFIC) -> None:
        state = setup.strategy.start()
        if not isinstance(state, Rounds):
            raise ValueError(f"{setup.name!r} has no rounds that close; AsyncTimes times it")
        _refuse_costs(setup)
        self._setup, self._latency = setup, setup.network.latency_seconds
        self._uses_late = isinstance(setup.strategy, LGC)
        workers = setup.workers
        self._delivery, self._first_delivery, self._round_bytes = self._latency, self._latency, 0
        if setup.on == "ranks":
            adding = traffic_seconds(setup.network, round_traffic)
            self._delivery, self._first_delivery = self._latency + adding, 0.0
            self._round_bytes = round(workers * round_traffic.given_bytes)
        self._chooser, self._warmup_rounds = state.chooser, state.warmup_rounds
        self._workers = np.arange(workers, dtype=np.int64)
        self._draws = np.zeros_like(self._workers)
        self._start = np.full(workers, self._first_delivery)
        self._late_arrival = np.full(workers, np.inf)
        self._known = np.full(workers, np.nan)  # seconds of a whole batch, as the server knows them
        self._late_known = np.zeros(workers)
        self._missed_arrival = np.full(workers, np.inf)
        self._missed_known = np.zeros(workers)
        self._last_fresh: NDArray[np.bool_] | None = None
        self._closed_seconds = self._updated_seconds = 0.0  # when the newest update is there: on ranks after the ring
        self._used = self._late = 0
        self._dropped: Counter[str] = Counter()
        self._records: list[Round] = []

    def __iter__(self) -> Iterator[Progress]:
        for version in range(self._setup.rounds):
            self._round(version)
            yield Progress(round=version + 1, seconds=self._updated_seconds)
        unheard = np.isfinite(self._late_arrival).sum() + np.isfinite(self._missed_arrival).sum()
        self._note_drop("the run ended", int(unheard))

    def _round(self, version: int) -> None:
        """Play one round: who closes it when, what becomes of late work, and when each worker begins the next."""
        last = version == self._setup.rounds - 1
        delay = self._setup.delays.seconds(self._workers, self._draws)
        finish = self._start + delay
        arrival = finish + self._latency
        workers = self._setup.workers
        k = workers if version < self._warmup_rounds else min(self._chooser.k(workers), workers)
        closed = float(np.partition(arrival, k - 1)[k - 1])
        fresh = self._first(arrival, k, closed)
        late = self._settle_late(closed)
        self._used += k
        self._late += late
        self._records.append(
            Round(version=version, opened_seconds=self._closed_seconds, closed_seconds=closed, k=k, used=k, late=late)
        )
        delivery = self._delivery if version else self._first_delivery
        self._learn(fresh, delay + (delivery + self._latency), k)
        hears = closed if last else closed + self._delivery  # after the last round no model is sent
        if self._setup.late_work == "complete":
            under_way = self._begin_together(hears, arrival, finish, fresh)
            self._late_known = delay + (delivery + under_way * self._latency)
        else:
            self._begin_at_block_boundaries(hears, arrival, finish, delay, fresh)
            self._late_known = delay + (delivery + self._latency)
        self._closed_seconds = closed
        self._updated_seconds = closed + (self._delivery if self._setup.on == "ranks" else 0.0)

    def _first(self, arrival: Times, k: int, closed: float) -> NDArray[np.bool_]:
        """Return which K close the round; of those that arrive at the same moment, who began first, as in `cluster`."""
        fresh = arrival < closed
        tied = np.flatnonzero(arrival == closed)
        if len(tied) > 1:
            tied = tied[np.argsort(self._start[tied], kind="stable")]
        fresh[tied[: k - int(fresh.sum())]] = True
        return fresh

    def _settle_late(self, closed: float) -> int:
        """Count the late work of the round before as used or dropped; return how many are in this round's update."""
        waiting = np.isfinite(self._late_arrival)
        in_time = waiting & (self._late_arrival <= closed)
        self._hear_of_missed(waiting & ~in_time, closed)
        self._known[in_time] = self._late_known[in_time]  # after older work of the same worker
        late = int(in_time.sum()) if self._uses_late else 0
        if not self._uses_late:
            self._note_drop("its round had closed", int(in_time.sum()))
        return late

    def _hear_of_missed(self, missed: NDArray[np.bool_], closed: float) -> None:
        """Drop work that came too late for the model, and learn its times, once it arrives."""
        heard = self._missed_arrival <= closed
        self._note_drop("it missed the round after its own too", int(heard.sum()))
        self._known[heard] = self._missed_known[heard]
        self._missed_arrival[heard] = np.inf
        self._missed_arrival[missed] = self._late_arrival[missed]
        self._missed_known[missed] = self._late_known[missed]

    def _note_drop(self, reason: str, count: int) -> None:
        if count:
            self._dropped[reason] += count

    def _learn(self, fresh: NDArray[np.bool_], known: Times, k: int) -> None:
        if not isinstance(self._chooser, AutoK):
            return
        self._chooser.blocks = self._setup.blocks
        self._known[fresh] = known[fresh]
        again = None if self._last_fresh is None else float((fresh & self._last_fresh).sum() / fresh.sum())
        seen = self._known[~np.isnan(self._known)]
        self._chooser.learn(seen, again=again, by_chance=k / max(len(seen), k))
        self._last_fresh = fresh

    def _begin_together(
        self, hears: float, arrival: Times, finish: Times, fresh: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Begin the next round; return whose gradients are sent, the others' come without any time on the wire."""
        under_way = finish <= hears
        self._late_arrival = np.where(fresh, np.inf, np.where(under_way, arrival, hears))
        self._start = np.full(self._setup.workers, hears)
        self._draws += 1
        return under_way

    def _begin_at_block_boundaries(
        self, hears: float, arrival: Times, finish: Times, delay: Times, fresh: NDArray[np.bool_]
    ) -> None:
        block = delay / self._setup.blocks
        begun = self._start <= hears
        done = blocks_by(np.maximum(hears - self._start, 0.0), block, self._setup.blocks)
        boundary = np.where(done >= self._setup.blocks, finish, self._start + done * block)
        unfinished = finish > hears
        # An upload under way when the round closed is whole, and late; work cut short is late at its boundary.
        cut = np.where(unfinished, boundary + self._latency, arrival)
        self._late_arrival = np.where(begun & ~fresh, cut, np.inf)
        self._start = np.where(begun, np.where(unfinished, boundary, hears), self._start)
        self._draws += begun

    @property
    def trace(self) -> Trace:
        """What has happened so far."""
        return Trace(
            strategy=self._setup.name,
            seed=self._setup.seed,
            workers=self._setup.workers,
            recipe=self._setup.recipe,
            rounds_done=len(self._records),
            seconds=self._updated_seconds,
            late_work=self._setup.late_work,
            used=self._used,
            late=self._late,
            dropped=dict(self._dropped),
            sent_bytes=len(self._records) * self._round_bytes,
            rounds=tuple(self._records),
        )


class AsyncTimes:
    """The times of an asynchronous run, without training; iterate over it, then read its `trace`.

    >>> from paceline.drivers.simulated.delays import Recorded
    >>> from paceline.strategies import Async
    >>> delays = Recorded(rows=((1.0, 2.5),))
    >>> run = AsyncTimes(Setup(name="async", strategy=Async(), workers=2, rounds=2, delays=delays))
    >>> [progress.seconds for progress in run]
    [2.0, 3.0]
    """

    def __init__(self, setup: Setup) -> None:
        _refuse_costs(setup)
        self._setup, self._latency = setup, setup.network.latency_seconds
        self._workers = np.arange(setup.workers, dtype=np.int64)
        self._draws = np.zeros_like(self._workers)
        self._last_arrival = np.zeros(setup.workers)
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

    def _advance(self, arrival: Times, horizon: float) -> tuple[NDArray[np.int64], Times]:
        """Return who delivered when, up to the horizon and not before; move each worker's next arrival beyond it."""
        owners, times = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
        while len(due := np.flatnonzero(arrival <= horizon)):
            owners.append(due)
            times.append(arrival[due])
            self._draws[due] += 1
            self._last_turnaround[due] = self._turnaround(self._draws[due], due)
            arrival[due] += self._last_turnaround[due]
        return np.concatenate(owners), np.concatenate(times)

    def _turnaround(self, draws: NDArray[np.int64], workers: NDArray[np.int64] | None = None) -> Times:
        """Return the seconds from when the model is sent until the gradient is in."""
        delays = self._setup.delays.seconds(self._workers if workers is None else workers, draws)
        return delays + 2 * self._latency

    @property
    def trace(self) -> Trace:
        """What has happened so far."""
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
