"""Which layer limits a recipe's learning rate: ratios of weights to gradients at the start, and as it trains.

    step      0          1                    t                   steps
    batch     0          1                    t                   steps
              gradient   gradient    ...      gradient    ...     gradient
              ratios                          ratios              ratios        at MOST_MOMENTS moments at most
                  step by the optimiser ->        step ->

The gradient of batch t is taken at the weights after t steps; it is what step t + 1 goes by. One process trains, with
the recipe's model, optimiser and schedule, on batches from all training data: what a cluster does to gradients (who is
late, what a codec loses) is not in it. A run whose loss is no longer finite ends there, and says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.optim import make_optimizer
from paceline.recipes.assembly import load_data, make_training
from paceline.recipes.recipe import Recipe

if TYPE_CHECKING:
    from paceline.optim.ratios import LayerRatio, LayerRatios
    from paceline.training import Training

MOST_MOMENTS = 61
MOST_BATCH = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The ratios after so many steps; `rate` is the learning rate of the step that comes next.

    >>> inspect_recipe(Recipe()).first.step
    0
    """

    step: int
    rate: float
    loss: float
    ratios: LayerRatios


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Ratios at several moments of a training, the first before any step.

    >>> found = inspect_recipe(Recipe(), steps=3)
    >>> [moment.step for moment in found.moments], found.limiting().name
    ([0, 1, 2, 3], '5.weight')
    """

    batch: int
    moments: tuple[Moment, ...]
    diverged: bool = False

    @property
    def first(self) -> Moment:
        """The moment before any step."""
        return self.moments[0]

    @property
    def last(self) -> Moment:
        """The moment after all steps."""
        return self.moments[-1]

    def limiting(self, moment: Moment | None = None) -> LayerRatio | None:
        """Return the layer with the smallest ratio at a moment (the first), of those that began with a positive one.

        What began at 0 has no size of its own: after a few steps it is as small as these steps, and so is its ratio.
        """
        from paceline.optim.ratios import smallest

        began = {row.name for row in self.first.ratios if row.counts}
        return smallest(row for row in (moment or self.first).ratios if row.name in began)


def inspect_recipe(
    recipe: Recipe, *, steps: int = 0, batch: int = 0, on_step: Callable[[int], None] = lambda step: None
) -> Inspection:
    """Return the ratios of a recipe's model before the first step, and while it takes `steps` steps.

    `batch` is the number of samples of a gradient, 0 the recipe's `worker.batch_size`. `on_step` is called with the
    number of gradients that have been taken.

    >>> inspect_recipe(Recipe(rounds=10), steps=11)
    Traceback (most recent call last):
    ValueError: steps must be between 0 and the recipe's rounds (steps=11, rounds=10); ...
    >>> inspect_recipe(Recipe(), batch=100_000)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: batch must be between 1 and ..., the training samples of digits (batch=100000)
    """
    check(recipe, steps=steps, batch=batch)
    import torch

    recipe, dataset = recipe.with_settings(data={"split": "iid"}), load_data(recipe)  # nobody holds a part of it
    _check_samples(recipe, len(dataset.train), batch)
    training = dataclasses.replace(
        make_training(recipe, dataset),
        shards=[torch.arange(len(dataset.train))],
        batch_size=batch or recipe.worker.batch_size,
        blocks=1,
    )
    with torch.random.fork_rng(devices=[]):
        return _train(training, steps, on_step)


def check(recipe: Recipe, *, steps: int, batch: int) -> None:
    """Refuse numbers that cannot be.

    >>> check(Recipe(), steps=0, batch=-1)
    Traceback (most recent call last):
    ValueError: batch must be between 1 and 1,000,000, or 0 for the recipe's (batch=-1)
    """
    if not 0 <= steps <= recipe.rounds:  # beyond them the schedule of learning rates means nothing
        raise ValueError(
            f"steps must be between 0 and the recipe's rounds (steps={steps}, rounds={recipe.rounds}); "
            f"its schedule is as long as they are: for a longer one give rounds too (--rounds {max(steps, 1)})"
        )
    if not 0 <= batch <= MOST_BATCH:
        raise ValueError(f"batch must be between 1 and {MOST_BATCH:,}, or 0 for the recipe's (batch={batch})")


def _check_samples(recipe: Recipe, samples: int, batch: int) -> None:
    """Refuse a batch in which samples would be counted several times."""
    range_text = f"between 1 and {samples:,}, the training samples of {recipe.data.name}"
    if batch > samples:
        raise ValueError(f"batch must be {range_text} (batch={batch})")
    if not batch and recipe.worker.batch_size > samples:
        raise ValueError(
            f"batch must be given, {range_text}: the recipe has larger batches "
            f"(worker.batch_size={recipe.worker.batch_size})"
        )


def moments_of(steps: int) -> list[int]:
    """Return the steps at which ratios are taken: every one, or as many as are enough for a picture.

    >>> moments_of(3), len(moments_of(1000)), moments_of(1000)[-1]
    ([0, 1, 2, 3], 61, 1000)
    """
    pieces = min(steps, MOST_MOMENTS - 1)
    return [round(index * steps / pieces) for index in range(pieces + 1)] if pieces else [0]


def _train(training: Training, steps: int, on_step: Callable[[int], None]) -> Inspection:
    from paceline.optim.ratios import layer_ratios
    from paceline.training.batches import Batches
    from paceline.training.replica import local_gradient

    module, batches, wanted = training.module, Batches(training), set(moments_of(steps))
    optimizer, schedule = make_optimizer(training.optimizer, module.parameters(), total_steps=training.total_steps)
    moments: list[Moment] = []
    for step in range(steps + 1):
        loss = local_gradient(module, batches, worker=0, draw=step)
        diverged = not math.isfinite(loss)
        if step in wanted or diverged:
            ratios = layer_ratios(
                module,
                trust_coefficient=training.optimizer.trust_coefficient,
                weight_decay=training.optimizer.weight_decay,
                exclude_bias_and_norm=training.optimizer.exclude_bias_and_norm,
                clip=training.optimizer.clip,
            )
            rate = float(optimizer.param_groups[0]["lr"])
            moments.append(Moment(step=step, rate=rate, loss=loss, ratios=ratios))
        on_step(step + 1)
        if diverged:
            break
        if step < steps:
            optimizer.step()
            schedule.step()
    return Inspection(batch=training.batch_size, moments=tuple(moments), diverged=diverged)
