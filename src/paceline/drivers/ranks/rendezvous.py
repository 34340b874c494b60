"""How the ranks of a launch agree on who takes part in this attempt, through the launch's store.

A launch is one torchrun, or one `paceline train`; each time that it starts its processes is an attempt. After a restart
the store still holds the keys of the dead processes. torchrun's restart count is no help to tell attempts apart: it is
per machine, so two ranks of one attempt may have different counts. So every process draws a random token, and rank 0
publishes a roster: a new random name for the attempt, and the token of every rank:

    key           rank 0                          rank 1                      rank 1, next attempt
    token/1                                       writes t
    roster        (A: token 0, t)
    ack/1                                         finds t in A, writes A;
                                                  dies before all have
    token/1                                                                   writes u
    roster        sees u: (B: token 0, u)
    ack/1                                                                     finds u in B, writes B
    go            all wrote B: B                                              reads B

A process that finds its own token in a roster knows that the roster is of its own attempt; an old roster holds the
token of a dead process. The attempt's name (A, B) is the prefix of all store keys of its process group: under an old
prefix gloo would connect to the addresses of dead processes.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.decoding import decode, parse_object
from paceline.distributed import RankGoneError, first_line, name_ranks
from paceline.distributed.stores import StoreGather
from paceline.drivers.ranks.launch import STORE, Place
from paceline.files import read_plain, write_file

POLL_SECONDS = 0.02
PARTING_SECONDS = (5.0, 1.0)  # how long rank 0 keeps its store for the others: when all went well, and after an error
LOCALHOST = "127.0.0.1"
MOST_PORT_BYTES = 10
PREFIX = "paceline"  # of all keys: torchrun keeps its own in the same store
LAUNCH, ROSTER, GO = "launch", "roster", "go"  # keys in the store


@contextmanager
def joined(place: Place, *, timeout_seconds: float) -> Iterator[StoreGather]:
    """Make the default process group (gloo) of all ranks, and destroy it at the end of the `with`.

    If this rank ends with an error, the error is posted in the store first, so that the others do not wait for it.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    try:
        store = open_store(os.environ, place, timeout)
        roster = meet(store, place.rank, place.world, timeout_seconds=timeout_seconds)
        ours = dist.PrefixStore(roster.attempt, store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=ours, rank=place.rank, world_size=place.world, timeout=timeout)
    except RankGoneError:
        raise
    except (dist.DistError, RuntimeError) as error:
        raise RankGoneError(
            f"rank {place.rank} waited {timeout_seconds:g} s for all {place.world} ranks to meet: {first_line(error)}"
        ) from error
    words = dist.PrefixStore("gather", ours)  # type: ignore[attr-defined]
    ranks = StoreGather(words, place.rank, place.world, timeout_seconds=timeout_seconds, launch=roster.launch)
    parting_seconds, failed_seconds = PARTING_SECONDS
    try:
        ranks.gather("connect", None)  # a barrier: a rank that failed now would close connections still being made
        yield ranks
    except BaseException as error:
        parting_seconds = failed_seconds
        with suppress(RuntimeError):  # the store may be lost, with the process that kept it
            ranks.post_failure(f"{type(error).__name__}: {first_line(error)}")
        raise
    finally:
        with suppress(RuntimeError):  # after a death there is nobody to part from
            dist.destroy_process_group()
        with suppress(RuntimeError):
            _part(ours, place, parting_seconds)


def _part(store: Any, place: Place, seconds: float) -> None:
    """Leave the store. Rank 0, which may keep it, waits for the others, but not for long: one of them may be dead."""
    parted, deadline = store.add("parted", 1), time.monotonic() + seconds
    while place.rank == 0 and parted < place.world and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        parted = store.add("parted", 0)


