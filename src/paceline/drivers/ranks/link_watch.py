"""Whether payloads are worth their while on this link: what they cost, against what the vectors themselves would take.

    after step     3, 4, 5                   7 .. 12                                    12
                   an all-reduce of zeros    the least seconds on the wire, and of      the two are compared
                   is timed, each time       encoding and decoding

The all-reduce is of a megabyte at the most: on a link where that takes long, so does every step without a codec. It
begins when a step has ended, on all ranks at nearly the same time and with nothing else under way, and nobody waits for
it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from paceline.codecs.requests import AllReduce
from paceline.drivers.ranks.exchanging import Underway
from paceline.exchanges import ExchangeProtocol

PROBED_STEPS = (3, 4, 5)  # before, kernels are compiled and buckets made anew
FIRST_WATCHED, LAST_WATCHED = 7, 12
PROBE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCosts:
    """What a step costs: payloads on the wire, their coding; and what the vectors themselves would be on the wire.

    >>> LinkCosts(wire_seconds=0.010, coding_seconds=0.020, plain_seconds=0.025).is_dearer
    True
    """

    wire_seconds: float
    coding_seconds: float
    plain_seconds: float

    @property
    def is_dearer(self) -> bool:
        """Whether the vectors themselves would be quicker."""
        return self.wire_seconds + self.coding_seconds > self.plain_seconds


class LinkWatch:
    """Watches the first steps of ranks that exchange so many bytes of vectors in each; all ranks do so alike."""

    def __init__(self, vector_bytes: int) -> None:
        self._vector_bytes, self._steps = vector_bytes, 0
        self._wire_seconds = self._coding_seconds = self._probe_seconds = math.inf
        self._zeros = torch.zeros(max(1, min(PROBE_BYTES, vector_bytes) // 4))

    def end_step(self, taken: Collection[Underway]) -> LinkCosts | None:
        """Look at the exchanges of a step; return what was found, after the last of the steps that are watched."""
        self._steps += 1
        if not FIRST_WATCHED <= self._steps <= LAST_WATCHED:
            return None
        on_wire = covered_seconds([span for underway in taken for span in underway.on_wire])
        self._wire_seconds = min(self._wire_seconds, on_wire)
        self._coding_seconds = min(self._coding_seconds, sum(underway.busy_seconds for underway in taken))
        if self._steps < LAST_WATCHED or math.isinf(self._probe_seconds):
            return None
        return LinkCosts(
            wire_seconds=self._wire_seconds,
            coding_seconds=self._coding_seconds,
            plain_seconds=self._probe_seconds * self._vector_bytes / self._zeros.nbytes,
        )

    def probe(self) -> ExchangeProtocol | None:
        """Return the all-reduce that is to be timed after this step, if there is one."""
        return _all_reduce(self._zeros) if self._steps in PROBED_STEPS else None

    def probed(self, underway: Underway) -> None:
        """Look at an all-reduce that has ended."""
        seconds = covered_seconds(underway.on_wire)
        self._probe_seconds = min(self._probe_seconds, seconds or math.inf)  # none if it has failed


def _all_reduce(zeros: torch.Tensor) -> ExchangeProtocol:
    return (yield AllReduce(zeros))


def covered_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Return how long at least one of these spans of time, from and to, was.

    >>> covered_seconds([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
