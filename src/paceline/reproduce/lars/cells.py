"""A cell of a table is a network, an optimiser, a batch and a rate, and is trained once for every seed.

    LarsCell ──> cell_settings(plan, cell, seed) ──> Job(run_large_batch, settings)

What a cell leaves open (epochs, warm-up, augmentation) follows from the size: in the laboratory it is the same for all
cells, and at full size it is what the paper's runs have. Equal cells of two experiments have equal settings, so their
outcomes are computed once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.reproduce.experiment import ExperimentPlan, Job
from paceline.reproduce.large_batch_training import run_large_batch
from paceline.reproduce.lars.networks import (
    FULL_MODEL,
    INCEPTION,
    LABORATORY_MODEL,
    NORMED,
    PLAIN,
    RESIDUAL,
    Augment,
    paper_augmentation,
    paper_warmup_epochs,
)


@dataclass(frozen=True, kw_only=True)
class LarsCell:
    """A cell is one training of a table, but for its seed. What is None is as usual for the size.

    >>> LarsCell(network="plain", optimizer="SGD", batch=128, rate=0.025).label
    'plain SGD batch 128 rate 0.025'
    """

    network: str
    optimizer: str
    batch: int
    rate: float
    epochs: int | None = None
    warmup_share: float | None = None
    augment: Augment | None = None

    @property
    def label(self) -> str:
        """Return the cell in words; no other cell has the same."""
        more = [
            f"{self.epochs} epochs" if self.epochs else "",
            f"warm-up {self.warmup_share:g}" if self.warmup_share is not None else "",
            self.augment or "",
        ]
        name = f"{self.network} {self.optimizer} batch {self.batch} rate {self.rate:g}"
        return " ".join([name, *filter(None, more)])

    def job(self, seed: int) -> str:
        """Return the name of the job with this seed.

        >>> LarsCell(network="plain", optimizer="SGD", batch=128, rate=0.1).job(200)
        'plain SGD batch 128 rate 0.1 seed 200'
        """
        return f"{self.label} seed {seed}"


def usual_epochs(plan: ExperimentPlan) -> int:
    """Return the epochs of a cell that does not say how many.

    >>> usual_epochs(ExperimentPlan())
    64
    """
    return int(plan.choose(toy=2, laboratory=64, full=100))


def warmup_share(plan: ExperimentPlan, cell: LarsCell) -> float:
    """Return the share of its steps in which a cell's rate rises: the paper's epochs of warm-up at full size.

    >>> cell = LarsCell(network="plain", optimizer="LARS", batch=16_384, rate=14, epochs=200)
    >>> warmup_share(ExperimentPlan(), cell), warmup_share(ExperimentPlan(size="full"), cell)
    (0.1, 0.01)
    """
    if cell.warmup_share is not None:
        return cell.warmup_share
    if plan.size != "full":
        return 0.1
    return paper_warmup_epochs(cell.network, cell.optimizer, cell.batch) / (cell.epochs or usual_epochs(plan))


def cell_augmentation(plan: ExperimentPlan, cell: LarsCell) -> Augment:
    """Return how a cell's images are varied: as the paper's at full size, and else only where the cell says so.

    >>> cell = LarsCell(network="inception", optimizer="LARS", batch=256, rate=4)
    >>> cell_augmentation(ExperimentPlan(), cell), cell_augmentation(ExperimentPlan(size="full"), cell)
    ('none', 'extended')
    """
    if cell.augment is not None:
        return cell.augment
    return paper_augmentation(cell.network, cell.optimizer) if plan.size == "full" else "none"


def cell_settings(plan: ExperimentPlan, cell: LarsCell, seed: int) -> dict[str, Any]:
    """Return the settings of a cell's job; equal cells of two experiments have equal settings, and so share a run.

    >>> cell = LarsCell(network="normed", optimizer="LARS", batch=8192, rate=14)
    >>> [cell_settings(ExperimentPlan(size=size), cell, 200)["model"] for size in ("laboratory", "full")]
    ['small-cnn-bn', 'alexnet-bn']
    """
    choice = plan.choose(
        toy={"data": "digits", "shrink": 1, "images": 512, "held_out": 256},
        laboratory={"data": "fashion-mnist", "shrink": 2, "images": 16_384, "held_out": 10_000},
        full={"data": "fashion-mnist", "shrink": 1, "images": 49_152, "held_out": 10_000},
    )
    full = plan.size == "full"
    return {
        "choice": choice,
        "model": (FULL_MODEL if full else LABORATORY_MODEL)[cell.network],
        "optimizer": cell.optimizer,
        "batch": cell.batch,
        "rate": cell.rate,
        "epochs": cell.epochs or usual_epochs(plan),
        "seed": seed,
        "part": plan.choose(toy=128, laboratory=1024, full=256),
        "trust_coefficient": 0.001 if full else 0.1,
        "scale_all": full,
        "warmup": warmup_share(plan, cell),
        "decay_from": "start" if full else "warmup",
        "augment": cell_augmentation(plan, cell),
        "points": plan.choose(toy=2, laboratory=16, full=25),
    }


def cell_seconds(plan: ExperimentPlan, cell: LarsCell) -> float:
    """Return about how long a run takes on one core, points of its curve included.

    With other work beside, the small CNN took 0.25 s for an epoch, and 0.5 s in batches of 128; the small GoogLeNet
    took 2.0 and 2.6 s. The paper's networks took 9 to 80 images a second.
    """
    epochs, small = cell.epochs or usual_epochs(plan), cell.batch < 1024
    if plan.toy:
        return 0.3
    if plan.size == "full":
        images_per_second = {PLAIN: 55.0, NORMED: 80.0, RESIDUAL: 9.0, INCEPTION: 10.0}[cell.network]
        return epochs * 49_152 / images_per_second
    of_an_epoch = (2.6 if small else 2.0) if cell.network == INCEPTION else (0.5 if small else 0.25)
    varied = {"none": 1.0, "minimal": 1.1, "extended": 1.25}[cell_augmentation(plan, cell)]
    return epochs * of_an_epoch * varied + (16 if cell.network == INCEPTION else 3)


def cell_jobs(plan: ExperimentPlan, cells: Iterable[LarsCell]) -> list[Job]:
    """Return a job for each cell and seed; a cell that comes twice is one job."""
    return [
        Job(
            name=cell.job(seed),
            run=run_large_batch,
            settings=cell_settings(plan, cell, seed),
            seconds=cell_seconds(plan, cell),
        )
        for cell in dict.fromkeys(cells)
        for seed in plan.seeds
    ]
