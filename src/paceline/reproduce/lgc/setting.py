"""What the experiments on LGC share: the paper's cluster as a recipe, the three lanes, and means over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.recipes import Recipe
from paceline.reproduce.claims import mean
from paceline.reproduce.experiment import ExperimentPlan, Outcome
from paceline.reproduce.published import LGC_SETTING

LANES = ("full", "fastest-k", "lgc")
ROUNDS_OF_AN_EPOCH = 156  # ten workers with batches of 32 on 50,000 images
MEASURED = ("loss", "accuracy", "seconds")


def base_recipe(plan: ExperimentPlan, *, rounds: int | None = None) -> Recipe:
    """Return the paper's setting at the size of the plan, with the delays and the cluster of its section III.

    >>> base_recipe(ExperimentPlan(size="full")).model.name, base_recipe(ExperimentPlan(size="toy")).data.name
    ('vgg11', 'digits')
    """
    epochs = int(LGC_SETTING["epochs"])
    total = rounds or plan.choose(toy=8, laboratory=300, full=epochs * ROUNDS_OF_AN_EPOCH)
    return Recipe(rounds=total, evaluate_every=total, target_loss=None).with_settings(
        data={
            "name": plan.choose(toy="digits", laboratory="cifar10", full="cifar10"),
            "augment": plan.size == "full",
            "split": "non-iid",
        },
        model={"name": plan.choose(toy="mlp", laboratory="lenet", full="vgg11")},
        optimizer={"lr": 0.1 if plan.size == "full" else 0.05, "decay_at": [0.5]},
        strategy={
            "k": 7,
            "warmup_rounds": plan.choose(toy=1, laboratory=10, full=2 * ROUNDS_OF_AN_EPOCH),
            "scale_partial": True,
        },
        cluster={"late_work": "complete"},
    )


def smaller_remarks(plan: ExperimentPlan) -> tuple[str, ...]:
    """Return what is smaller than in the paper, as remarks; at full size nothing is.

    >>> smaller_remarks(ExperimentPlan(size="full"))
    ()
    """
    smaller = "LeNet stands in for VGG-11, with fewer epochs and no augmentation; its rate of 0.05 was not tuned."
    return () if plan.size == "full" else (smaller,)


def job_seconds(plan: ExperimentPlan, rounds: int) -> float:
    """Return about how long a run takes on one core."""
    return float(plan.choose(toy=0.5, laboratory=0.05 * rounds, full=3.0 * rounds))


def figures_of(outcomes: Mapping[str, Outcome], names: Sequence[str]) -> dict[str, float | None]:
    """Return the means of several runs: loss, accuracy and seconds at the end.

    >>> figures_of({"a": {"loss": 1.0, "accuracy": 0.5, "seconds": 2.0}}, ["a"])["loss"]
    1.0
    """
    return {name: mean([outcomes[each][name] for each in names]) for name in MEASURED}
