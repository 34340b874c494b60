"""What a collective of all workers costs: the ring, in which everybody sends to the next and hears from the one before.

All-reduce of vectors that can be added up: each is cut into N parts, which go round once to be added and once more to
be told. Where payloads cannot be added up (codecs), they all go round whole, and everybody adds for itself:

    all-reduce   2 (N - 1) rounds of 1/N of a message     2 (N - 1) * (latency + bytes / N / bandwidth)
    all-gather     (N - 1) rounds of a whole message        (N - 1) * (latency + bytes / bandwidth)

The bytes hardly matter for how large N is in the first, and grow with N in the second: a codec must save more than half
of N before it pays. The server's link does not count: there is none. The ring goes at the pace of its largest message.
"""

from __future__ import annotations

from paceline.drivers.simulated.network import BITS_PER_BYTE, Network


def ring_seconds(network: Network, *, workers: int, message_bytes: int, gathers: bool = False) -> float:
    """How long the ring takes, from when the last worker is there until all have the sum.

    >>> network = Network(latency_seconds=0.5, worker_bits_per_second=8.0)
    >>> [ring_seconds(network, workers=4, message_bytes=8, gathers=gathers) for gathers in (False, True)]
    [15.0, 25.5]
    >>> ring_seconds(network, workers=1, message_bytes=8)
    0.0
    """
    if workers < 1 or message_bytes < 0:
        raise ValueError(
            f"workers must be 1 or more, and message_bytes 0 or more (workers={workers}, message_bytes={message_bytes})"
        )
    hops, part_bytes = (workers - 1, message_bytes) if gathers else (2 * (workers - 1), message_bytes / workers)
    return hops * (network.latency_seconds + part_bytes * BITS_PER_BYTE / network.worker_bits_per_second)
