"""Schedules as data: what each device computes, in which order. One rule makes all four.

The orders are data, so that a step can be drawn and timed without processes. What runs are torch's schedule classes.

A device works through its forwards F(0), F(1), ... and its backwards B(0), B(1), ... each in order. It begins with
`warm` forwards, and then takes one forward and one backward in turn while there are forwards left:

    gpipe         warm = all                               Huang et al 2019
    1f1b          warm = k - 1 - d                         PipeDream-Flush; Narayanan et al 2021
    interleaved   warm = 2 (k - 1 - d) + (chunks - 1) r    Narayanan et al 2021; r micro-batches make a round
    zero-bubble   as 1f1b, and B is I and W apart          ZB-H1 of Qi et al 2023; W comes d backwards after its I

for device d of k. With several chunks the forwards are those of a round through the device's first piece, the same
through its second, and so on, and then the next round; backwards come from the last piece to the first.

The pictures are of slots: F and B take one, I and W half of one. Digits are micro-batches, dots are idle.

    gpipe, 3 stages, 4 micro-batches
      device 0  |F0F1F2F3........B0B1B2B3|
      device 1  |..F0F1F2F3....B0B1B2B3..|
      device 2  |....F0F1F2F3B0B1B2B3....|

    1f1b, 3 stages, 4 micro-batches: the same idle time, but device d holds at most 3 - d micro-batches
      device 0  |F0F1F2....B0F3B1..B2..B3|
      device 1  |..F0F1..B0F2B1F3B2..B3..|
      device 2  |....F0B0F1B1F2B2F3B3....|

    interleaved, 2 stages, 4 micro-batches, 2 chunks; small letters are of the device's second piece
      device 0  |F0F1f0f1F2b0F3b1f2B0f3B1..b2..b3B2B3|
      device 1  |..F0F1f0b0f1b1F2B0F3B1f2b2f3b3B2B3..|

    zero-bubble, 3 stages, 4 micro-batches; a slot is four characters wide
      device 0  |F0==F1==F2==....I0W0F3==I1W1..I2W2..I3W3|
      device 1  |....F0==F1==..I0F2==I1W0F3==I2W1..I3W2W3|
      device 2  |........F0==I0F1==I1F2==I2W0F3==I3W1W2W3|

The order is that in which torch's ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B and, with one stage on a rank,
ScheduleInterleavedZeroBubble compute, by test. What they refuse is refused here, before a process is started.

How much of the devices' time is idle can be counted, for k equal stages, m micro-batches and messages that cost
nothing. A picture of the forward half of a step; the backward half is its mirror image:

    device 0  |F0 F1 F2 F3 .  . |     each device has m slots of work in a half of k - 1 + m slots
    device 1  |.  F0 F1 F2 F3 . |     idle before a device's work: 0 + 1 + ... + (k-1) = k (k-1) / 2 slots
    device 2  |.  .  F0 F1 F2 F3|     idle after it:               (k-1) + ... + 1 + 0 = k (k-1) / 2 slots

The lecture on distributed training that this follows counts one of the two triangles in each half, and prints

    without pipelining   (1/2) (1 - 1/k)             with   (1/2) (1 - m/(k-1+m))

Counting every idle slot there are both triangles, and so twice as much:

    without pipelining   1 - 1/k                     with   (k-1) / (k-1+m)

The second is GPipe's known figure (Huang et al 2019). Without pipelining is with one micro-batch. The count does not
depend on what forward and backward cost, as long as they cost every stage the same; it holds for gpipe and for 1f1b.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import NamedTuple

from paceline.lookup import unknown

MOST_ACTIONS = 200_000  # forwards of a step: an order of so many is made in a second
FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F", "B", "I", "W"


class Action(NamedTuple):
    """One thing that a device computes: kind "F", "B" (the whole backward), "I" or "W" (its two parts).

    >>> str(Action(piece=2, kind="F", microbatch=0))
    'F of micro-batch 0 through piece 2'
    """

    piece: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.microbatch} through piece {self.piece}"


Orders = tuple[tuple[Action, ...], ...]
"""For each device what it computes, in order."""


@dataclass(frozen=True, kw_only=True)
class ScheduleEntry:
    """A schedule: what it does, the pieces of each device, whether backward is in two parts.

    >>> SCHEDULES["interleaved"].chunks, SCHEDULES["interleaved"].takes_chunks
    (2, True)
    """

    description: str
    chunks: int = 1
    takes_chunks: bool = False
    splits_backward: bool = False


SCHEDULES = MappingProxyType(
    {
        "gpipe": ScheduleEntry(description="all micro-batches forward, then all backward; holds all of them"),
        "1f1b": ScheduleEntry(description="forward and backward in turn; as fast as gpipe, holds fewer micro-batches"),
        "interleaved": ScheduleEntry(
            description="1f1b with several pieces on each device; less idle time, more messages",
            chunks=2,
            takes_chunks=True,
        ),
        "zero-bubble": ScheduleEntry(
            description="1f1b with the weights' gradients put where a device would be idle", splits_backward=True
        ),
    }
)
"""Every schedule by its name in a recipe."""


def find(name: str) -> ScheduleEntry:
    """Return the schedule of that name.

    >>> find("zero-bubble").splits_backward
    True
    >>> find("zerobubble")
    Traceback (most recent call last):
    ValueError: unknown schedule 'zerobubble'; did you mean 'zero-bubble'? choose from gpipe, 1f1b, interleaved, ...
    """
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    return SCHEDULES[name]


def why_not(name: str, stages: int, microbatches: int, chunks: int | None = None) -> str | None:
    """Return why a schedule cannot be carried out with these numbers, and what could be; None if it can.

    >>> print(why_not("gpipe", stages=4, microbatches=2))
    None
    >>> print(why_not("1f1b", stages=4, microbatches=2))
    1f1b needs at least as many micro-batches as stages (microbatches=2, stages=4); take 4 or more, or gpipe
    """
    entry = find(name)
    chunks = entry.chunks if chunks is None else chunks
    for field, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            return f"{field} must be at least 1 ({field}={value})"
    if stages * microbatches * chunks > MOST_ACTIONS:
        given = f"stages={stages}, microbatches={microbatches}, chunks={chunks}"
        return f"stages x micro-batches x chunks must be at most {MOST_ACTIONS:,} ({given}); take fewer micro-batches"
    if chunks > 1 and not entry.takes_chunks:
        several = ", ".join(other for other, its in SCHEDULES.items() if its.takes_chunks)
        return f"{name} has one piece on each device (chunks={chunks}); for more take {several}"
    if name == "1f1b" and microbatches < stages:
        given = f"microbatches={microbatches}, stages={stages}"
        return f"1f1b needs at least as many micro-batches as stages ({given}); take {stages} or more, or gpipe"
    if name in ("interleaved", "zero-bubble") and not _fits_rounds(stages, microbatches):
        given = f"microbatches={microbatches}, stages={stages}"
        below = next(m for m in range(microbatches, 0, -1) if _fits_rounds(stages, m))
        above = next(m for m in count(microbatches) if _fits_rounds(stages, m))
        rounds = f"{microbatches // stages} rounds of at least {stages} micro-batches, all equally long"
        return f"{name} goes in {rounds} ({given}); take {below} or {above}, or 1f1b"
    return None


def orders(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Orders:
    """Return what each device computes, in order.

    >>> for order in orders("1f1b", stages=2, microbatches=3):
    ...     print(*(f"{action.kind}{action.microbatch}" for action in order))
    F0 F1 B0 F2 B1 B2
    F0 B0 F1 B1 F2 B2
    """
    entry = find(name)
    reason = why_not(name, stages, microbatches, chunks)
    if reason is not None:
        raise ValueError(reason)
    chunks = entry.chunks if chunks is None else chunks
    length = _round_length(stages, microbatches)
    every = chunks * microbatches
    hops = 2 if name == "interleaved" else 1
    rows = []
    for device in range(stages):
        warm = every if name == "gpipe" else hops * (stages - 1 - device) + (chunks - 1) * length
        pieces = range(device, stages * chunks, stages)
        forwards = _in_rounds(FORWARD, pieces, microbatches, length)
        if entry.splits_backward:
            inputs = _in_rounds(INPUT_GRADIENT, pieces[::-1], microbatches, length)
            weights = _in_rounds(WEIGHT_GRADIENT, pieces[::-1], microbatches, length)
            rows.append(_row(forwards, inputs, weights, warm=warm, late=device))
        else:
            rows.append(_row(forwards, _in_rounds(BACKWARD, pieces[::-1], microbatches, length), warm=warm))
    return tuple(rows)


def in_flight(name: str, stages: int, microbatches: int, chunks: int | None = None) -> tuple[int, ...]:
    """Return for each piece the most micro-batches whose activations it holds at once, counted from the order.

    A forward adds one; the whole backward or the gradient of the weights, whichever is last, lets it go.

    >>> in_flight("gpipe", stages=3, microbatches=4), in_flight("1f1b", stages=3, microbatches=4)
    ((4, 4, 4), (3, 2, 1))
    >>> in_flight("zero-bubble", stages=3, microbatches=6)
    (3, 3, 3)
    """
    held: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for order in orders(name, stages, microbatches, chunks):
        for action in order:
            if action.kind == FORWARD:
                held[action.piece] += 1
                most[action.piece] = max(most[action.piece], held[action.piece])
            elif action.kind != INPUT_GRADIENT:
                held[action.piece] -= 1
    return tuple(most[piece] for piece in range(len(most)))


def _fits_rounds(stages: int, microbatches: int) -> bool:
    return microbatches % max(1, microbatches // stages) == 0


def _round_length(stages: int, microbatches: int) -> int:
    """Return how many micro-batches go through one piece of a device before its next one has its turn.

    >>> _round_length(4, 8), _round_length(4, 10), _round_length(4, 3)
    (4, 5, 3)
    """
    return microbatches // max(1, microbatches // stages)


def _in_rounds(kind: str, pieces: Sequence[int], microbatches: int, length: int) -> list[Action]:
    """Return the actions round by round, and in a round piece by piece.

    >>> [tuple(action) for action in _in_rounds("F", (0, 2), microbatches=4, length=2)][:5]
    [(0, 'F', 0), (0, 'F', 1), (2, 'F', 0), (2, 'F', 1), (0, 'F', 2)]
    """
    return [
        Action(piece, kind, microbatch)
        for first in range(0, microbatches, length)
        for piece in pieces
        for microbatch in range(first, min(first + length, microbatches))
    ]


def _row(
    forwards: list[Action], backwards: list[Action], weights: Sequence[Action] = (), *, warm: int, late: int = 0
) -> tuple[Action, ...]:
    """Apply the rule at the top of this file to one device; weights' gradients are `late` backwards behind."""
    row = forwards[:warm]
    for place, backward in enumerate(backwards):
        row += forwards[warm + place : warm + place + 1]
        row.append(backward)
        if place >= late:
            row += weights[place - late : place - late + 1]
    row += weights[max(0, len(backwards) - late) :]
    return tuple(row)


# -- idle time by formula ----------------------------------------------------------------------------------------------


def lecture_idle(stages: int, microbatches: int) -> float:
    """Return the idle share by the lecture's formula, which is half of the count.

    >>> lecture_idle(stages=3, microbatches=6)
    0.125
    """
    _check_positive(stages, microbatches)
    return (1 - microbatches / (stages - 1 + microbatches)) / 2


def counted_idle(stages: int, microbatches: int) -> float:
    """Return the idle share with gpipe or 1f1b, every idle slot counted.

    >>> counted_idle(stages=3, microbatches=6)
    0.25
    """
    _check_positive(stages, microbatches)
    return (stages - 1) / (stages - 1 + microbatches)


def _check_positive(stages: int, microbatches: int) -> None:
    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1 ({name}={value})")
