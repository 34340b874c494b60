"""One training with a large batch, as all experiments on LARS need it.

    training images ──> batches of B, in parts (paceline.Accumulate) ──> SGD or LARS, warm-up, then (1 - s)^2
    held-out images     choose rates                      measured at the end
    test images         are what tables show              measured at the end, and at `points` moments with the losses

Nothing here depends on anything but its settings: the order of the images, their augmentation and the initial weights
follow from the seed and the place alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from experiments.core.images import Images, augmentation, load_images
from experiments.core.networks import build_network
from experiments.core.training import Loop, accuracy, loss_and_accuracy
from paceline.optim.accumulate import Accumulate
from paceline.optim.lars import LARS
from paceline.optim.ratios import layer_ratios
from paceline.optim.schedules import warmup_poly
from paceline.randomness import torch_generator

WITH_SGD, WITH_LARS = "SGD", "LARS"
MOST_MEASURED = 5_000  # training images whose loss is measured for a point of a curve


@dataclass(frozen=True, kw_only=True)
class LargeBatchRun:
    """One training; `choice` says which images, as `load_images` takes it.

    `warmup` is a share of the steps. LARS has a trust coefficient that suits rates below 1: a layer moves by rate *
    trust of its length, and what is not scaled (biases, scales of normalisation) takes the rate as it is. With
    `scale_all` those are scaled too, as in the paper, and its rates of 2 to 40 with trust 0.001 can be borne. `points`
    is at how many moments the losses, the test accuracy and the layers' ratios are noted.

    >>> LargeBatchRun(batch=512, rate=0.1, epochs=2, choice={"data": "digits", "images": 1100}).steps
    4
    """

    choice: Mapping[str, Any]
    model: str = "small-cnn"
    optimizer: str = WITH_SGD
    batch: int
    rate: float
    epochs: int
    seed: int = 0
    part: int = 1024  # larger batches are taken in parts of so many
    momentum: float = 0.9
    weight_decay: float = 5e-4
    trust_coefficient: float = 0.1
    scale_all: bool = False
    warmup: float = 0.1
    decay_from: Literal["warmup", "start"] = "warmup"
    augment: str = "none"
    points: int = 0

    @property
    def steps_of_an_epoch(self) -> int:
        """Whole batches alone: an epoch leaves out what does not fill one."""
        return int(self.choice["images"] // self.batch)

    @property
    def steps(self) -> int:
        """The steps of the run."""
        return self.epochs * self.steps_of_an_epoch

    @property
    def point_epochs(self) -> set[int]:
        """After which epochs a point of the curve is taken: the last, and as many before it as were asked for.

        >>> sorted(LargeBatchRun(batch=128, rate=0.1, epochs=10, points=4, choice={}).point_epochs)
        [2, 5, 8, 10]
        """
        return {max(1, round((index + 1) * self.epochs / self.points)) for index in range(self.points)}

    def parts(self, epoch: int) -> list[Tensor]:
        """Return the images of an epoch: whole batches, each in equal parts but for its last."""
        order = torch.randperm(self.choice["images"], generator=torch_generator(self.seed, "order", epoch))
        whole = order[: self.steps_of_an_epoch * self.batch]
        return [part for batch in torch.split(whole, self.batch) for part in torch.split(batch, self.part)]


def run_large_batch(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out a run. Accuracies are in per cent; they are None where it diverged, and the run ends there.

    >>> few = {"data": "digits", "shrink": 1, "images": 512, "held_out": 256}
    >>> found = run_large_batch({"choice": few, "batch": 128, "rate": 0.1, "epochs": 1, "points": 1})
    >>> sorted(found), found["curve"][0]["epoch"]
    (['accuracy', 'curve', 'first_ratios', 'held_out', 'training_loss'], 1)
    """
    run = LargeBatchRun(**settings)
    images = load_images(**run.choice)
    model = build_network(run.model, input_shape=images.input_shape, classes=images.classes, seed=run.seed)
    optimizer = make_optimizer(run, model)
    schedule = warmup_poly(
        optimizer,
        warmup_steps=round(run.warmup * run.steps),
        total_steps=run.steps,
        decay_from=run.decay_from,
    )
    curve, ratios = list[dict[str, Any]](), list[dict[str, float]]()

    def note_ratios(epoch: int, share: float) -> None:
        last = (loop.steps + 1) % run.steps_of_an_epoch == 0
        if run.points and (loop.steps == 0 or (last and epoch + 1 in run.point_epochs)):
            ratios.append(weight_ratios(model))

    loop = Loop(
        model=model,
        optimizer=optimizer,
        samples=images.training,
        seed=run.seed,
        batches=run.parts,
        vary=augmentation(run.augment, images.input_shape[1]),
        accumulate=Accumulate(model, steps=math.ceil(run.batch / run.part)),
        before_step=note_ratios,
        after_step=schedule.step,
    )
    loss = math.nan
    for epoch in range(run.epochs):
        loss = loop.epoch(epoch)
        if math.isnan(loss):
            break
        if epoch + 1 in run.point_epochs:
            curve += curve_point(model, images, epoch + 1, ratios[-1])
    diverged = math.isnan(loss)
    return {
        "held_out": None if diverged else accuracy(model, images.held_out),
        "accuracy": None if diverged else accuracy(model, images.test),
        "training_loss": None if diverged else loss / (run.steps_of_an_epoch * run.batch),  # of the last epoch
        "first_ratios": ratios[0] if ratios else None,
        "curve": curve,
    }


def make_optimizer(run: LargeBatchRun, model: nn.Module) -> torch.optim.Optimizer:
    """Return the run's optimiser."""
    if run.optimizer == WITH_SGD:
        return torch.optim.SGD(
            model.parameters(), lr=run.rate, momentum=run.momentum, weight_decay=run.weight_decay, fused=True
        )
    return LARS(
        model.parameters(),
        lr=run.rate,
        momentum=run.momentum,
        weight_decay=run.weight_decay,
        trust_coefficient=run.trust_coefficient,
        exclude_bias_and_norm=not run.scale_all,
    )


def weight_ratios(model: nn.Module) -> dict[str, float]:
    """Return |w| / |gradient| of every weight that has both, by its name.

    >>> layer = nn.Linear(1, 1)
    >>> _ = nn.init.ones_(layer.weight)
    >>> layer(torch.full((1, 1), 2.0)).sum().backward()
    >>> weight_ratios(layer)
    {'weight': 0.5}
    """
    rows = layer_ratios(model).only("weight")
    return {row.name: float(row.ratio) for row in rows if row.counts and row.ratio is not None}


def curve_point(model: nn.Module, images: Images, epoch: int, ratios: dict[str, float]) -> list[dict[str, Any]]:
    """Return a point of the curve, its ratios by the last gradient before; none where a loss is no number."""
    train_loss, _ = loss_and_accuracy(model, images.training, most=MOST_MEASURED)
    test_loss, right = loss_and_accuracy(model, images.test)
    if not (math.isfinite(train_loss) and math.isfinite(test_loss)):
        return []
    found = {"epoch": epoch, "train_loss": train_loss, "test_loss": test_loss, "accuracy": right, "ratios": ratios}
    return [found]
