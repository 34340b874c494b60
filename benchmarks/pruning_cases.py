"""What `pruning` runs: networks, sizes, policies, and the runs themselves."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks.options import Options, chosen
from benchmarks.pruning_turns import TakeTurns
from paceline.reproduce.pruning_training import FEWER_EPOCHS, FINE_PRUNING, MODELS, WHOLE
from paceline.reproduce.pruning_training import POLICIES as LIBRARY_POLICIES
from paceline.reproduce.pruning_training import PruningEnding as Ending
from paceline.reproduce.pruning_training import PruningSize as Size
from paceline.reproduce.pruning_training import PruningTask as Task
from paceline.reproduce.pruning_training import PruningWay as Way

__all__ = ["FEWER_EPOCHS", "FINE_PRUNING", "MODELS", "WHOLE", "Ending", "Size", "Task", "Way"]

TRIED = "take-turns"
SEEDS = 3


# -- sizes -----------------------------------------------------------------------------------------------------------


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


def turns_settings(size: Size) -> dict[str, Any]:
    """Take turns, with its own defaults.

    >>> turns_settings(Size(epochs=50))
    {'epochs': 50, 'ratio': 0.6, 'delta': 0.875}
    """
    return {"epochs": size.epochs, "ratio": 0.6, "delta": 0.875}


POLICIES = MappingProxyType(
    {**LIBRARY_POLICIES, TRIED: Way(label="take-turns", sampler=TakeTurns, settings=turns_settings)}
)
"""Every policy by its name on the command line; one more is one more line."""


def pruning_policies() -> tuple[str, ...]:
    """Those that let samples sit out.

    >>> FINE_PRUNING in pruning_policies(), WHOLE in pruning_policies()
    (True, False)
    """
    return tuple(name for name, way in POLICIES.items() if way.sampler)


# -- runs ------------------------------------------------------------------------------------------------------------


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
