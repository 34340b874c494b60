"""What `pruning` runs: networks, sizes, policies, and the runs themselves."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

from torch import nn

import paceline
from benchmarks.options import Options, chosen
from benchmarks.pruning_turns import TakeTurns
from paceline.data.pruning.fine_pruning import FineSchedule
from paceline.models.layers import initialise

WHOLE, FEWER_EPOCHS, FINE_PRUNING, TRIED = "none", "fewer-epochs", "fine-pruning", "take-turns"
SEEDS = 3


# -- networks --------------------------------------------------------------------------------------------------------


def small_cnn(*, input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Three convolutions with batch normalisation, a pooling that halves each side after each, and one linear layer."""
    channels, height, width = input_shape
    layers: list[nn.Module] = []
    for wide in (16, 32, 64):
        layers += [
            nn.Conv2d(channels, wide, 3, padding=1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
        ]
        channels, height, width = wide, math.ceil(height / 2), math.ceil(width / 2)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, classes))
    initialise(model)
    return model


MODELS = MappingProxyType({"lenet": "lenet", "small-cnn": f"{__name__}:{small_cnn.__name__}"})
"""Networks by their names here; what `build_model` calls them."""


# -- sizes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is trained, and with what; the same for every run. Runs of one size can stand in one table."""

    data: str = "cifar10"
    shrink: int = 2  # images are averaged over squares of so many pixels
    images: int = 50_000
    epochs: int = 50
    batch: int = 128
    rate: float = 0.05
    falls_at: tuple[float, ...] = (0.3, 0.6, 0.8)  # the paper's 60, 120 and 160 of 200 epochs
    falls_to: float = 0.2
    momentum: float = 0.9
    weight_decay: float = 5e-4
    padding: int = 2
    torch: str = field(default_factory=lambda: version("torch"))
    fewer: float = field(
        default=0.3, compare=False
    )  # share of the epochs that the control leaves out; others do not care

    def __post_init__(self) -> None:
        if self.shrink < 1:
            raise ValueError(f"shrink must be at least 1 pixel (shrink={self.shrink})")
        if self.images < self.batch:
            raise ValueError(f"images must be at least one batch of {self.batch} (images={self.images})")
        if self.epochs < 1:
            raise ValueError(f"epochs must be at least 1 (epochs={self.epochs})")
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be above 0 and finite (rate={self.rate})")
        if not 0 <= self.fewer < 1:
            raise ValueError(f"fewer must be at least 0 and below 1 (fewer={self.fewer})")

    def rate_at(self, progress: float) -> float:
        """The learning rate where so much of the run is done.

        >>> [round(Size(rate=0.1).rate_at(share), 5) for share in (0, 0.29, 0.3, 0.6, 0.8, 0.99)]
        [0.1, 0.1, 0.02, 0.004, 0.0008, 0.0008]
        """
        return float(self.rate * self.falls_to ** sum(progress >= share for share in self.falls_at))


QUICK = Size(data="digits", shrink=1, images=128, epochs=10, batch=32, padding=1)


def size_of(options: Options) -> Size:
    """The size that the command line asks for.

    >>> size_of(Options(images=1000, epochs=3)).images
    1000
    """
    names = ("data", "shrink", "images", "epochs", "rate", "fewer")
    given = {name: getattr(options, name) for name in names if getattr(options, name) not in (None, "")}
    return dataclasses.replace(QUICK if options.quick else Size(), **given)


