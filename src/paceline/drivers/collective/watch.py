"""What can go wrong with an average, and the error that names the rank.

the average is not done, and a rank is silent or has left       rank 2 is gone: not heard of for 15 s
the connection to a rank is lost                                 the same, as soon as its silence shows
the average is not done, and all are heard of, for too long      rank 2 has not come to average 7 in 600 s
it is done, and a rank could not bring what it had               rank 2: the change is not finite
it is done, and the ranks are in different averages              the ranks have loaded different checkpoints
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn

from paceline.codecs import NotFiniteError
from paceline.distributed import RankGoneError, first_line
from paceline.distributed.payloads import Trouble
from paceline.drivers.collective.beats import Beats
from paceline.drivers.collective.headers import DIGIT, Said

LOOK_SECONDS = 0.25  # at most so often: a step boundary is no place to linger
LOST_LOOK_SECONDS = 0.05
LOST_BEATS = 4  # without which a rank is taken for gone where a connection is lost


class Watch:
    """Looks after one rank's averages."""

    def __init__(self, beats: Beats, ranks: Sequence[int], rank: int, *, timeout_seconds: float) -> None:
        self._beats, self._ranks, self._rank = beats, list(ranks), rank
        self._timeout_seconds = timeout_seconds
        self._looked_at = 0.0

    def look(self, number: int, begun: float, what: str = "") -> None:
        """Average `number`, begun at that moment (time.perf_counter), is not done: raise if that is for ever.

        Or it is `what` comes after that average.
        """
        now = time.perf_counter()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        gone = self._beats.gone()
        if gone:
            raise RankGoneError(f"{gone} ({what or f'average {number}'} waited for it)")
        # What is heard of a rank may be a beat old: who came a moment ago must not be named.
        if now - begun > self._timeout_seconds + 2 * self._beats.interval_seconds:
            raise RankGoneError(self._late(number, what or f"average {number}"))

    def _late(self, number: int, what: str) -> str:
        averages = {rank: self._beats.averages_of(rank) for rank in self._ranks if rank != self._rank}
        missing = {rank: begun for rank, begun in averages.items() if begun is None or begun <= number}
        if not missing:
            return f"{what} was not done in {self._timeout_seconds:g} s, though all ranks have come to average {number}"
        who = " and ".join(f"rank {rank}" for rank in missing)
        least = min(begun or 0 for begun in missing.values())
        return (
            f"{who} did not come to average {number} in {self._timeout_seconds:g} s: alive, and "
            f"{'in no average yet' if not least else f'last in average {least - 1}'}. "
            "Do all ranks call flush, state_dict and close alike?"
        )

    def lost(self, what: str, error: Exception) -> NoReturn:
        """A connection is lost: find out whose, as soon as its silence or its farewell shows."""
        deadline = time.monotonic() + self._beats.silence_seconds + 5.0
        enough_seconds = LOST_BEATS * self._beats.interval_seconds  # that somebody is gone is known by now
        while time.monotonic() < deadline:
            gone = self._beats.gone(after_seconds=enough_seconds)
            if gone:
                raise RankGoneError(f"{gone} ({what} waited for it)") from error
            time.sleep(LOST_LOOK_SECONDS)
        raise RankGoneError(f"{what} has failed, though all ranks are alive: {first_line(error)}") from error

    def check(self, number: int, said: Sequence[Said], what: str, cause: Exception | None) -> None:
        """All ranks read the same words, so all raise, or none."""
        numbers = {rank: each.number for rank, each in zip(self._ranks, said, strict=True)}
        if set(numbers.values()) != {number % DIGIT}:
            places = ", ".join(f"rank {rank} in average {at}" for rank, at in numbers.items())
            raise RuntimeError(f"the ranks have loaded different checkpoints: {places}")
        troubled = [rank for rank, each in zip(self._ranks, said, strict=True) if each.trouble]
        if not troubled:
            return
        who = " and ".join(f"rank {rank}" for rank in troubled)
        if any(each.trouble == Trouble.NOT_FINITE for each in said):
            raise NotFiniteError(
                f"{who}: the {what} is not finite in average {number}; nothing of it was merged. "
                "Lower the learning rate or clip"
            ) from cause
        raise RuntimeError(
            f"{who}: the {what} could not be encoded in average {number}; the reason is with {who}"
        ) from cause
