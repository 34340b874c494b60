"""Random histories of a cluster, and what a strategy makes of them.

A history is a list of moves. A gradient's version is given by its age, so that one list makes sense for every
strategy, whatever version it has come to. Batches are of one size that nobody says, or (`sized_histories`) each of its
own; then worker 0 takes three times as long for a sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from hypothesis import strategies as st

from paceline.events import Action, Event, GradientArrived, Joined, Left, LossSeen, Step

WORKERS = 5


@dataclass(frozen=True)
class Join:
    worker: int


@dataclass(frozen=True)
class Leave:
    worker: int


@dataclass(frozen=True)
class Deliver:
    worker: int
    age: int = 0
    blocks_done: int = 4
    samples: int = 0


@dataclass(frozen=True)
class TellLoss:
    worker: int
    age: int = 0


Move: TypeAlias = Join | Leave | Deliver | TellLoss
Played: TypeAlias = list[tuple[Event, list[Action]]]

_EVERYBODY = range(WORKERS)
_ON_TIME: list[Move] = [Deliver(worker) for worker in _EVERYBODY]
_LATE: list[Move] = [Deliver(worker, 1, blocks_done) for worker in _EVERYBODY for blocks_done in (1, 3, 4)]
_ODD: list[Move] = [Deliver(worker, age, 2) for worker in _EVERYBODY for age in (0, 2, 4)]
_COMING_AND_GOING: list[Move] = [move(worker) for worker in _EVERYBODY for move in (Join, Leave, Join, Leave)]
_LOSSES: list[Move] = [TellLoss(worker, age) for worker in _EVERYBODY for age in (0, 1)]
_MOVES = 8 * _ON_TIME + 2 * _LATE + _ODD + _COMING_AND_GOING + _LOSSES


_SIZES = (4, 8, 8, 20)


def _of_bytes(drawn: bytes) -> list[Move]:
    """A move for each byte: hypothesis draws all bytes at once, and moves one by one in several times as long."""
    return [_MOVES[byte % len(_MOVES)] for byte in drawn]


def _sized(moves: list[Move]) -> list[Move]:
    return [
        replace(move, samples=_SIZES[(place + move.worker) % len(_SIZES)]) if isinstance(move, Deliver) else move
        for place, move in enumerate(moves)
    ]


histories = st.builds(
    lambda first, drawn: [Join(worker) for worker in range(first)] + _of_bytes(drawn),
    st.integers(0, WORKERS),
    st.binary(max_size=8) | st.binary(min_size=20, max_size=40),
)
sized_histories = histories.map(_sized)
any_histories = histories | sized_histories


def event_of(move: Move, version: int, at_seconds: float) -> Event:
    match move:
        case Join(worker):
            return Joined(worker=worker, at_seconds=at_seconds)
        case Leave(worker):
            return Left(worker=worker, at_seconds=at_seconds)
        case Deliver(worker, age, blocks_done, samples):
            seconds = samples * (3.0 if worker == 0 else 1.0)
            return GradientArrived(
                worker=worker,
                version=max(0, version - age),
                blocks_done=blocks_done,
                blocks=4,
                at_seconds=at_seconds,
                work_seconds=seconds * blocks_done / 4 if samples else None,
                samples=samples,
            )
        case TellLoss(worker, age):
            return LossSeen(worker=worker, version=max(0, version - age), mean=1.0 + worker, variance=0.5, samples=8)


def play(running: Any, moves: list[Move], *, start_seconds: int = 0) -> Played:
    """Let the moves happen, one a second; what happened, and what the strategy asked for each time."""
    played: Played = []
    for seconds, move in enumerate(moves, start=start_seconds):
        event = event_of(move, running.version, float(seconds))
        played.append((event, running.handle(event)))
    return played


def members(played: Played) -> set[int]:
    """Who is alive at the end."""
    alive: set[int] = set()
    for event, _ in played:
        if isinstance(event, Joined):
            alive.add(event.worker)
        elif isinstance(event, Left):
            alive.discard(event.worker)
    return alive


def steps_of(played: Played) -> list[Step]:
    return [action for _, actions in played for action in actions if isinstance(action, Step)]
