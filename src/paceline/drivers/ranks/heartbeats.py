"""Who is alive: every rank writes a counter to the store once a second, and looks at those of the others.

A collective that waits for a dead rank does not say for whom it waits: gloo tells a lost connection to the neighbours
of the dead rank alone, and a frozen process to nobody before its timeout. So every rank has a thread that writes

    <count> <averages or rounds entered> <why it has left, if it has>

under its own key, and reads the others'. A rank whose count has stood still for `silence_seconds` is gone. The time is
measured here, between looks, on this machine's clock: no two clocks are compared, and a rank that was itself stopped
for a while does not take the others for dead when it goes on.

Only this thread talks to the store, on a connection of its own, and it asks for no key before it is there: nothing
here waits for another rank. If the store itself is lost, so is the process that kept it.

What a rank that waits for an average (or for a round) finds out from it (`FailureDetector`):

the average is not done, and a rank is silent or has left       rank 2 is gone: not heard of for 15 s
the connection to a rank is lost                                the same, as soon as its silence shows
the average is not done, and all are heard of, for too long     rank 2 has not come to average 7 in 600 s
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.distributed import RankGoneError, first_line, name_ranks
from paceline.distributed.stores import launcher_keeps_store, read_keys
from paceline.drivers.ranks.group import AVERAGING, Purpose
from paceline.errors import PacelineError

INTERVAL_SECONDS = 1.0
LOOKED_AT_ONCE = 64  # ranks; of more, each is looked at less often, so that the store has no more to do
FEWEST_LOOKS = 4  # in which a rank must be silent to be gone
STOP_SECONDS = 2.0  # the longest that the last beat holds up a rank that leaves
MOST_REASON = 400
LOOK_SECONDS = 0.25  # at most so often: a step boundary is no place to linger
LOST_LOOK_SECONDS = 0.05
LOST_BEATS = 4  # without which a rank is taken for gone where a connection is lost


class Heartbeats:
    """This rank's heartbeats, and what is heard of the others.

    Of many ranks each is looked at less often; `silence_seconds` is never less than four looks then. The store is let
    go of in the end: as long as somebody holds it, nobody else can keep one at its port.
    """

    def __init__(self, store: Any, ranks: Sequence[int], rank: int, *, silence_seconds: float) -> None:
        self._store, self._rank = store, rank
        self._others = [other for other in ranks if other != rank]
        self.interval_seconds = min(INTERVAL_SECONDS, silence_seconds / 4) * max(1.0, len(ranks) / LOOKED_AT_ONCE)
        self.silence_seconds = max(silence_seconds, FEWEST_LOOKS * self.interval_seconds)
        self.entered = 0  # by this rank; told with the next beat
        self._count, self._reason = 0, ""
        self._heard: dict[int, list[str]] = {}
        self._silent_seconds = dict.fromkeys(self._others, 0.0)
        self._lost: str | None = None
        self._looks = self._looks_seen = 0
        self._checked_at = self._looked_at = time.monotonic()
        self._unlooked_seconds = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-heartbeats", daemon=True)

    def start(self) -> None:
        """Begin to beat. `stop` must come before the interpreter ends: a thread that comes back to a dead one kills."""
        if self._others:
            self._thread.start()

    def stop(self, reason: str = "") -> None:
        """Beat no more; the last beat says why, if this rank leaves before its time."""
        self._reason = " ".join(reason.split())[:MOST_REASON]
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive():
            self._store = None

    # -- what is known of the others -------------------------------------------------------------------------------

    def find_gone(self, after_seconds: float | None = None) -> str | None:
        """Say in words who is gone; None while everybody is heard of. To be called now and then, from one thread.

        `after_seconds` of silence are enough, if they are given and fewer than usual.
        """
        enough = self.silence_seconds if after_seconds is None else min(after_seconds, self.silence_seconds)
        # Asked rank by rank: the heartbeats' thread adds to `_heard` meanwhile, so it cannot be iterated over here.
        left = {rank: heard[2] for rank in self._others if len(heard := self._heard.get(rank, [])) > 2}
        silent = [rank for rank in self._others if self._silent_seconds[rank] >= enough and rank not in left]
        if silent:
            rank = max(silent, key=lambda other: self._silent_seconds[other])
            return f"rank {rank} is gone: not heard of for {self._silent_seconds[rank]:.0f} s"
        if left:
            rank = min(left, key=self._others.index)
            return f"rank {rank} has left: {left[rank]}"
        keeper = "the launcher" if launcher_keeps_store() else "rank 0"
        if self._lost is not None:
            return f"{keeper} is gone: the store that it kept is lost ({self._lost})"
        if self._store_silent():
            return f"{keeper} is gone: the store that it kept has not answered for {self._unlooked_seconds:.0f} s"
        return None

    @property
    def store_lost(self) -> bool:
        """Whether the store no longer answers: the process that kept it is gone."""
        return self._lost is not None or self._unlooked_seconds >= self.silence_seconds

    def entered_of(self, rank: int) -> int | None:
        """Return how many averages, or rounds, a rank had entered when it was last heard of."""
        return int(self._heard[rank][1]) if rank in self._heard else None

    def behind(self, number: int) -> list[int]:
        """Return the other ranks that have not been heard to enter so many averages, or rounds."""
        return [rank for rank in self._others if (self.entered_of(rank) or 0) < number]

    def silent_seconds(self, rank: int) -> float:
        """Return for how long a rank has not been heard of."""
        return self._silent_seconds[rank]

    def _store_silent(self) -> bool:
        """Whether the thread has come back from no look for too long, not counting time in which nobody checked."""
        now = time.monotonic()
        self._unlooked_seconds += min(now - self._checked_at, 2 * self.interval_seconds)
        self._checked_at = now
        if self._looks != self._looks_seen or not self._others:
            self._looks_seen, self._unlooked_seconds = self._looks, 0.0
        return self._unlooked_seconds >= self.silence_seconds + self.interval_seconds

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._beat()
                self._look()
                self._looks += 1
                self._stop.wait(self.interval_seconds)
            if self._reason:
                self._beat()
        except Exception as error:
            self._lost = first_line(error)
        finally:
            self._store = None

    def _beat(self) -> None:
        self._count += 1
        self._store.set(str(self._rank), f"{self._count} {self.entered} {self._reason}")

    def _look(self) -> None:
        now = time.monotonic()
        passed, self._looked_at = min(now - self._looked_at, 3 * self.interval_seconds), now
        there = [rank for rank in self._others if rank in self._heard or self._store.check([str(rank)])]
        for rank, beat in zip(there, read_keys(self._store, list(map(str, there))), strict=True):
            heard = beat.decode(errors="replace").rstrip().split(" ", 2)
            fresh = rank not in self._heard or heard[0] != self._heard[rank][0]
            self._heard[rank] = heard
            if fresh:
                self._silent_seconds[rank] = -passed
        for rank in self._others:
            self._silent_seconds[rank] += passed


class FailureDetector:
    """Checks, while this rank waits for the others, whether one of them is dead or too late; the error names it."""

    def __init__(
        self,
        heartbeats: Heartbeats,
        ranks: Sequence[int],
        rank: int,
        *,
        timeout_seconds: float,
        purpose: Purpose = AVERAGING,
    ) -> None:
        self._heartbeats = heartbeats
        self._unit = purpose.unit
        self._timeout_seconds = timeout_seconds
        self._looked_at = 0.0

    def check(self, number: int, begun: float, what: str) -> None:
        """Raise RankGoneError if what this rank waits for cannot complete, or takes too long: the error names the rank.

        `what` names the operation in the error. It started at `begun`, a time.perf_counter() value, and needs all
        ranks to have entered average, or round, `number`.
        """
        now = time.perf_counter()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        gone = self._heartbeats.find_gone()
        if gone:
            raise RankGoneError(f"{gone} ({what} waited for it)")
        # What is heard of a rank may be a beat old: one that came a moment ago must not be named.
        if now - begun > self._timeout_seconds + 2 * self._heartbeats.interval_seconds:
            raise RankGoneError(self._late(number, what))

    def missing(self, number: int) -> list[int]:
        """Return the other ranks that have not been heard to enter average, or round, `number`."""
        return self._heartbeats.behind(number + 1)

    def _late(self, number: int, what: str) -> str:
        unit, missing = self._unit, self.missing(number)
        if not missing:
            return f"{what} was not done in {self._timeout_seconds:g} s, though all ranks have come to {unit} {number}"
        least = min(self._heartbeats.entered_of(rank) or 0 for rank in missing)
        return (
            f"{name_ranks(missing)} did not come to {unit} {number} in {self._timeout_seconds:g} s: alive, and "
            f"{f'in no {unit} yet' if not least else f'last in {unit} {least - 1}'}. "
            "Do all ranks call flush, state_dict and close alike?"
        )

    @contextmanager
    def naming_lost(self, what: str) -> Iterator[None]:
        """Turn a lost connection into a RankGoneError that names the rank whose heartbeats have stopped."""
        try:
            yield
        except PacelineError:
            raise
        except RuntimeError as error:
            deadline = time.monotonic() + self._heartbeats.silence_seconds + 5.0
            enough_seconds = LOST_BEATS * self._heartbeats.interval_seconds  # that somebody is gone is known by now
            while time.monotonic() < deadline:
                gone = self._heartbeats.find_gone(after_seconds=enough_seconds)
                if gone:
                    raise RankGoneError(f"{gone} ({what} waited for it)") from error
                time.sleep(LOST_LOOK_SECONDS)
            raise RankGoneError(f"{what} has failed, though all ranks are alive: {first_line(error)}") from error
