"""What workers put on the network when they come to a sum: how often they wait for each other, and for how many bytes.

With N workers around a ring, and B bytes of a message, each worker

    all-reduce   hops 2 (N - 1)     gives 2 (N - 1) / N  B
    gather       hops   (N - 1)     gives    (N - 1)     B

and sends that take place at the same time add bytes, but no hops.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """The hops of an exchange, one after the other, and the bytes that each worker gives to the network.

    >>> Traffic(hops=2, given_bytes=100.0) + Traffic(given_bytes=8.0)
    Traffic(hops=2, given_bytes=108.0)
    """

    hops: int = 0
    given_bytes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.hops + other.hops, self.given_bytes + other.given_bytes)


NO_TRAFFIC = Traffic()


def all_reduce_traffic(message_bytes: float, workers: int) -> Traffic:
    """Return the traffic of a vector that is added up on its way.

    >>> all_reduce_traffic(8, workers=4)
    Traffic(hops=6, given_bytes=12.0)
    """
    hops = 2 * (workers - 1)
    return Traffic(hops, hops * (message_bytes / workers))


def gather_traffic(message_bytes: float, workers: int) -> Traffic:
    """Return the traffic of messages that go to everybody.

    >>> gather_traffic(8, workers=4)
    Traffic(hops=3, given_bytes=24)
    """
    return Traffic(workers - 1, (workers - 1) * message_bytes)
