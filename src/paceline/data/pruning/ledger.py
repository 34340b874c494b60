"""Which batches were handed out, and which of them have been observed.

A loader fetches ahead, so batches are handed out before anybody trains on them: two workers with two batches each are
handed four, and one more for every batch that is taken from the loader.

    handed out   1 2 3 4 5     | 6     | 7     | ...      | last |
    observed                 1 |     2 |     3 | ...             | last
    not observed             5 |     5 |     5 |               at the first `observe` after a hand-out: always as many

So a loader need not be asked how far it fetches ahead. Where that number falls, a batch was observed twice; where it
would rise, one was not observed at all. Once the last is handed out this can no longer be seen; then the number of
batches tells, and an epoch in which it is wrong does not count.
"""

from __future__ import annotations


class PruningError(RuntimeError):
    """Batches were not observed one by one; what was observed in this epoch is forgotten, nothing is counted wrongly.

    >>> raise PruningError("no batch is waiting to be observed")
    Traceback (most recent call last):
    paceline.data.pruning.ledger.PruningError: no batch is waiting to be observed
    """


class Ledger:
    """The books of one pass over the loader; batches count from `first`.

    >>> ledger = Ledger(batches=3)
    >>> ledger.hand_out()
    0
    >>> ledger.expect()
    0
    >>> ledger.done()
    >>> ledger.expect()
    Traceback (most recent call last):
    paceline.data.pruning.ledger.PruningError: no batch is waiting: observe() was called twice for batch 1, or ...
    """

    def __init__(self, *, batches: int, first: int = 0) -> None:
        self.batches, self.first = batches, first
        self.handed_out = self.observed = first
        self.spoilt = self.ended = False
        self.trains = False  # whether anybody could have trained on what was handed out
        self._ahead: int | None = None
        self.same_batch_again = True
        """Whether the next `observe` comes without a hand-out in between: it may be of the same batch once more."""

    @property
    def size(self) -> int:
        """How many batches the pass has."""
        return self.batches - self.first

    @property
    def complete(self) -> bool:
        """Whether every batch of the epoch has been observed."""
        return self.observed == self.batches

    @property
    def exhausted(self) -> bool:
        """Whether every batch has been handed out."""
        return self.handed_out == self.batches

    @property
    def begun(self) -> bool:
        """Whether any batch of this pass has been observed."""
        return self.observed > self.first

    def hand_out(self) -> int:
        """The next batch goes to the loader; returns its number, from 0."""
        waiting = self.handed_out - self.observed
        if self._ahead is not None and waiting >= self._ahead:
            self._spoil(
                f"batch {self.observed + 1} was not observed, and the next one has been taken from the loader: call "
                "observe() once for every batch, or skip() for one that is to be left out"
            )
        self.handed_out += 1
        self.same_batch_again = False
        return self.handed_out - 1

    def expect(self) -> int:
        """The batch that is observed next, from 0; nothing is changed by asking."""
        waiting = self.handed_out - self.observed
        if self.spoilt:
            raise PruningError("this pass has failed before: begin the epoch again with a new `for` over the loader")
        if not waiting:
            again = f"observe() was called twice for batch {self.observed}, or " if self.observed else ""
            raise PruningError(f"no batch is waiting: {again}nothing has been taken from the loader")
        if waiting != self._ahead and self._ahead is not None and not self.same_batch_again and not self.exhausted:
            self._spoil(
                f"observe() was called more than once for a batch before batch {self.observed + 1}: call it once for "
                "every batch, with the losses of all its samples"
            )
        return self.observed

    def done(self) -> None:
        """The batch that was expected has been observed."""
        if self._ahead is None:
            self._ahead = self.handed_out - self.observed
        self.same_batch_again = True
        self.observed += 1

    def _spoil(self, why: str) -> None:
        self.spoilt = True
        raise PruningError(f"{why} (what was observed in this epoch is forgotten; begin it again)")
