"""A few words of every rank to every rank, through the store of their life; whoever does not come is named.

A collective of the backend would bring them too, but one that waits for a dead rank does not say for whom. Here every
rank writes its words under a key of its own, so that it is known whose are missing; and a rank that ends with an error
leaves word, so that nobody waits for it. It is for before and after the averages; among them, where ranks hear each
other's beats, numbers are told by `Averager.gather_numbers`.
"""

from __future__ import annotations

import json
import time
from typing import Any

from paceline.drivers.collective.common import RankGoneError, first_line
from paceline.drivers.collective.handshake import named

POLL_SECONDS = (0.005, 0.1)  # at first, and at most
LEFT = "left"


class Roll:
    """Calls the roll of the ranks; every rank makes the same calls in the same order.

    `launch` is what all lives of this launch share, and no other launch has.

    >>> import torch.distributed as dist
    >>> store = dist.HashStore()
    >>> Roll(store, 0, 1, timeout_seconds=1.0).call("say what it has", [50, 40])
    [[50, 40]]
    >>> Roll(dist.HashStore(), 1, 2, timeout_seconds=0.1).call("say what it has", [])
    Traceback (most recent call last):
    paceline.drivers.collective.common.RankGoneError: rank 1 waited 0.1 s for rank 0 to say what it has
    """

    def __init__(self, store: Any, rank: int, world: int, *, timeout_seconds: float, launch: str = "") -> None:
        self.rank, self.world, self.launch = rank, world, launch
        self._store, self.timeout_seconds = store, timeout_seconds
        self._calls = 0

    def call(self, what: str, words: Any) -> list[Any]:
        """Every rank's words, of plain values; `what` says in errors what a rank was to do."""
        keys = [f"{self._calls}/{rank}" for rank in range(self.world)]
        self._calls += 1
        try:
            self._store.set(keys[self.rank], json.dumps(words))
            self._wait_for(keys, what)
            return [json.loads(self._store.get(key)) for key in keys]
        except RankGoneError:
            raise
        except RuntimeError as error:
            lost = f"rank {self.rank} waited for all ranks to {what}, and the store is lost"
            raise RankGoneError(f"{lost}: {first_line(error)}") from error

    def _wait_for(self, keys: list[str], what: str) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        poll_seconds = POLL_SECONDS[0]
        while not self._store.check(keys):
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            left = self._left(missing)
            if left:
                raise RankGoneError(f"{left} (it was to {what})")
            if missing and time.monotonic() > deadline:
                waited = f"rank {self.rank} waited {self.timeout_seconds:g} s"
                raise RankGoneError(f"{waited} for {named(missing)} to {what}")
            time.sleep(poll_seconds)
            poll_seconds = min(2 * poll_seconds, POLL_SECONDS[1])

    def leave(self, reason: str) -> None:
        """This rank ends before its time: whoever waits for it, now or later, is told why."""
        self._store.set(f"{LEFT}/{self.rank}", reason)
        self._store.add(LEFT, 1)

    def _left(self, missing: list[int]) -> str:
        if not self._store.add(LEFT, 0):  # one question, however many ranks
            return ""
        for rank in missing:
            if self._store.check([f"{LEFT}/{rank}"]):
                return f"rank {rank} has left: {self._store.get(f'{LEFT}/{rank}').decode()}"
        return ""
