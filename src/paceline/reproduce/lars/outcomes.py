"""Outcomes of a cell's runs are read here: as an accuracy, as the best of several cells, as a curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.reproduce.claims import mean
from paceline.reproduce.experiment import ExperimentPlan, Outcome
from paceline.reproduce.lars.cells import LarsCell

CHANCE = 15.0  # per cent; ten classes, where guessing has 10
BEHIND_BASELINE = 1.5  # points that "matched the baseline" may be behind here, where two seeds are 0.6 apart


def accuracy_of(plan: ExperimentPlan, outcomes: Mapping[str, Outcome], cell: LarsCell, key: str = "accuracy") -> float:
    """Return a cell's mean accuracy over the seeds in per cent; a run that diverged counts as 0.

    >>> cell = LarsCell(network="plain", optimizer="SGD", batch=1, rate=9.0)
    >>> accuracy_of(ExperimentPlan(), {cell.job(200): {"accuracy": None}}, cell)
    0.0
    """
    return mean([outcomes[cell.job(seed)][key] or 0.0 for seed in plan.seeds]) or 0.0


def best_of(plan: ExperimentPlan, outcomes: Mapping[str, Outcome], cells: Sequence[LarsCell]) -> tuple[LarsCell, float]:
    """Return the cell that is best on the images held out, and its accuracy on the test images."""
    best = max(cells, key=lambda cell: accuracy_of(plan, outcomes, cell, "held_out"))
    return best, accuracy_of(plan, outcomes, best)


def curve_of(plan: ExperimentPlan, outcomes: Mapping[str, Outcome], cell: LarsCell) -> list[dict[str, float]]:
    """Return a cell's curve, averaged over the seeds, up to the last point that all of them have."""
    curves = [outcomes[cell.job(seed)]["curve"] for seed in plan.seeds]
    keys = ("epoch", "train_loss", "test_loss", "accuracy")
    return [
        {key: sum(float(point[key]) for point in together) / len(together) for key in keys}
        for together in zip(*curves, strict=False)
    ]
