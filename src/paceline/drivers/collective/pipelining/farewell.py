"""What a rank does when it fails, or when another is lost.

    stage 1 fails       word in the launch's store, then closes its connections
    stage 0, stage 2    a connection is closed: look for the word, say the same, and close theirs
    stage 3             and so on, until all have stopped

So nobody waits for the deadline. Where no word was left, the rank at the other end of the closed connection is gone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.distributed import RankGoneError, first_line
from paceline.drivers.collective.pipelining.messages import Message
from paceline.drivers.collective.pipelining.rooms import forget
from paceline.pipeline import PipelineError

LOOK_SECONDS = 2.0  # in which a connection that was lost shows who is at its other end
POLL_SECONDS = 0.02
PROBE_TAG = 7001  # of messages that nobody sends
MOST_NAMED = 4  # of the ranks that are gone
Result = TypeVar("Result")


class Farewell:
    """How the rank at `place` of these ranks parts from the others; `who` says who one is."""

    def __init__(
        self,
        ranks: Sequence[int],
        place: int,
        *,
        store: Any,
        talk: dist.ProcessGroup,
        who: Callable[[int], str],
        timeout_seconds: float,
    ) -> None:
        self._ranks, self._place, self._who = ranks, place, who
        self._store, self._talk, self._timeout_seconds = store, talk, timeout_seconds
        self._never: list[Message] = []  # that none of them ends before its group does
        self.failure: Exception | None = None

    def give_up(self, error: Exception) -> Exception:
        """Leave word of an error that ends this pipeline, and let nobody wait for this rank; the error."""
        if self.failure is None:
            self.failure = error
            known = isinstance(error, PipelineError | RankGoneError)
            text = first_line(Exception(str(error if known else f"{type(error).__name__}: {error}")))
            with contextlib.suppress(RuntimeError):  # the store may be lost with whoever kept it
                self._store.set(str(self._place), text if known else f"{self._who(self._place)} has failed: {text}")
            self._hang_up()
        return error

    def lost(self, error: Exception, places: Sequence[int]) -> Exception:
        """What to raise where a message to or from one of these places has failed."""
        everyone = range(len(self._ranks))
        who = " or ".join(self._who(place) for place in places if place != self._place)
        said = first_line(error)
        if "imed out" in said:
            text = f"{self._who(self._place)} waited {self._timeout_seconds:g} s for {who}"
            return self.give_up(RankGoneError(self.left_words(everyone) or text))
        deadline = time.monotonic() + LOOK_SECONDS
        while time.monotonic() < deadline:
            gone = [place for place in everyone if place != self._place and self._is_closed(place)]
            told = self.left_words(everyone)  # a rank leaves word before it closes its connections
            if told or gone:
                return self.give_up(PipelineError(told) if told else RankGoneError(self.are_gone(gone)))
            time.sleep(POLL_SECONDS)
        return self.give_up(RankGoneError(f"{self._who(self._place)} has lost its connection to {who}: {said}"))

    def guard(self, run: Callable[[], Result]) -> Result:
        """Run what talks to other ranks, and say who is gone."""
        try:
            return run()
        except (RuntimeError, dist.DistError) as error:
            raise self.lost(error, range(len(self._ranks))) from error

    def named(self, places: Sequence[int]) -> str:
        """Some ranks in words; of many only the first."""
        more = len(places) - MOST_NAMED
        return " and ".join([*map(self._who, places[:MOST_NAMED]), *([f"{more} more"] if more > 0 else [])])

    def are_gone(self, places: Sequence[int]) -> str:
        """That they are gone."""
        return f"{self.named(places)} {'is' if len(places) == 1 else 'are'} gone"

    def left_words(self, places: Sequence[int], seconds: float = 0.0) -> str:
        """What one of these ranks has left behind; `seconds` is how long to look for it."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):  # the store may be lost
            while True:
                for place in places:
                    if place != self._place and self._store.check([str(place)]):
                        return str(self._store.get(str(place)).decode(errors="replace"))
                if time.monotonic() >= deadline:
                    break
                time.sleep(POLL_SECONDS)
        return ""

    def _is_closed(self, place: int) -> bool:
        """Whether a message from there could not come: gloo says so at once."""
        message = Message(dist.irecv, torch.empty(1, dtype=torch.uint8), self._ranks[place], self._talk, PROBE_TAG)
        self._never.append(message)
        return message.refused

    def _hang_up(self) -> None:
        """Close the connections of all groups; the next pipeline makes others."""
        for group in forget(self._ranks):
            if dist.get_backend(group) != "gloo":
                group.abort()
                continue
            # gloo has no abort. It closes all connections of a group when one wait runs out of time; that must be for a
            # rank that has not closed its own, or the wait would end at once and leave the others as they are.
            for rank in dist.get_process_group_ranks(group):
                if rank == self._ranks[self._place]:
                    continue
                never = Message(dist.irecv, torch.empty(1, dtype=torch.uint8), rank, group, PROBE_TAG)
                if "imed out" in never.wait(0.001):
                    break
