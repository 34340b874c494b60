"""What `large-batch` runs: sizes, cells (an optimiser at a batch size), and the tasks of each phase."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.options import Options
from paceline.optim.schedules import scale_lr
from paceline.reproduce.large_batch_training import OPTIMIZERS, WITH_LARS, WITH_SGD

__all__ = [
    "FINAL",
    "LINEAR",
    "OPTIMIZERS",
    "QUICK",
    "SEEDS",
    "TUNING",
    "TUNING_SEED",
    "WITH_LARS",
    "WITH_SGD",
    "Cell",
    "Ending",
    "Endings",
    "Size",
    "Task",
    "best_rate",
    "cells_of",
    "final_tasks",
    "size_of",
    "tuning_tasks",
]

TUNING, FINAL, LINEAR = "tuning", "final", "linear"
TUNING_SEED = 1000  # not among the seeds of the final runs
SEEDS = 3


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is trained, and with what; the same for every run."""

    data: str = "fashion-mnist"
    shrink: int = 2  # images are averaged over squares of so many pixels
    images: int = 16_384
    held_out: int = 10_000  # training images that no run trains on: the rates are chosen by them
    epochs: int = 64
    model: str = "small-cnn"
    batches: tuple[int, ...] = (128, 512, 2048, 8192)
    rates: tuple[float, ...] = (0.00625, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
    part: int = 1024  # larger batches are taken in parts of so many
    momentum: float = 0.9
    weight_decay: float = 5e-4
    trust_coefficient: float = 0.1
    warmup: float = 0.1  # of the steps

    def __post_init__(self) -> None:
        if not self.rates or any(not 0 < rate < math.inf for rate in self.rates):
            raise ValueError(f"rates must be above 0 and finite (rates={self.rates})")
        if self.epochs < 1:
            raise ValueError(f"epochs must be at least 1 (epochs={self.epochs})")
        for batch in self.batches:
            if not 1 <= batch <= self.images:
                raise ValueError(f"batches must be between 1 and the {self.images} images (batch={batch})")

    def steps(self, batch: int) -> int:
        """Steps of a run: whole batches alone, so an epoch leaves out what does not fill one.

        >>> Size(epochs=2, images=1000, batches=(300,)).steps(300)
        6
        """
        return self.epochs * (self.images // batch)


QUICK = Size(
    data="digits", shrink=1, images=512, held_out=512, epochs=1, batches=(64, 256), rates=(0.05, 0.1), part=128
)


def size_of(options: Options) -> Size:
    """The size that the command line asks for.

    >>> size_of(Options(batches="64,1024", rates="0.1")).batches
    (64, 1024)
    >>> size_of(Options(batches="64,many"))
    Traceback (most recent call last):
    ValueError: batches must be numbers with commas between (batches='64,many')
    """
    base = QUICK if options.quick else Size()
    given: dict[str, Any] = {
        "epochs": options.epochs,
        "data": options.data or None,
        "model": options.model or None,
        "batches": tuple(sorted(_numbers("batches", options.batches, int))) or None,
        "rates": tuple(sorted(_numbers("rates", options.rates, float))) or None,
    }
    return Size(**{**vars(base), **{name: value for name, value in given.items() if value is not None}})


def _numbers(name: str, text: str, kind: type[Any]) -> list[Any]:
    try:
        return list({kind(each) for each in text.split(",") if each.strip()})
    except ValueError:
        raise ValueError(f"{name} must be numbers with commas between ({name}={text!r})") from None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A place in the table."""

    batch: int
    optimizer: str


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run. `phase` says what it is for; those for tuning are measured on the images held out."""

    phase: str
    cell: Cell
    rate: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What a run came to, in per cent; accuracy and loss are None where it diverged."""

    accuracy: float | None
    training_loss: float | None
    seconds: float


Endings = Mapping[Task, Ending]


def cells_of(size: Size) -> list[Cell]:
    """Every cell, batch by batch."""
    return [Cell(batch=batch, optimizer=optimizer) for batch in size.batches for optimizer in OPTIMIZERS]


def tuning_tasks(size: Size) -> list[Task]:
    """As many rates for one optimiser as for the other, the same seed for all."""
    return [
        Task(phase=TUNING, cell=cell, rate=rate, seed=TUNING_SEED) for cell in cells_of(size) for rate in size.rates
    ]


def best_rate(size: Size, endings: Endings, cell: Cell) -> float:
    """The rate of the cell's best run on the images held out; of equal ones, and if all diverged, the smallest."""

    def accuracy(rate: float) -> float:
        found = endings[Task(phase=TUNING, cell=cell, rate=rate, seed=TUNING_SEED)].accuracy
        return -math.inf if found is None else found

    return max(size.rates, key=accuracy)


def final_tasks(size: Size, endings: Endings, *, seeds: int) -> list[Task]:
    """Every cell with its best rate; and SGD with the rate of the smallest batch, scaled linearly, with one seed."""
    best = {cell: best_rate(size, endings, cell) for cell in cells_of(size)}
    finals = [
        Task(phase=FINAL, cell=cell, rate=rate, seed=seed) for cell, rate in best.items() for seed in range(seeds)
    ]
    base = Cell(batch=size.batches[0], optimizer=WITH_SGD)
    scaled = [
        Task(
            phase=LINEAR,
            cell=Cell(batch=batch, optimizer=WITH_SGD),
            rate=scale_lr(best[base], base_batch=base.batch, batch=batch),
            seed=0,
        )
        for batch in size.batches[1:]
    ]
    return finals + scaled
