"""torch.distributed's key-value store (TCPStore, FileStore): a private connection, and an all-gather of small values.

An all-gather of the backend that waits for a dead rank does not say which rank it waits for. `StoreGather` does: every
rank writes a JSON value under its own key, so the missing ranks are known, and a rank that ends with an error posts the
reason, so that nobody waits for it. It is slow, and used before and after training; while ranks average, and send each
other heartbeats, `Averager.gather_numbers` is used.

    <number>/<rank>    the value of a rank in a gather; deleted when all have come to the next
    came/<rank>        how many gathers a rank has come to
    came               the sum of all of those, and LEFT for each rank that has left or given up: all that a waiting
                       rank asks for, however many ranks there are
    <number>/late      the error of a rank that has given up, for those that wait with it

A store whose process is stopped answers nobody, and no call of torch's to it has a limit. So a thread asks it, and the
caller waits for the thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from paceline.distributed import RankGoneError, first_line, name_ranks
from paceline.errors import PacelineError

POLL_SECONDS = (0.005, 0.1)  # at first, and at most
SLICE_SECONDS = 0.1  # of a wait for the thread that asks, between two looks at what else is known
ANSWER_SECONDS = 5.0  # for the last answers of a store, after the limit of a gather
LINGER_SECONDS = 1.0  # for which a rank that has given up stays at most, so that the others hear of it
T = TypeVar("T")
CAME, FAILED, LATE = "came", "left", "late"
LEFT = 1 << 40  # more than all ranks will ever come to
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


def launcher_keeps_store() -> bool:
    """Return whether the launch's store is torchrun's; else it is in the process of rank 0, and ends with it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet_ranks(
    ranks: Sequence[int], doing: str, words: Any = None, *, purpose: str, timeout_seconds: float
) -> list[Any]:
    """Gather a small value of each of these ranks before they have a group; RankGoneError names who does not come.

    Whatever meets other ranks in its constructor calls it first, on each of them and as often (`RankGroup`, `compress`,
    `Balance`): torch's own waits, while a group is made, are longer than asked, and name a key of
    the store. `doing` completes "waited for rank 1 to ..."; `purpose` keeps meetings of different kinds apart.
    """
    rank, stop = dist.get_rank(), threading.Event()
    place, name = list(ranks).index(rank), hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]

    def ask() -> list[Any]:
        store = private_store(f"meet/{purpose}/{name}")
        gather = StoreGather(store, place, len(ranks), timeout_seconds=timeout_seconds, ranks=ranks)
        return gather.ask(doing, words, stop, again=True)

    try:
        return ask_within(ask, timeout_seconds, f"rank {rank} waited for all ranks to {doing}")
    finally:
        stop.set()


class _OutOfTime(Exception):  # noqa: N818
    """Not all ranks have come in time; the words say who."""


