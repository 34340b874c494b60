"""When each device does what: an exact simulation of a schedule's orders.

    device 0   |F0|F1|..............|===B0===|F2|    an action begins when its device is free
    0 -> 1        ~~>~~>                              and what it needs has arrived;
    device 1         |F0|===B0===|F1|===B1===|        messages from one device to another go one after another,
    1 -> 0                       ~~>         ~~>      in the order in which they were made; senders do not wait

Every action needs one thing, and all else follows from it:

    F of piece p        the forward message of piece p - 1              (piece 0: nothing)
    B or I of piece p   the gradient message of piece p + 1             (the last piece: its own F)
    W of piece p        its own I

A piece whose neighbour is on the same device needs no message. A message has its link to itself for all its seconds.

Where torch differs: its 1f1b waits for a message it sends together with one it receives, and gpipe for all forward
messages before the first backward. Where links are slower than devices, real steps are therefore a little longer. With
zero-bubble, torch does nothing in I of piece 0, which sends no gradient, and all of it in W; there W follows at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.pipeline.schedules import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Orders, find, orders


@dataclass(frozen=True, kw_only=True)
class PieceCost:
    """The cost of one micro-batch for a piece, on the device it is on; the whole backward is input and weight together.

    >>> PieceCost(forward_seconds=1.0, input_seconds=1.0, weight_seconds=0.5).seconds
    2.5
    """

    forward_seconds: float = 0.0
    input_seconds: float = 0.0
    weight_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward_seconds", "input_seconds", "weight_seconds"):
            _check_seconds(name, getattr(self, name))

    @property
    def backward_seconds(self) -> float:
        return self.input_seconds + self.weight_seconds

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, kw_only=True)
class MessageCost:
    """The cost of one micro-batch's messages between piece p and piece p + 1: forward, and the gradient back.

    >>> MessageCost(forward_seconds=0.1).gradient_seconds
    0.0
    """

    forward_seconds: float = 0.0
    gradient_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward_seconds", "gradient_seconds"):
            _check_seconds(name, getattr(self, name))


class Span(NamedTuple):
    """One action in time, in seconds from the begin of the step.

    >>> Span(device=0, piece=0, kind="F", microbatch=1, begin=1.0, end=1.5).seconds
    0.5
    """

    device: int
    piece: int
    kind: str
    microbatch: int
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step in time: for each device its spans, in order.

    >>> step = timeline(orders("gpipe", 2, 1), [PieceCost(forward_seconds=1.0, input_seconds=2.0)] * 2)
    >>> step.step_seconds, step.busy_seconds, step.idle
    (6.0, (3.0, 3.0), 0.5)
    """

    rows: tuple[tuple[Span, ...], ...]

    @property
    def devices(self) -> int:
        return len(self.rows)

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans, device by device."""
        return tuple(span for row in self.rows for span in row)

    @property
    def step_seconds(self) -> float:
        """The time from the first begin to the last end of all devices."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """For each device the seconds in which it computes."""
        return tuple(math.fsum(span.seconds for span in row) for row in self.rows)

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """For each device the share of the step in which it does not compute."""
        step = self.step_seconds
        return tuple(1 - busy / step if step > 0 else 0.0 for busy in self.busy_seconds)

    @property
    def idle(self) -> float:
        """The share of all devices' time in which they do not compute: 1 - busy / (devices x step)."""
        return math.fsum(self.idle_shares) / self.devices


def timeline(schedule: Orders, costs: Sequence[PieceCost], links: Sequence[MessageCost] = ()) -> Timeline:
    """Return the step that the orders come to, with the costs of each piece and of the messages between each two.

    Without links, messages take no time. Orders that wait for each other, or leave something out, are refused.

    >>> costs = [PieceCost(forward_seconds=1.0, input_seconds=1.0, weight_seconds=1.0)] * 2
    >>> timeline(orders("1f1b", 2, 2), costs).step_seconds
    9.0
    >>> timeline(orders("1f1b", 2, 2), costs, [MessageCost(forward_seconds=0.5, gradient_seconds=0.25)]).step_seconds
    9.75
    >>> timeline((orders("1f1b", 2, 2)[0], orders("1f1b", 2, 2)[1][::-1]), costs)
    Traceback (most recent call last):
    ValueError: the orders are stuck: device 1 waits for ever to begin B of micro-batch 1 through piece 1
    """
    devices, pieces = len(schedule), len(costs)
    if not devices or not pieces or pieces % devices:
        raise ValueError(f"every device must have as many pieces as any other (pieces={pieces}, devices={devices})")
    if links and len(links) != pieces - 1:
        raise ValueError(f"there must be a link between each two pieces (links={len(links)}, pieces={pieces})")
    for device, order in enumerate(schedule):
        for action in order:
            if action.kind not in KINDS or not 0 <= action.piece < pieces or action.piece % devices != device:
                raise ValueError(f"device {device} cannot do {action} (devices={devices}, pieces={pieces})")
    return _Simulation(schedule, costs, links or [MessageCost()] * (pieces - 1)).run()