# -- policies --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a run goes through the samples: which sampler (None: torch's own) with which settings.

    A setting `epochs` is also how many the run has.
    """

    label: str
    sampler: Callable[..., Any] | None = None
    settings: Callable[[Size], dict[str, Any]] = lambda size: {}

    def epochs(self, size: Size) -> int:
        """How many epochs a run has.

        >>> Way(label="none").epochs(Size(epochs=40)), POLICIES[FEWER_EPOCHS].epochs(Size(epochs=40))
        (40, 28)
        """
        return int(self.settings(size).get("epochs", size.epochs))


def fewer_settings(size: Size) -> dict[str, Any]:
    """The control: fewer epochs, and the falls of the rate at the same shares of them.

    >>> fewer_settings(Size(epochs=50, fewer=0.3))
    {'epochs': 35}
    """
    return {"epochs": max(1, round(size.epochs * (1 - size.fewer)))}


SAVES_AT_LEAST = 0.15  # of the samples: the paper's 14 % of the time, and what the time saved may fall short of it


def fine_settings(size: Size) -> dict[str, Any]:
    """The paper's schedule, 60 of 200 epochs in a window, scaled to this run; as little is pruned as saves 15 %.

    >>> settings = fine_settings(Size(epochs=50))
    >>> settings["window"], settings["starting_point"], settings["prune"]
    (15, 7, 0.4)
    """
    window = max(2, int(size.epochs * 0.3))
    schedule = {"window": window, "starting_point": window // 2, "attenuation": 2, "block": 4, "count": 2}
    pruned = sum(map(FineSchedule(**schedule).is_pruned, range(1, size.epochs + 1)))
    hundredths = math.ceil(100 * SAVES_AT_LEAST * size.epochs / pruned - 1e-9) if pruned else 0
    return schedule | {"prune": min(hundredths, 90) / 100}


def info_settings(size: Size) -> dict[str, Any]:
    """InfoBatch as its authors run it.

    >>> info_settings(Size(epochs=50))
    {'epochs': 50, 'ratio': 0.5, 'delta': 0.875}
    """
    return {"epochs": size.epochs, "ratio": 0.5, "delta": 0.875}


def turns_settings(size: Size) -> dict[str, Any]:
    """Take turns, with its own defaults.

    >>> turns_settings(Size(epochs=50))
    {'epochs': 50, 'ratio': 0.6, 'delta': 0.875}
    """
    return {"epochs": size.epochs, "ratio": 0.6, "delta": 0.875}


POLICIES = MappingProxyType(
    {
        WHOLE: Way(label="none"),
        FEWER_EPOCHS: Way(label="none, fewer epochs", settings=fewer_settings),
        FINE_PRUNING: Way(label="fine-pruning", sampler=paceline.FinePruning, settings=fine_settings),
        "info-batch": Way(label="info-batch", sampler=paceline.InfoBatch, settings=info_settings),
        TRIED: Way(label="take-turns", sampler=TakeTurns, settings=turns_settings),
    }
)
"""Every policy by its name on the command line; one more is one more line."""


def pruning_policies() -> tuple[str, ...]:
    """Those that let samples sit out.

    >>> FINE_PRUNING in pruning_policies(), WHOLE in pruning_policies()
    (True, False)
    """
    return tuple(name for name, way in POLICIES.items() if way.sampler)


# -- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run."""

    model: str
    policy: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What a run came to. Seconds are those of training; testing is not among them."""

    accuracies: list[float]  # per cent of the test images, after each epoch
    samples: int
    steps: int
    wall_seconds: float
    cpu_seconds: float
    sampling_seconds: float  # of cpu_seconds: taking batches, and making one loss of a batch's losses
    settings: dict[str, Any]  # the policy's

    @property
    def accuracy(self) -> float:
        """The mean of the last three epochs: what the run came to, whatever epoch was lucky."""
        last = self.accuracies[-3:]
        return sum(last) / len(last)

    @property
    def best_three(self) -> float:
        """The mean of the best three epochs, as the paper has it."""
        best = sorted(self.accuracies)[-3:]
        return sum(best) / len(best)


Endings = Mapping[Task, Ending]


def tasks_of(options: Options) -> list[Task]:
    """The runs that the command line asks for; seed by seed, so that there is a table early.

    >>> [task.policy for task in tasks_of(Options(models="lenet", policies="none,info-batch", seeds=1))]
    ['none', 'info-batch']
    """
    seeds = (1 if options.quick else SEEDS) if options.seeds is None else options.seeds
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1 (seeds={seeds})")
    models = chosen(options.models, tuple(MODELS), "network")
    policies = chosen(options.policies, tuple(POLICIES), "policy")
    return [
        Task(model=model, policy=policy, seed=seed)
        for seed in range(options.first_seed, options.first_seed + seeds)
        for model in models
        for policy in policies
    ]


def jobs_of(options: Options) -> int:
    """How many runs at once: as many as there are cores, if not given.

    >>> jobs_of(Options(jobs=3))
    3
    """
    if options.jobs is not None and options.jobs < 1:
        raise ValueError(f"jobs must be at least 1 (jobs={options.jobs})")
    return options.jobs or os.cpu_count() or 1


def seeds_of(endings: Endings, model: str, policies: Sequence[str]) -> list[int]:
    """The seeds that all of these policies have run with."""
    each = [{task.seed for task in endings if (task.model, task.policy) == (model, policy)} for policy in policies]
    return sorted(set.intersection(*each)) if each else []
