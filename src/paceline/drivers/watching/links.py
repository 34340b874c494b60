"""What the links between neighbouring ranks carry, timed message by message.

The waits of a ring do not show which link is slow: a slow link slows all ranks alike. So now and then each rank times
messages to its neighbour, in a gloo group that nothing else uses:

    edges of a ring   0-1  1-2  2-3  3-0       first 0-1 and 2-3, then 1-2 and 3-0: each rank is in one at a time
    one edge          there, then back: a message, answered with a few bytes, all on the sender's clock; receives are
                      posted before, else gloo would ask for one first, and take two trips more

    latency     half of the shortest way there and back of a few bytes
    the rate    messages of 64 kB, 128 kB, ..., 4 MB, until two sizes have taken SLOW_SECONDS: one alone may have met
                a busy machine. The first message of a size does not count: a link that is shaped lets a burst pass at
                the line's rate. Of the others the quickest counts: whatever else the machines do makes messages
                slower, and none quicker

Every message has a time limit. After the first that fails, this rank times no links any more: training is worth more.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from paceline.distributed import first_line
from paceline.distributed.groups import close_group, make_group
from paceline.traces.step_times import LinkTimed

PROBED_STEPS = (10, 100, 1000)
EVERY_STEPS = 5000  # afterwards
SMALLEST_BYTES, LARGEST_BYTES = 64 * 1024, 4 * 1024 * 1024
SLOW_SECONDS = 0.02
ROUND_TRIPS, MESSAGES = 20, 3
LONG_SECONDS = 0.5  # messages that take as long are sent once, and no larger ones


def is_probed(step: int) -> bool:
    """Return whether links are timed when so many steps are done.

    >>> [step for step in range(12_000) if is_probed(step)]
    [10, 100, 1000, 5000, 10000]
    """
    return step in PROBED_STEPS or (step > 0 and step % EVERY_STEPS == 0)


def edges_in_turns(ranks: int) -> list[list[tuple[int, int]]]:
    """Return the edges of a ring in turns; in a turn no rank is in two edges.

    >>> edges_in_turns(4), edges_in_turns(3), edges_in_turns(2), edges_in_turns(1)
    ([[(0, 1), (2, 3)], [(1, 2), (3, 0)]], [[(0, 1)], [(1, 2)], [(2, 0)]], [[(0, 1)]], [])
    """
    if ranks < 3:
        return [[(0, 1)]] if ranks == 2 else []
    edges = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    last = [edges.pop()] if ranks % 2 else []
    return [turn for turn in (edges[::2], edges[1::2], last) if turn]


class LinkProbe:
    """Times the links of one rank among `ranks`; all of them must make and call it together.

    `failure` says why links are not timed any more.
    """

    def __init__(self, ranks: Sequence[int], *, group_timeout_seconds: float) -> None:
        self._ranks, self._place = list(ranks), list(ranks).index(dist.get_rank())
        self._group = make_group(self._ranks, "gloo", group_timeout_seconds)
        self._payload = torch.zeros(0, dtype=torch.uint8)
        self._few = torch.zeros(1, dtype=torch.int64)
        self._answered = torch.zeros(1, dtype=torch.int64)
        self._limit = datetime.timedelta(seconds=group_timeout_seconds)
        self.failure = ""

    def measure(self, at_seconds: float, timeout_seconds: float) -> list[LinkTimed]:
        """Time the links to and from both neighbours; return those from here, nothing where one has failed."""
        if self.failure:
            return []
        found: list[LinkTimed] = []
        self._limit = datetime.timedelta(seconds=timeout_seconds)
        self._payload = torch.zeros(LARGEST_BYTES, dtype=torch.uint8)
        other = self._place
        try:
            for turn in edges_in_turns(len(self._ranks)):
                for sender, receiver in [each for edge in turn if self._place in edge for each in (edge, edge[::-1])]:
                    other = receiver if sender == self._place else sender
                    if sender == self._place:
                        found.append(self._send_to(receiver, at_seconds))
                    else:
                        self._answer(sender)
        except RuntimeError as error:
            self.failure = f"links are not timed any more: no answer from rank {other} ({first_line(error)})"
            return []
        finally:
            self._payload = torch.zeros(0, dtype=torch.uint8)
        return found

    def _send_to(self, to: int, at_seconds: float) -> LinkTimed:
        """Time messages to a rank: first of a few bytes, then of sizes that are told; a size of 0 is the last."""
        latency_seconds = min(self._there_and_back(to, self._few) for _ in range(ROUND_TRIPS)) / 2
        size, was_slow = SMALLEST_BYTES, False
        while True:
            seconds = self._quickest(to, size)
            is_slow = seconds >= SLOW_SECONDS
            if (is_slow and was_slow) or seconds > LONG_SECONDS or size >= LARGEST_BYTES:
                break
            size, was_slow = 2 * size, is_slow
        self._put(torch.tensor([0]), to)
        return LinkTimed(
            at_seconds=max(0.0, at_seconds),
            to=to,
            bytes=size,
            seconds=max(0.0, seconds - latency_seconds),
            latency_seconds=latency_seconds,
        )

    def _quickest(self, to: int, size: int) -> float:
        """Return the least seconds that a message of a size takes, answer included, once a burst has passed."""
        burst_seconds = self._timed(to, size)
        found: list[float] = []
        for _ in range(MESSAGES):
            found.append(self._timed(to, size))
            quick = found[0] < SLOW_SECONDS and size < LARGEST_BYTES  # a larger one will tell more
            if quick or burst_seconds > LONG_SECONDS:
                break
        return min(found)

    def _timed(self, to: int, size: int) -> float:
        self._put(torch.tensor([size]), to)
        self._get(self._answered, to)  # its receive is posted
        return self._there_and_back(to, self._payload[:size])

    def _there_and_back(self, to: int, message: torch.Tensor) -> float:
        answer = self._group.recv([self._answered], to, 0)
        began = time.perf_counter()
        self._put(message, to)
        self._wait(answer)
        return time.perf_counter() - began

    def _answer(self, sender: int) -> None:
        """Answer messages until there are no more."""
        size = torch.zeros(1, dtype=torch.int64)
        receiving = self._group.recv([size], sender, 0)
        for _ in range(ROUND_TRIPS):
            self._wait(receiving)
            receiving = self._group.recv([size], sender, 0)  # the next one of a few bytes, or a size
            self._put(self._few, sender)
        while True:
            self._wait(receiving)
            if not 0 < size.item() <= LARGEST_BYTES:
                return
            receiving = self._group.recv([self._payload[: int(size.item())]], sender, 0)
            self._put(self._few, sender)
            self._wait(receiving)
            receiving = self._group.recv([size], sender, 0)
            self._put(self._few, sender)

    def _put(self, tensor: torch.Tensor, to: int) -> None:
        self._wait(self._group.send([tensor], to, 0))

    def _get(self, tensor: torch.Tensor, source: int) -> None:
        self._wait(self._group.recv([tensor], source, 0))

    def _wait(self, work: dist.Work) -> None:
        work.wait(self._limit)

    def close(self) -> None:
        """Let go of the group."""
        close_group(self._group, pending=bool(self.failure))
