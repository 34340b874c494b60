"""What the experiments on pruning share: how large a training is, its seeds, and the remarks on both."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.reproduce.experiment import ExperimentPlan
from paceline.reproduce.published import PRUNING_EPOCHS

if TYPE_CHECKING:
    from paceline.reproduce.pruning_training import PruningSize

CIFAR_SAMPLES, PAPER_BATCH = 50_000, 128
NO_FIGURE = "not readable: the text has no figures"
SMALLER = "LeNet learns {images:,} images of CIFAR-10 in {epochs} epochs, in place of 50,000 in 200."
NOT_STATED = "The paper states neither PruningNum nor the tolerance, the block or the count: these are ours."


def size_document(plan: ExperimentPlan, *, laboratory: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size of a training at the size of the plan, as plain values.

    >>> size_document(ExperimentPlan(size="full"), laboratory={"images": 1000})["images"]
    50000
    """
    from paceline.reproduce.pruning_training import PruningSize

    toy = PruningSize(data="digits", shrink=1, images=128, epochs=10, batch=32, padding=1)
    full = PruningSize(shrink=1, images=CIFAR_SAMPLES, epochs=PRUNING_EPOCHS, padding=4)
    small = dataclasses.replace(PruningSize(), **laboratory)
    document = dataclasses.asdict(plan.choose(toy=toy, laboratory=small, full=full))
    return {**document, "falls_at": list(document["falls_at"])}


def size_of(document: Mapping[str, Any]) -> PruningSize:
    """Return the size of a training of which these are the plain values."""
    from paceline.reproduce.pruning_training import PruningSize

    return PruningSize(**{**document, "falls_at": tuple(document["falls_at"])})


def at_least_two_seeds(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the seeds of the plan, and a second one where it has only one: trainings are compared."""
    return plan.seeds if len(plan.seeds) > 1 else (plan.seeds[0], plan.seeds[0] + 1)
