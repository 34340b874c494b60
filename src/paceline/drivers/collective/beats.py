"""Who is alive: every rank writes a counter to the store once a second, and looks at those of the others.

A collective that waits for a dead rank does not say for whom it waits. So every rank has a thread that writes

    <count> <averages begun> <farewell, if it has left>

under its own key, and reads the others'. A rank whose count has stood still for `silence_seconds` is gone. The time is
measured here, between looks, on this machine's clock: no two clocks are compared, and a rank that was itself stopped
for a while does not take the others for dead when it goes on.

Only this thread talks to the store, on a connection of its own, and it asks for no key before it is there: nothing
here waits for another rank. If the store itself is lost, so is whoever kept it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from paceline.distributed import first_line

INTERVAL_SECONDS = 1.0
LOOKED_AT_ONCE = 64  # ranks; of more, each is looked at less often, so that the store has no more to do
FEWEST_LOOKS = 4  # in which a rank must be silent to be gone
FAREWELL_SECONDS = 2.0  # the longest that a farewell holds up a rank that leaves
MOST_REASON = 400


class Beats:
    """This rank's beats, and what is heard of the others.

    Of many ranks each is looked at less often; `silence_seconds` is never less than four looks then. The store is let
    go of in the end: as long as somebody holds it, nobody else can keep one at its port.
    """

    def __init__(self, store: Any, ranks: Sequence[int], rank: int, *, silence_seconds: float) -> None:
        self._store, self._rank = store, rank
        self._others = [other for other in ranks if other != rank]
        self.interval_seconds = min(INTERVAL_SECONDS, silence_seconds / 4) * max(1.0, len(ranks) / LOOKED_AT_ONCE)
        self.silence_seconds = max(silence_seconds, FEWEST_LOOKS * self.interval_seconds)
        self._count = self._average = 0
        self._reason = ""
        self._heard: dict[int, list[str]] = {}
        self._silent_seconds = dict.fromkeys(self._others, 0.0)
        self._lost: str | None = None
        self._looks = self._looks_seen = 0
        self._checked_at = self._looked_at = time.monotonic()
        self._unlooked_seconds = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-beats", daemon=True)

    def start(self) -> None:
        """From now on. `stop` must come before the interpreter ends: a thread that comes back to a dead one kills."""
        if self._others:
            self._thread.start()

    def begun(self, averages: int) -> None:
        """How many averages this rank has entered; told with the next beat."""
        self._average = averages

    def stop(self, reason: str = "") -> None:
        """No more beats; the last one says why, if this rank leaves before its time."""
        self._reason = " ".join(reason.split())[:MOST_REASON]
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(FAREWELL_SECONDS)
        if not self._thread.is_alive():
            self._store = None

    # -- what is known of the others -------------------------------------------------------------------------------

    def gone(self, after_seconds: float | None = None) -> str | None:
        """Who is gone, in words; None while everybody is heard of. To be called now and then, from one thread.

        `after_seconds` of silence are enough, if they are given and fewer than usual.
        """
        enough = self.silence_seconds if after_seconds is None else min(after_seconds, self.silence_seconds)
        silent = [rank for rank in self._others if self._silent_seconds[rank] >= enough and not self._farewell(rank)]
        if silent:
            rank = max(silent, key=lambda other: self._silent_seconds[other])
            return f"rank {rank} is gone: not heard of for {self._silent_seconds[rank]:.0f} s"
        for rank in self._others:
            if self._farewell(rank):
                return f"rank {rank} has left: {self._farewell(rank)}"
        if self._lost is not None:
            return f"{_keeper()} is gone: the store that it kept is lost ({self._lost})"
        if self._store_silent():
            return f"{_keeper()} is gone: the store that it kept has not answered for {self._unlooked_seconds:.0f} s"
        return None

    def averages_of(self, rank: int) -> int | None:
        """How many averages a rank had entered when it was last heard of."""
        return int(self._heard[rank][1]) if rank in self._heard else None

    def _farewell(self, rank: int) -> str:
        heard = self._heard.get(rank, [])
        return heard[2] if len(heard) > 2 else ""

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
        self._store.set(str(self._rank), f"{self._count} {self._average} {self._reason}")

    def _look(self) -> None:
        now = time.monotonic()
        passed, self._looked_at = min(now - self._looked_at, 3 * self.interval_seconds), now
        there = [rank for rank in self._others if rank in self._heard or self._store.check([str(rank)])]
        for rank, said in zip(there, self._read(there), strict=True):
            heard = said.decode(errors="replace").rstrip().split(" ", 2)
            fresh = rank not in self._heard or heard[0] != self._heard[rank][0]
            self._heard[rank] = heard
            if fresh:
                self._silent_seconds[rank] = -passed
        for rank in self._others:
            self._silent_seconds[rank] += passed

    def _read(self, ranks: list[int]) -> list[bytes]:
        if ranks and self._store.has_extended_api():
            return list(self._store.multi_get([str(rank) for rank in ranks]))
        return [self._store.get(str(rank)) for rank in ranks]


def _keeper() -> str:
    """Who keeps the store, as far as is known: torchrun does, else the first rank."""
    return "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
