"""Passes over the loader: which batches were handed out, which of them observed, and passes that were abandoned.

A loader fetches ahead, so batches are handed out before anybody trains on them: two workers with two batches each are
handed four, and one more for every batch that is taken from the loader.

    handed out   1 2 3 4 5     | 6     | 7     | ...      | last |
    observed                 1 |     2 |     3 | ...             | last
    waiting                  5 |     5 |     5 |          handed out and not observed, just before an `observe`

The first `observe` measures how many batches wait; as long as batches are handed out, that number must stay the same.
If it falls, a batch was observed twice; if it would rise, a batch was not observed. After the last batch is handed out
this check is impossible: then an `observe` too many raises an error and discards the epoch, and one too few leaves the
pass incomplete, so that the epoch begins again.

A pass may be abandoned before its end:

    nothing was observed      no warning (a look at the first batch, an evaluation); an error the second time in a row
                              that all batches were handed out with gradients enabled
    some batches observed     a warning; an error the second time in a row that all batches were handed out
"""

from __future__ import annotations

import warnings

from paceline.data.pruning.policy import PruningError


class OutstandingBatches:
    """The batches of one pass that were handed out and not yet observed; batches count from `first`.

    >>> batches = OutstandingBatches(batches=3)
    >>> batches.hand_out()
    0
    >>> batches.expect()
    0
    >>> batches.mark_observed()
    >>> batches.expect()
    Traceback (most recent call last):
    paceline.data.pruning.policy.PruningError: no batch is waiting: observe() was called twice for batch 1, or ...
    """

    def __init__(self, *, batches: int, first: int = 0) -> None:
        self.batches, self.first = batches, first
        self.handed_out = self.observed = first
        self.failed = self.ended = False
        self.trains = False
        """Whether gradients were enabled when batches were handed out: an evaluation observes nothing."""
        self._ahead: int | None = None
        self.same_batch_again = True
        """Whether the next `observe` comes without a hand-out in between: it may be of the same batch once more."""

    @property
    def size(self) -> int:
        """The number of batches of the pass."""
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
        """Give the next batch to the loader; return its number, from 0."""
        waiting = self.handed_out - self.observed
        if self._ahead is not None and waiting >= self._ahead:
            self._fail(
                f"batch {self.observed + 1} was not observed, and the next one has been taken from the loader: call "
                "observe() once for every batch, or skip() for one that is to be left out"
            )
        self.handed_out += 1
        self.same_batch_again = False
        return self.handed_out - 1

    def expect(self) -> int:
        """Return the number (from 0) of the batch that the next `observe` is for; PruningError if there is none."""
        waiting = self.handed_out - self.observed
        if self.failed:
            raise PruningError("this pass has failed before: begin the epoch again with a new `for` over the loader")
        if not waiting:
            again = f"observe() was called twice for batch {self.observed}, or " if self.observed else ""
            raise PruningError(f"no batch is waiting: {again}nothing has been taken from the loader")
        if waiting != self._ahead and self._ahead is not None and not self.same_batch_again and not self.exhausted:
            self._fail(
                f"observe() was called more than once for a batch before batch {self.observed + 1}: call it once for "
                "every batch, with the losses of all its samples"
            )
        return self.observed

    def mark_observed(self) -> None:
        """Count the batch that was expected as observed."""
        if self._ahead is None:
            self._ahead = self.handed_out - self.observed
        self.same_batch_again = True
        self.observed += 1

    def _fail(self, why: str) -> None:
        self.failed = True
        raise PruningError(f"{why} (what was observed in this epoch is forgotten; begin it again)")


class AbandonedPasses:
    """Counts how many passes in a row were abandoned without an `observe`, and how many with too few.

    >>> AbandonedPasses().add(OutstandingBatches(batches=2), epoch=1)
    """

    def __init__(self) -> None:
        self._unobserved = self._incomplete = 0

    def clear(self) -> None:
        """Start counting anew, after a pass that came to its end."""
        self._unobserved = self._incomplete = 0

    def add(self, abandoned: OutstandingBatches, *, epoch: int) -> None:
        """Warn of a pass that was abandoned before its end, and refuse what looks like a mistake."""
        if not abandoned.begun:
            self._unobserved += abandoned.exhausted and abandoned.trains
            self._refuse_second(self._unobserved, f"none of the batches of epoch {epoch} was observed")
        elif not abandoned.failed:  # a pass that failed has raised an error already
            observed = f"{abandoned.observed} of {abandoned.batches} batches of epoch {epoch} were observed"
            self._incomplete = self._incomplete + 1 if abandoned.exhausted else 0
            self._refuse_second(self._incomplete, observed)
            warnings.warn(
                f"{observed}: it is begun again, and what was observed in it is forgotten; call observe() for every "
                "batch, or end_epoch() to end an epoch early",
                stacklevel=5,
            )

    def _refuse_second(self, passes: int, observed: str) -> None:
        if passes > 1:
            self.clear()
            raise PruningError(
                f"{observed}, and so it was in the pass before: call observe(losses) once for every batch, with losses "
                "of reduction='none'"
            )