def slot_timeline(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Timeline:
    """Return a schedule in slots: F and B of a piece take one, I and W half of one, messages nothing.

    >>> slot_timeline("1f1b", stages=3, microbatches=4).idle
    0.333...
    """
    schedule = orders(name, stages, microbatches, chunks)
    pieces = stages * (find(name).chunks if chunks is None else chunks)
    return timeline(schedule, [PieceCost(forward_seconds=1.0, input_seconds=0.5, weight_seconds=0.5)] * pieces)


def slots(name: str, stages: int, microbatches: int, chunks: int | None = None) -> float:
    """Return how many slots a schedule takes; with several chunks a slot is that of one piece of a device.

    >>> slots("gpipe", stages=3, microbatches=4), slots("zero-bubble", stages=3, microbatches=4)
    (12.0, 10.0)
    """
    return slot_timeline(name, stages, microbatches, chunks).step_seconds


KINDS = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
Need = tuple[str, int, int]  # "F", "B" or "W", the piece that waits for it, the micro-batch


class _Simulation:
    """Lets devices go on as far as they can; one that waits is called when what it waits for is on its way."""

    def __init__(self, schedule: Orders, costs: Sequence[PieceCost], links: Sequence[MessageCost]) -> None:
        self._schedule, self._links, self._last = schedule, links, len(costs) - 1
        self._seconds = {
            FORWARD: [cost.forward_seconds for cost in costs],
            BACKWARD: [cost.backward_seconds for cost in costs],
            INPUT_GRADIENT: [cost.input_seconds for cost in costs],
            WEIGHT_GRADIENT: [cost.weight_seconds for cost in costs],
        }
        self._there: dict[Need, float] = {}  # when what an action needs is there; taken away when it begins
        self._waits: dict[Need, int] = {}
        self._link_free: dict[tuple[int, int], float] = {}
        self._device_free = [0.0] * len(schedule)
        self._rows: list[list[Span]] = [[] for _ in schedule]
        self._called = list(range(len(schedule)))

    def run(self) -> Timeline:
        for microbatch in {action.microbatch for order in self._schedule for action in order}:
            self._bring((FORWARD, 0, microbatch), 0.0)
        while self._called:
            self._go_on(self._called.pop())
        self._check_done()
        return Timeline(rows=tuple(tuple(row) for row in self._rows))

    def _go_on(self, device: int) -> None:
        order, row, free = self._schedule[device], self._rows[device], self._device_free[device]
        while len(row) < len(order):
            action = order[len(row)]
            piece, kind, microbatch = action
            need = _need(action)
            there = self._there.pop(need, None)
            if there is None:
                self._waits[need] = device
                break
            begin = there if there > free else free
            free = begin + self._seconds[kind][piece]
            row.append(Span(device, piece, kind, microbatch, begin, free))
            self._hand_on(action, free)
        self._device_free[device] = free

    def _hand_on(self, action: Action, at: float) -> None:
        """Make possible what depends on an action that has ended `at` this time."""
        piece, kind, microbatch = action
        if kind == FORWARD and piece == self._last:
            self._bring((BACKWARD, piece, microbatch), at)
        elif kind == FORWARD:
            arrives = self._send(piece, piece + 1, self._links[piece].forward_seconds, at)
            self._bring((FORWARD, piece + 1, microbatch), arrives)
        elif kind != WEIGHT_GRADIENT and piece > 0:
            arrives = self._send(piece, piece - 1, self._links[piece - 1].gradient_seconds, at)
            self._bring((BACKWARD, piece - 1, microbatch), arrives)
        if kind == INPUT_GRADIENT:
            self._bring((WEIGHT_GRADIENT, piece, microbatch), at)

    def _send(self, piece: int, other: int, seconds: float, at: float) -> float:
        """Return when a message has arrived. A link's messages come from one device, so they are made in its order."""
        devices = len(self._schedule)
        link = (piece % devices, other % devices)
        if link[0] == link[1]:
            return at
        self._link_free[link] = max(at, self._link_free.get(link, 0.0)) + seconds
        return self._link_free[link]

    def _bring(self, need: Need, at: float) -> None:
        self._there[need] = at
        waiting = self._waits.pop(need, None)
        if waiting is not None:
            self._called.append(waiting)

    def _check_done(self) -> None:
        stuck = [device for device, row in enumerate(self._rows) if len(row) < len(self._schedule[device])]
        if stuck:
            first = min(stuck, key=lambda device: self._device_free[device])
            action = self._schedule[first][len(self._rows[first])]
            raise ValueError(f"the orders are stuck: device {first} waits for ever to begin {action}")
        if self._there:
            kind, piece, microbatch = min(self._there, key=lambda need: self._there[need])
            raise ValueError(f"the orders leave out {Action(piece, kind, microbatch)}")


def _need(action: Action) -> Need:
    piece, kind, microbatch = action
    return (BACKWARD if kind == INPUT_GRADIENT else kind, piece, microbatch)


def _check_seconds(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0 ({name}={value})")
