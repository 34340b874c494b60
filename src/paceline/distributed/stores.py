"""torch.distributed's key-value store (TCPStore, FileStore): a private connection, and an all-gather of small values.

An all-gather of the backend that waits for a dead rank does not say which rank it waits for. `StoreGather` does: every
rank writes a JSON value under its own key, so the missing ranks are known, and a rank that ends with an error posts the
reason, so that nobody waits for it. It is slow, and used before and after training; while ranks average, and send each
other heartbeats, `Averager.gather_numbers` is used.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from paceline.distributed import RankGoneError, first_line, name_ranks
from paceline.errors import PacelineError

POLL_SECONDS = (0.005, 0.1)  # at first, and at most
FAILED = "left"
_CONNECTIONS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of a default group, for its life


def private_store(name: str, *, own_connection: bool = False) -> Any:
    """Return the default process group's store, with `name` before its keys, on a connection separate from torch's own.

    Callers share this connection, because opening one sometimes takes seconds. It is dropped with the default process
    group, so that the store can be closed. With `own_connection` nobody shares it: for a thread that waits in `get`,
    which holds up all else on its connection.
    """
    world, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
    if own_connection:
        return dist.PrefixStore(f"paceline/{name}", store.clone())  # type: ignore[attr-defined]
    if world not in _CONNECTIONS:
        _CONNECTIONS[world] = store.clone() if hasattr(store, "clone") else store
    return dist.PrefixStore(f"paceline/{name}", _CONNECTIONS[world])  # type: ignore[attr-defined]


class StoreGather:
    """All-gathers small JSON values through a store; every rank must make the same calls in the same order.

    `launch` is an id that all processes of one launch share (one torchrun or `paceline train`), also after restarts.
    `while_waiting` is called now and then, and may raise what else is known of a rank that does not come.

    >>> StoreGather(dist.HashStore(), 0, 1, timeout_seconds=1.0).gather("say what it has", [50, 40])
    [[50, 40]]
    >>> StoreGather(dist.HashStore(), 1, 2, timeout_seconds=0.1).gather("say what it has", [])
    Traceback (most recent call last):
    paceline.distributed.RankGoneError: rank 1 waited 0.1 s for rank 0 to say what it has
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        *,
        timeout_seconds: float,
        launch: str = "",
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.world, self.launch, self._while_waiting = rank, world, launch, while_waiting
        self._store, self.timeout_seconds = store, timeout_seconds
        self._gathers = 0

    def gather(self, doing: str, words: Any) -> list[Any]:
        """Return the JSON-serialisable value `words` of every rank, by rank.

        `doing` completes "waited for rank 1 to ..." in errors.
        """
        keys = [f"{self._gathers}/{rank}" for rank in range(self.world)]
        self._gathers += 1
        try:
            self._store.set(keys[self.rank], json.dumps(words))
            self._wait_for(keys, doing)
            return [json.loads(self._store.get(key)) for key in keys]
        except PacelineError:
            raise
        except RuntimeError as error:
            lost = f"rank {self.rank} waited for all ranks to {doing}, and the store is lost"
            raise RankGoneError(f"{lost}: {first_line(error)}") from error

    def _wait_for(self, keys: list[str], doing: str) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        poll_seconds = POLL_SECONDS[0]
        while not self._store.check(keys):
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            failed = self._posted_failure(missing)
            if failed:
                raise RankGoneError(f"{failed} (it was to {doing})")
            self._while_waiting()
            if missing and time.monotonic() > deadline:
                waited = f"rank {self.rank} waited {self.timeout_seconds:g} s"
                raise RankGoneError(f"{waited} for {name_ranks(missing)} to {doing}")
            time.sleep(poll_seconds)
            poll_seconds = min(2 * poll_seconds, POLL_SECONDS[1])

    def post_failure(self, reason: str) -> None:
        """Say why this rank ends before its time, to whoever waits for it now or later."""
        self._store.set(f"{FAILED}/{self.rank}", reason)
        self._store.add(FAILED, 1)

    def _posted_failure(self, missing: list[int]) -> str:
        if not self._store.add(FAILED, 0):  # one question, however many ranks
            return ""
        for rank in missing:
            if self._store.check([f"{FAILED}/{rank}"]):
                return f"rank {rank} has left: {self._store.get(f'{FAILED}/{rank}').decode()}"
        return ""
