"""The sizes that a driver gives its workers: those of the last `Assign`, which are all there is to know.

    Assign((0, 18), (1, 6))      worker 0: 18, worker 1: 6, any other: batch_size
    Assign((0, 12), (2, 12))     worker 1, which has left: batch_size, if it comes back

So a driver, a replay and the strategy's own `SpeedShares` have the same sizes after the same actions.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.decoding import Count, WorkerNumber, decode
from paceline.events import Assign
from paceline.strategies.shares.sharing import SharesBySpeed


class BatchSizes:
    """How many samples the next batch of each worker has; 0 where shares are equal, and nobody assigns any.

    >>> sizes = BatchSizes(SharesBySpeed(batch_size=12))
    >>> sizes.assign(Assign(samples=((0, 18), (1, 6))))
    >>> sizes.samples(1), sizes.samples(2), BatchSizes(None).samples(0)
    (6, 12, 0)
    """

    def __init__(self, shares: SharesBySpeed | None) -> None:
        self.shares, self._usual = shares, 0 if shares is None else shares.batch_size
        self._assigned: dict[int, int] = {}

    @property
    def by_speed(self) -> bool:
        """Whether sizes are assigned at all."""
        return self._usual > 0

    def samples(self, worker: int) -> int:
        """Return the size of the next batch that a worker begins."""
        return self._assigned.get(worker, self._usual)

    def assign(self, action: Assign) -> None:
        """Take over an assignment."""
        self._assigned = dict(action.samples)

    def state_dict(self) -> list[tuple[int, int]]:
        """Return what is assigned, as plain values."""
        return sorted(self._assigned.items())

    def load_state_dict(self, state: Sequence[Sequence[int]]) -> None:
        """Go on from a `state_dict`."""
        self._assigned = dict(decode(tuple[tuple[WorkerNumber, Count], ...], state, "assigned"))