class FleetingStore:
    """The private store of this name, looked up at each call: nothing holds it, so that it ends with its group.

    >>> FleetingStore("compress/1").check
    Traceback (most recent call last):
    ValueError: Default process group has not been initialized, please make sure to call init_process_group.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(private_store(self._name), name)


class StoreGather:
    """All-gathers small JSON values through a store; every rank must make the same calls in the same order.

    `launch` is an id that all processes of one launch share (one torchrun or `paceline train`), also after restarts.
    `ranks` are their numbers in errors, where they are not 0, 1, ... `while_waiting` is called now and then, and may
    raise what else is known of a rank that does not come.

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
        ranks: Sequence[int] = (),
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.world, self.launch, self._while_waiting = rank, world, launch, while_waiting
        self._store, self.timeout_seconds = store, timeout_seconds
        self._ranks = list(ranks) or list(range(world))

    def gather(self, doing: str, words: Any) -> list[Any]:
        """Return the JSON-serialisable value `words` of every rank, by rank.

        `doing` completes "waited for rank 1 to ..." in errors.
        """
        stop, waited = threading.Event(), f"rank {self._ranks[self.rank]} waited for all ranks to {doing}"
        try:
            ask = partial(self.ask, doing, words, stop)
            return ask_within(ask, self.timeout_seconds, waited, while_waiting=self._while_waiting)
        finally:
            stop.set()

    # -- on the thread that asks ---------------------------------------------------------------------------------------

    def ask(self, doing: str, words: Any, stop: threading.Event, *, again: bool = False) -> list[Any]:
        """Gather on this thread, until `stop`; with `again` a rank that waited in vain counts as not come."""
        number = self._store.add(f"{CAME}/{self.rank}", 1) - 1
        keys = [f"{number}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], json.dumps(words))
        if self._store.add(CAME, 0) % LEFT == number * self.world:  # the first; all have taken an earlier try back
            self._store.delete_key(f"{number}/{LATE}")
        self._store.add(CAME, 1)
        try:
            self._wait_for(number, keys, doing, stop)
        except (RankGoneError, _OutOfTime) as error:
            if not again or self._counts_as_not_come(number):
                if isinstance(error, _OutOfTime):
                    self._store.set(f"{number}/{LATE}", str(error))
                    self._store.add(CAME, LEFT)
                if again:
                    self._take_back(number)
                raise RankGoneError(str(error)) from None
        if number:  # all have come here, and so have read what there was before
            self._store.delete_key(f"{number - 1}/{self.rank}")
        return [json.loads(value) for value in read_keys(self._store, keys)]

    def _wait_for(self, number: int, keys: list[str], doing: str, stop: threading.Event) -> None:
        deadline, poll_seconds, left_before = time.monotonic() + self.timeout_seconds, POLL_SECONDS[0], 0
        while True:
            left, came = divmod(self._store.add(CAME, 0), LEFT)  # one question, however many ranks
            if came >= (number + 1) * self.world:
                return
            over = time.monotonic() > deadline
            if left != left_before or over:
                left_before = left
                if self._store.check([f"{number}/{LATE}"]):
                    raise RankGoneError(self._store.get(f"{number}/{LATE}").decode())
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                failed = self._posted_failure(missing) if left else ""
                if failed:
                    raise RankGoneError(f"{failed} (it was to {doing})")
                if missing and over:
                    who = name_ranks(self._ranks[rank] for rank in missing)
                    late = f"rank {self._ranks[self.rank]} waited {self.timeout_seconds:g} s for {who} to {doing}"
                    raise _OutOfTime(late)
            if stop.wait(poll_seconds):
                raise RankGoneError(f"nobody waits for all ranks to {doing} any more")
            poll_seconds = min(2 * poll_seconds, POLL_SECONDS[1])

    def _counts_as_not_come(self, number: int) -> bool:
        """Take this rank off the count; False, and it stays, where the last has come in this very moment."""
        if self._store.add(CAME, -1) % LEFT + 1 < (number + 1) * self.world:
            return True
        self._store.add(CAME, 1)
        return False

    def _take_back(self, number: int) -> None:
        """Let this rank come again, and stay until those that have come have heard that it gave up.

        Else the store could end before they have, or this rank could come again and take an old error for a new one.
        """
        self._store.delete_key(f"{number}/{self.rank}")
        self._store.add(f"{CAME}/{self.rank}", -1)
        deadline = time.monotonic() + LINGER_SECONDS
        while self._store.add(CAME, 0) % LEFT > number * self.world and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS[0])

    def _posted_failure(self, missing: list[int]) -> str:
        for rank in missing:
            if self._store.check([f"{FAILED}/{rank}"]):
                return f"rank {self._ranks[rank]} has left: {self._store.get(f'{FAILED}/{rank}').decode()}"
        return ""

    def post_failure(self, reason: str) -> None:
        """Say why this rank ends before its time, to whoever waits for it now or later."""
        self._store.set(f"{FAILED}/{self.rank}", reason)
        self._store.add(CAME, LEFT)


def read_keys(store: Any, keys: list[str]) -> list[bytes]:
    """Return the values of keys that are there, by one question where the store takes such."""
    if keys and store.has_extended_api():
        return list(store.multi_get(keys))
    return [store.get(key) for key in keys]


def ask_within(
    question: Callable[[], T], seconds: float, waited: str, *, while_waiting: Callable[[], None] = lambda: None
) -> T:
    """Return what a thread gets for a question to the store; RankGoneError where it gets no answer in this time."""
    answers: list[T] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            answers.append(question())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask, name="paceline-store", daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds + ANSWER_SECONDS
    thread.join(SLICE_SECONDS)
    while thread.is_alive():
        while_waiting()
        if time.monotonic() > deadline:
            keeper = "the launcher" if launcher_keeps_store() else "rank 0"
            raise RankGoneError(f"{waited}, and {keeper}, which keeps the store, has not answered for {seconds:g} s")
        thread.join(SLICE_SECONDS)
    for error in errors:
        if isinstance(error, RuntimeError) and not isinstance(error, PacelineError):
            raise RankGoneError(f"{waited}, and the store is lost: {first_line(error)}") from error
        raise error
    return answers[0]
