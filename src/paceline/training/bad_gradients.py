"""Gradients that are not finite: when their worker is to blame, and when training has diverged.

One rule for a server and for ranks. Such a gradient is left out, and its worker tries again with its next batch: one
odd batch, or a loss scaler that looks for its scale, ends nothing. A worker that sends `most` in a row gets no further
try. If nothing finite has come in the open round, and everybody else who takes part has sent such a gradient of it
too, the model is at fault: training has diverged. Else that worker's data is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

Verdict = Literal["again", "its worker", "diverged"]


class BadGradients:
    """The gradients that are not finite, of every worker in a row and of the open round.

    >>> bad = BadGradients(most=2)
    >>> bad.refused(0, fresh=True, members=[0, 1]), bad.refused(0, fresh=True, members=[0, 1])
    ('again', 'its worker')
    >>> bad.refused(1, fresh=True, members=[0, 1]), bad.refused(1, fresh=True, members=[0, 1])
    ('again', 'diverged')
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_a_row: dict[int, int] = {}
        self._fresh: set[int] = set()  # workers with a bad one of the open round
        self._any_finite = False  # of the open round

    def refused(self, worker: int, *, fresh: bool, members: Collection[int]) -> Verdict:
        """Count a gradient that is not finite (`fresh`: of the open round), and return what follows from it."""
        self._in_a_row[worker] = self.in_a_row(worker) + 1
        if fresh:
            self._fresh.add(worker)
        if self.in_a_row(worker) < self._most:
            return "again"
        return "diverged" if not self._any_finite and self._fresh.issuperset(members) else "its worker"

    def finite(self, worker: int, *, fresh: bool) -> None:
        """Note that a worker's gradient is finite."""
        self._in_a_row.pop(worker, None)
        self._fresh.discard(worker)
        self._any_finite = self._any_finite or fresh

    def in_a_row(self, worker: int) -> int:
        """Return how many a worker has sent since its last finite one."""
        return self._in_a_row.get(worker, 0)

    def forget(self, worker: int) -> None:
        """Begin anew with a worker that has just come."""
        self._in_a_row.pop(worker, None)

    def round_closed(self) -> None:
        """Begin a round in which nothing has come."""
        self._fresh, self._any_finite = set(), False
