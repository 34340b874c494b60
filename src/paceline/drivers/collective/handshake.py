"""How the ranks of a launch find each other through its store, in every life of the launch anew.

A launch that starts its processes again after a death leaves its store as it was, with what the dead wrote; and how
often a process was started again its launcher counts by machine, so two ranks of one life may have different counts.
So nothing is counted. Every process draws a token, and rank 0 calls those whose tokens it finds:

    store         rank 0                          rank 1                      rank 1, next life
    token/1                                       writes t
    call          (A: token 0, t)
    ack/1                                         finds t in A, writes A;
                                                  dies before all have
    token/1                                                                   writes u
    call          sees u: (B: token 0, u)
    ack/1                                                                     finds u in B, writes B
    go            all wrote B: B                                              reads B

Whoever reads its own token in a call knows that the call is of its own life; an old call holds a token that nobody has.
The call's name is where this life's connections are made: with an old one gloo looks for the dead at their addresses.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

from paceline.distributed import RankGoneError, name_ranks

POLL_SECONDS = 0.02
LAUNCH, CALL, GO = "launch", "call", "go"


@dataclass(frozen=True, kw_only=True)
class Call:
    """What rank 0 calls: a name for this life, that of the launch, which all its lives share, and who is called.

    >>> call = Call(life="a1", launch="b2", tokens=("c3", "d4"))
    >>> Call.read(call.written()) == call
    True
    """

    life: str
    launch: str
    tokens: tuple[str, ...]

    def written(self) -> str:
        """As it is in the store."""
        return json.dumps({"life": self.life, "launch": self.launch, "tokens": self.tokens})

    @staticmethod
    def read(text: str) -> Call:
        """What was written."""
        told = json.loads(text)
        return Call(life=str(told["life"]), launch=str(told["launch"]), tokens=tuple(map(str, told["tokens"])))


def meet(store: Any, rank: int, world: int, *, timeout_seconds: float) -> Call:
    """Wait until all ranks have answered one call; RankGoneError names those who have not come.

    >>> import torch.distributed as dist
    >>> alone = meet(dist.HashStore(), 0, 1, timeout_seconds=1.0)
    >>> len(alone.tokens)
    1
    >>> meet(dist.HashStore(), 0, 3, timeout_seconds=0.1)
    Traceback (most recent call last):
    paceline.distributed.RankGoneError: rank 0 waited 0.1 s for rank 1 and rank 2 to come
    """
    handshake = _Handshake(store=store, rank=rank, world=world)
    handshake.come()
    deadline = time.monotonic() + timeout_seconds
    while True:
        call = handshake.look()
        if call is not None:
            return call
        if time.monotonic() > deadline:
            missing = handshake.missing()
            who = (
                f"{name_ranks(missing)} to come"
                if missing
                else "all ranks to answer one call: they have only just come"
            )
            raise RankGoneError(f"rank {rank} waited {timeout_seconds:g} s for {who}")
        time.sleep(POLL_SECONDS)


@dataclass(kw_only=True)
class _Handshake:
    """One process's side. It asks for no key before it is there: a store would wait for it, and for nobody by name."""

    store: Any
    rank: int
    world: int
    token: str = field(default_factory=lambda: os.urandom(8).hex())
    answered: str = ""

    def come(self) -> None:
        self.store.set(f"token/{self.rank}", self.token)

    def look(self) -> Call | None:
        """Do what is to be done now; the call, once all have answered it."""
        if self.rank == 0:
            self._call_who_came()
        call = self._own_call()
        if call is None:
            return None
        if self.answered != call.life:
            self.store.set(f"ack/{self.rank}", call.life)
            self.answered = call.life
        if self.rank == 0 and not self._silent(call):
            self.store.set(GO, call.life)
        return call if self._read(GO) == call.life else None

    def missing(self) -> list[int]:
        """Who has not come, or only in a life before."""
        never = [rank for rank in range(self.world) if self._read(f"token/{rank}") is None]
        call = self._own_call()
        if never or call is None:
            return never or [0]
        return self._silent(call)

    def _call_who_came(self) -> None:
        tokens = [self._read(f"token/{rank}") for rank in range(self.world)]
        came = tuple(token for token in tokens if token is not None)
        call = self._own_call()
        if len(came) < self.world or (call is not None and call.tokens == came):
            return
        launch = self._read(LAUNCH)
        if launch is None:
            launch = os.urandom(8).hex()
            self.store.set(LAUNCH, launch)
        self.store.set(CALL, Call(life=os.urandom(8).hex(), launch=launch, tokens=came).written())

    def _own_call(self) -> Call | None:
        """The call, if it is for this very process."""
        text = self._read(CALL)
        call = None if text is None else Call.read(text)
        ours = call is not None and len(call.tokens) == self.world and call.tokens[self.rank] == self.token
        return call if ours else None

    def _silent(self, call: Call) -> list[int]:
        return [rank for rank in range(self.world) if self._read(f"ack/{rank}") != call.life]

    def _read(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None
