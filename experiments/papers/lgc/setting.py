"""What the experiments on LGC share: the paper's cluster as a recipe, and the three lanes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.core.story import Runs, Size
from experiments.papers.published import LGC_SETTING
from paceline.recipes import Recipe

LANES = ("full", "fastest-k", "lgc")
ROUNDS_OF_AN_EPOCH = 156  # ten workers with batches of 32 on 50,000 images
MEASURED = ("loss", "accuracy", "seconds")


def base_recipe(size: Size, *, rounds: int | None = None) -> Recipe:
    """Return the paper's setting at this size, with the delays and the cluster of its section III.

    >>> base_recipe(Size("full")).model.name, base_recipe(Size("toy")).data.name
    ('vgg11', 'digits')
    """
    epochs = int(LGC_SETTING["epochs"])
    total = rounds or size.pick(8, 300, epochs * ROUNDS_OF_AN_EPOCH)
    return Recipe(rounds=total, evaluate_every=total, target_loss=None).with_settings(
        data={"name": size.pick("digits", "cifar10"), "augment": size.name == "full", "split": "non-iid"},
        model={"name": size.pick("mlp", "lenet", "vgg11")},
        optimizer={"lr": size.pick(0.05, 0.05, 0.1), "decay_at": [0.5]},
        strategy={"k": 7, "warmup_rounds": size.pick(1, 10, 2 * ROUNDS_OF_AN_EPOCH), "scale_partial": True},
        cluster={"late_work": "complete"},
    )


def smaller_remarks(size: Size) -> Iterator[str]:
    """Yield what is smaller than in the paper; at full size nothing is."""
    if size.name != "full":
        yield "LeNet stands in for VGG-11, with fewer epochs and no augmentation; its rate of 0.05 was not tuned."


def job_seconds(size: Size, rounds: int) -> float:
    """Return about how long a run takes on one core."""
    return float(size.pick(0.5, 0.05 * rounds, 3.0 * rounds))


def ends_of(runs: Runs) -> dict[Any, dict[str, float]]:
    """Return the loss, the accuracy and the seconds at the end of each key's runs: means over the seeds.

    >>> ends_of(Runs(lgc=[{"loss": 1.0, "accuracy": 0.5, "seconds": 2.0, "rounds": 8}]))
    {'lgc': {'loss': 1.0, 'accuracy': 0.5, 'seconds': 2.0}}
    """
    means = {name: runs.mean(name) for name in MEASURED}
    return {key: {name: means[name][key] for name in MEASURED} for key in runs}
