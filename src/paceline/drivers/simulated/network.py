"""How long messages take.

With a server: latency, the worker's own link, and the server's link that all share. A message flows through both links
at once; each link carries one message at a time, in order:

    server link   |==w0==|==w1==|==w2==|            bytes / server bandwidth each
    w2's link                   |========|          bytes / worker bandwidth
    arrives                              |~~>|      the later of the two ends, plus the latency

Without a server: a ring, in which every worker sends to the next and receives from the one before. Vectors that can be
added up are cut into N parts, which go round once to be added and once more to be distributed. Payloads of a codec that
cannot be added up all go round whole, and every worker adds for itself; or each worker adds up a shard of all vectors,
and what it encodes again goes round (`paceline.exchanges`):

    all-reduce   2 (N - 1) rounds of 1/N of a message     2 (N - 1) * (latency + bytes / N / bandwidth)
    all-gather     (N - 1) rounds of a whole message        (N - 1) * (latency + bytes / bandwidth)
    two-step     to all at once, then an all-gather               N * latency + 2 (N - 1) * bytes / N / bandwidth

All-reduce and two-step cost nearly the same for any N; all-gather grows with N. The ring goes at the pace of its
largest message.

Where links were measured, each worker has its own (`WorkerLink`), one of which may be slower than the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.settings import Checked, setting
from paceline.traffic import Traffic, all_reduce_traffic

BITS_PER_BYTE = 8


@dataclass(frozen=True, kw_only=True)
class Network(Checked):
    """Latency one way, and bandwidth in bits per second in each direction; infinite by default.

    >>> Network(latency_seconds=0.001, worker_bits_per_second=1e9).free
    False
    """

    latency_seconds: float = setting(0.0, "how long a message is under way, besides its bytes", least=0, most=1e6)
    worker_bits_per_second: float = setting(math.inf, "a worker's link, each way", above=0, most=1e18, infinite=True)
    server_bits_per_second: float = setting(math.inf, "the server's link, each way", above=0, most=1e18, infinite=True)

    @property
    def free(self) -> bool:
        """Whether messages cost nothing but latency."""
        return math.isinf(self.worker_bits_per_second) and math.isinf(self.server_bits_per_second)


@dataclass(frozen=True, kw_only=True)
class OneWayLink:
    """One direction of a worker's own link: what a message takes besides its bytes, and bits per second.

    >>> OneWayLink(latency_seconds=0.5, bits_per_second=8.0).seconds(3)
    3.5
    """

    latency_seconds: float = 0.0
    bits_per_second: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_seconds) and self.latency_seconds >= 0):
            raise ValueError(f"latency_seconds must be 0 or more (latency_seconds={self.latency_seconds})")
        if not self.bits_per_second > 0:
            raise ValueError(f"bits_per_second must be more than 0 (bits_per_second={self.bits_per_second})")

    def seconds(self, message_bytes: float) -> float:
        """Return what a message takes that waits for no other."""
        return self.latency_seconds + message_bytes * BITS_PER_BYTE / self.bits_per_second


@dataclass(frozen=True, kw_only=True)
class WorkerLink:
    """A worker's own link in both directions: `down` to the worker, `up` from it.

    >>> WorkerLink(up=OneWayLink(latency_seconds=0.5)).down.latency_seconds
    0.0
    """

    down: OneWayLink = field(default_factory=OneWayLink)
    up: OneWayLink = field(default_factory=OneWayLink)


class Direction:
    """The links in one direction, up or down, and until when each is busy.

    `links` are the workers' own where they were measured; else all are those of the network.

    >>> up = Direction(Network(worker_bits_per_second=8.0), workers=2)
    >>> up.arrival(worker=0, at_seconds=0.0, message_bytes=3)
    3.0
    >>> slower = Direction(Network(), workers=2, links=[OneWayLink(), OneWayLink(latency_seconds=0.5)])
    >>> slower.arrival(worker=1, at_seconds=1.0, message_bytes=3)
    1.5
    """

    def __init__(self, network: Network, workers: int, links: Sequence[OneWayLink] = ()) -> None:
        self._network = network
        own = OneWayLink(latency_seconds=network.latency_seconds, bits_per_second=network.worker_bits_per_second)
        self._links = links or [own] * workers
        self._free = network.free and all(math.isinf(link.bits_per_second) for link in self._links)
        self._worker_free = [0.0] * workers
        self._server_free = 0.0

    def arrival(self, *, worker: int, at_seconds: float, message_bytes: int) -> float:
        """Return when a message that is ready at `at_seconds` has arrived; both links are busy until it has passed."""
        link = self._links[worker]
        if self._free:
            return at_seconds + link.latency_seconds
        bits = message_bytes * BITS_PER_BYTE
        start = max(at_seconds, self._worker_free[worker])
        worker_end = start + bits / link.bits_per_second
        server_seconds = bits / self._network.server_bits_per_second
        # Its turn on the server's link counts from when it is ready: a queue on one worker's link holds up nobody else.
        self._server_free = max(at_seconds, self._server_free) + server_seconds
        server_end = max(start + server_seconds, self._server_free)
        self._worker_free[worker] = max(worker_end, server_end)
        return max(worker_end, server_end) + link.latency_seconds


def traffic_seconds(network: Network, traffic: Traffic) -> float:
    """Return the seconds from when the last worker has entered an exchange until all have the sum.

    >>> traffic_seconds(Network(latency_seconds=0.5, worker_bits_per_second=8.0), Traffic(hops=3, given_bytes=24))
    25.5
    """
    sending = traffic.given_bytes * BITS_PER_BYTE / network.worker_bits_per_second
    return traffic.hops * network.latency_seconds + sending


def ring_seconds(network: Network, *, workers: int, message_bytes: int) -> float:
    """Return the seconds from when the last worker has entered the ring until all have the sum.

    >>> ring_seconds(Network(latency_seconds=0.5, worker_bits_per_second=8.0), workers=4, message_bytes=8)
    15.0
    >>> network = Network(latency_seconds=0.5)
    >>> ring_seconds(network, workers=1, message_bytes=8)
    0.0
    """
    if workers < 1 or message_bytes < 0:
        raise ValueError(
            f"workers must be 1 or more, and message_bytes 0 or more (workers={workers}, message_bytes={message_bytes})"
        )
    return traffic_seconds(network, all_reduce_traffic(message_bytes, workers))