def open_store(environment: Mapping[str, str], place: Place, timeout: datetime.timedelta) -> Any:
    """Connect to the store of the launch. It waits for no rank: `meet` does, and names those that are missing."""
    if STORE in environment:
        return _local_store(Path(environment[STORE]), place, timeout)
    try:
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (KeyError, ValueError):
        raise ValueError("MASTER_ADDR and MASTER_PORT must say where rank 0 is, as torchrun sets them") from None
    agents = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process keeps the store
    hosts = not agents and place.rank == 0
    store = dist.TCPStore(host, port, is_master=hosts, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
    return dist.PrefixStore(PREFIX, store)  # type: ignore[attr-defined]


def keep_store(timeout_seconds: float, *, launch: str = "") -> Any:
    """Keep a store for ranks that this process starts elsewhere, at a port that was free, and return it.

    The ranks find it by MASTER_ADDR, MASTER_PORT and TORCHELASTIC_USE_AGENT_STORE, as that of torchrun's own process.
    It listens on every interface, and is gone with the object that is returned. With `launch` the ranks are of that
    launch, which has been started again; else of a new one.

    >>> keep_store(5.0).port > 0
    True
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store = dist.TCPStore(LOCALHOST, 0, is_master=True, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
    if launch:
        dist.PrefixStore(PREFIX, store).set(LAUNCH, launch)  # type: ignore[attr-defined]
    return store


def _local_store(file: Path, place: Place, timeout: datetime.timedelta) -> Any:
    """Connect to the store of ranks on one machine: rank 0 keeps it, at a port that it writes to a file."""
    if place.rank == 0:
        kept = dist.TCPStore(LOCALHOST, 0, is_master=True, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
        write_file(file, str(kept.port))
        return dist.PrefixStore(PREFIX, kept)  # type: ignore[attr-defined]
    deadline = time.monotonic() + timeout.total_seconds()
    while not file.is_file():
        if time.monotonic() > deadline:
            raise RankGoneError(f"rank {place.rank} waited {timeout.total_seconds():g} s for rank 0 to come")
        time.sleep(POLL_SECONDS)
    port = int(read_plain(file, most_bytes=MOST_PORT_BYTES))
    store = dist.TCPStore(LOCALHOST, port, is_master=False, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
    return dist.PrefixStore(PREFIX, store)  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class RankRoster:
    """What rank 0 publishes: random ids of this attempt and of the launch, and the token of each rank's process.

    >>> roster = RankRoster(attempt="a1", launch="b2", tokens=["c3", "d4"])
    >>> decode(RankRoster, parse_object(roster.to_json().encode())) == roster
    True
    """

    attempt: str
    launch: str
    tokens: list[str]

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def meet(store: Any, rank: int, world: int, *, timeout_seconds: float) -> RankRoster:
    """Wait until all ranks have acknowledged one roster; RankGoneError names those that have not come.

    >>> len(meet(dist.HashStore(), 0, 1, timeout_seconds=1.0).tokens)
    1
    >>> meet(dist.HashStore(), 0, 3, timeout_seconds=0.1)
    Traceback (most recent call last):
    paceline.distributed.RankGoneError: rank 0 waited 0.1 s for rank 1 and rank 2 to come
    """
    handshake = Handshake(store=store, rank=rank, world=world)
    handshake.write_token()
    deadline = time.monotonic() + timeout_seconds
    while True:
        roster = handshake.advance()
        if roster is not None:
            return roster
        if time.monotonic() > deadline:
            missing = handshake.missing()
            late = "all ranks to acknowledge one roster: they have only just come"
            who = f"{name_ranks(missing)} to come" if missing else late
            raise RankGoneError(f"rank {rank} waited {timeout_seconds:g} s for {who}")
        time.sleep(POLL_SECONDS)


@dataclass(kw_only=True)
class Handshake:
    """One process's side of a rendezvous.

    A key is read only once it exists: `store.get` would block, and its timeout does not say which rank is missing.
    """

    store: Any
    rank: int
    world: int
    token: str = field(default_factory=lambda: os.urandom(8).hex())
    acknowledged: str = ""

    def write_token(self) -> None:
        self.store.set(f"token/{self.rank}", self.token)

    def advance(self) -> RankRoster | None:
        """Do what can be done now; return the roster once all have acknowledged it."""
        if self.rank == 0:
            self._publish_roster()
        roster = self._roster()
        if roster is None:
            return None
        if self.acknowledged != roster.attempt:
            self.store.set(f"ack/{self.rank}", roster.attempt)
            self.acknowledged = roster.attempt
        if self.rank == 0 and not self._silent(roster):
            self.store.set(GO, roster.attempt)
        return roster if self._read(GO) == roster.attempt else None

    def missing(self) -> list[int]:
        """Return the ranks that have not come, or only in an attempt before."""
        never = [rank for rank in range(self.world) if self._read(f"token/{rank}") is None]
        roster = self._roster()
        if never or roster is None:
            return never or [0]
        return self._silent(roster)

    def _publish_roster(self) -> None:
        tokens = [self._read(f"token/{rank}") for rank in range(self.world)]
        came = [token for token in tokens if token is not None]
        roster = self._roster()
        if len(came) < self.world or (roster is not None and roster.tokens == came):
            return
        launch = self._read(LAUNCH)
        if launch is None:
            launch = os.urandom(8).hex()
            self.store.set(LAUNCH, launch)
        self.store.set(ROSTER, RankRoster(attempt=os.urandom(8).hex(), launch=launch, tokens=came).to_json())

    def _roster(self) -> RankRoster | None:
        """Return the roster that was published, if this very process is on it."""
        text = self._read(ROSTER)
        roster = None if text is None else decode(RankRoster, parse_object(text.encode()))
        ours = roster is not None and len(roster.tokens) == self.world and roster.tokens[self.rank] == self.token
        return roster if ours else None

    def _silent(self, roster: RankRoster) -> list[int]:
        return [rank for rank in range(self.world) if self._read(f"ack/{rank}") != roster.attempt]

    def _read(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None
