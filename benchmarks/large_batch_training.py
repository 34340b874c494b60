"""One run of `large-batch`: the loop is the package's (`paceline.reproduce.large_batch_training`)."""

from __future__ import annotations

from benchmarks.large_batch_cases import TUNING, Ending, Size, Task
from paceline.reproduce import large_batch_training
from paceline.reproduce.large_batch_training import ImageChoice, ImageParts, LargeBatchRun, accuracy, load_parts

__all__ = ["accuracy", "load", "train"]


def load(size: Size) -> ImageParts:
    """The images, once per process; nothing is ever fetched."""
    return load_parts(_choice(size))


def train(size: Size, task: Task) -> Ending:
    """Carry out one run; it ends early if its loss is no longer finite."""
    run = LargeBatchRun(
        choice=_choice(size),
        model=size.model,
        optimizer=task.cell.optimizer,
        batch=task.cell.batch,
        rate=task.rate,
        epochs=size.epochs,
        seed=task.seed,
        part=size.part,
        momentum=size.momentum,
        weight_decay=size.weight_decay,
        trust_coefficient=size.trust_coefficient,
        warmup=size.warmup,
    )
    tuning = task.phase == TUNING
    ending = large_batch_training.train(run, measured=("held_out",) if tuning else ("test",))
    measured = ending.held_out if tuning else ending.accuracy
    return Ending(accuracy=measured, training_loss=ending.training_loss, seconds=ending.seconds)


def _choice(size: Size) -> ImageChoice:
    return ImageChoice(data=size.data, shrink=size.shrink, images=size.images, held_out=size.held_out)
