"""How far a run has come: round, time, the losses and accuracy last measured, and how much was pruned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.traces import Evaluation, Pruned

if TYPE_CHECKING:
    from paceline.training import Batches, Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a run after a round; `loss`, `accuracy` and `test_loss` are those last measured.

    >>> Progress(round=3, seconds=0.4).loss is None
    True
    """

    round: int
    seconds: float
    loss: float | None = None
    accuracy: float | None = None
    test_loss: float | None = None


class Evaluations:
    """The measurements of a run's model, in order.

    >>> evaluations = Evaluations()
    >>> from paceline.training import Measurement
    >>> _ = evaluations.add(round=0, seconds=0.0, measured=Measurement(loss=2.3, accuracy=0.1, test_loss=2.4))
    >>> evaluations.progress(round=1, seconds=0.5)
    Progress(round=1, seconds=0.5, loss=2.3, accuracy=0.1, test_loss=2.4)
    """

    def __init__(self) -> None:
        self.diverged = False  # a loss that is not finite was measured, or a step said so
        self.all: list[Evaluation] = []

    def add(self, *, round: int, seconds: float, measured: Measurement) -> Progress:
        """Keep what was measured after a round."""
        self.diverged = self.diverged or not math.isfinite(measured.loss)
        self.all.append(
            Evaluation(
                round=round,
                seconds=seconds,
                loss=measured.loss,
                accuracy=measured.accuracy,
                test_loss=measured.test_loss,
            )
        )
        return self.progress(round=round, seconds=seconds)

    def progress(self, *, round: int, seconds: float) -> Progress:
        """Return the progress after a round, with what was last measured."""
        if not self.all:
            return Progress(round=round, seconds=seconds)
        last = self.all[-1]
        return Progress(round=round, seconds=seconds, loss=last.loss, accuracy=last.accuracy, test_loss=last.test_loss)


def passes_made(batches: Batches | None) -> bool:
    """Return whether a run that ends by its passes is over: every worker has made them.

    >>> passes_made(None)
    False
    """
    return batches is not None and batches.pruned is not None and batches.pruned.all_passes_made


def pruned_of(batches: Batches | None) -> Pruned | None:
    """Return how much was left out so far; None where nothing is pruned, or nothing is trained.

    One process plays all workers here, and so knows which samples each of them left out.

    >>> pruned_of(None) is None
    True
    """
    if batches is None or batches.pruned is None:
        return None
    pruned = batches.pruned
    return Pruned(sat_out=pruned.sat_out, share_pruned=pruned.share_pruned, passes=pruned.passes)
