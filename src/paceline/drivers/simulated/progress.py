"""How far a run has come: round, time, the loss and accuracy last measured, and how much was pruned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.traces import Evaluation, Pruned

if TYPE_CHECKING:
    from paceline.training import Batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a run after a round; `loss` and `accuracy` are those last measured.

    >>> Progress(round=3, seconds=0.4).loss is None
    True
    """

    round: int
    seconds: float
    loss: float | None = None
    accuracy: float | None = None


class Evaluations:
    """The measurements of a run's model, in order.

    >>> evaluations = Evaluations()
    >>> _ = evaluations.add(round=0, seconds=0.0, measured=(2.3, 0.1))
    >>> evaluations.progress(round=1, seconds=0.5)
    Progress(round=1, seconds=0.5, loss=2.3, accuracy=0.1)
    """

    def __init__(self) -> None:
        self.diverged = False  # a loss that is not finite was measured, or a step said so
        self.all: list[Evaluation] = []

    def add(self, *, round: int, seconds: float, measured: tuple[float, float | None]) -> Progress:
        """Keep a loss and an accuracy that were measured after a round."""
        loss, accuracy = measured
        self.diverged = self.diverged or not math.isfinite(loss)
        self.all.append(Evaluation(round=round, seconds=seconds, loss=loss, accuracy=accuracy))
        return self.progress(round=round, seconds=seconds)

    def progress(self, *, round: int, seconds: float) -> Progress:
        """Return the progress after a round, with what was last measured."""
        if not self.all:
            return Progress(round=round, seconds=seconds)
        return Progress(round=round, seconds=seconds, loss=self.all[-1].loss, accuracy=self.all[-1].accuracy)


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
