"""Whether payloads are worth their while on this link: what they cost, against what the vectors themselves would take.

    step       1 .. 3            4                        5 .. 12                    12
               kernels are       an all-reduce of         the least seconds on       the two are compared, once
               compiled          zeros is timed           the wire, and encoding

The all-reduce is of a megabyte at the most: on a link where it takes long, so does every step without a codec.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.drivers.ranks.exchanging import Underway
from paceline.traffic import all_reduce_traffic

WARM_UP_STEPS, WATCHED_STEPS = 3, 12  # in the first, kernels are compiled and buckets made anew
PROBE_BYTES = 1 << 20
TIMES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCosts:
    """Seconds of a step: on the wire, and to encode and decode; and what the vectors themselves would be on the wire.

    >>> LinkCosts(wire=0.010, coding=0.020, plain=0.025).is_dearer
    True
    """

    wire: float
    coding: float
    plain: float

    @property
    def is_dearer(self) -> bool:
        """Whether the vectors themselves would be quicker."""
        return self.wire + self.coding > self.plain


class LinkWatch:
    """Watches the first steps of ranks that exchange so many bytes of vectors in each; all ranks do so at once."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._steps = group, 0
        self._wire = self._coding = self._probe = math.inf
        self._probe_bytes = 0

    def begin_step(self, vector_bytes: int) -> int:
        """Time an all-reduce, when it is time; return the bytes that were given to the network for it."""
        self._steps += 1
        if self._steps != WARM_UP_STEPS + 1 or self._group.size() == 1:
            return 0
        zeros = torch.zeros(max(1, min(PROBE_BYTES, vector_bytes) // 4))
        try:
            dist.all_reduce(zeros[:1], group=self._group)  # all are there
            for _ in range(TIMES):
                began = time.perf_counter()
                dist.all_reduce(zeros, group=self._group)
                self._probe = min(self._probe, time.perf_counter() - began)
        except RuntimeError:  # a rank is gone: the exchange that follows says so
            return 0
        self._probe_bytes = zeros.nbytes
        return TIMES * int(all_reduce_traffic(zeros.nbytes, self._group.size()).given_bytes)

    def end_step(self, taken: Collection[Underway], vector_bytes: float) -> LinkCosts | None:
        """Look at the exchanges of a step; return what was found, after the last of the steps that are watched."""
        if not (WARM_UP_STEPS + 1 < self._steps <= WATCHED_STEPS and self._probe_bytes):
            return None
        self._wire = min(self._wire, covered_seconds([each for underway in taken for each in underway.on_wire]))
        self._coding = min(self._coding, sum(underway.busy_seconds for underway in taken))
        if self._steps < WATCHED_STEPS:
            return None
        plain = self._probe * vector_bytes / self._probe_bytes
        return LinkCosts(wire=self._wire, coding=self._coding, plain=plain)


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
