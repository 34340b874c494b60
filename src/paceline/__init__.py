"""paceline: train at the pace of the pack, not of its slowest rider.

    >>> from paceline import Recipe, simulate
    >>> result = simulate(Recipe(rounds=20))
    >>> result.rounds
    20

The same names, and a few more, stand in sub-packages by what they are for:

    paceline.recipes      a whole run as a value              paceline.averaging   HPSGD and its family, in a script
    paceline.cluster      servers, workers, rounds of ranks   paceline.codecs      gradients as fewer bytes
    paceline.data         data sets, splits, pruning          paceline.optim       LARS, accumulation, schedules
    paceline.pipeline     a model cut into stages             paceline.loggers     where figures go
    paceline.reports      traces as tables and pages
    paceline.huggingface, paceline.lightning, paceline.ray    the parts inside frameworks, each an extra

Public names are imported when they are first used, so that the command line starts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import lazy_names

__version__ = "0.2.0"

if TYPE_CHECKING:
    from paceline import averaging, cluster, codecs, data, loggers, optim, pipeline, recipes, reports  # noqa: F401
    from paceline.analysis.pruning import pruning_page
    from paceline.data.pruning.policy import PruningError
    from paceline.data.pruning.sampler import FinePruning, InfoBatch
    from paceline.drivers.averaging.averager import BMUF, HPSGD, PSGD, SSGD, DiLoCo, LocalSGD
    from paceline.drivers.balancing.balance import Balance
    from paceline.drivers.ddp import compress
    from paceline.drivers.pipelining.pipeline import Pipeline
    from paceline.drivers.pipelining.planning import plan_pipeline
    from paceline.drivers.rounds.synchronizer import FastestKSync, FullSync, LGCSync
    from paceline.drivers.served.worker import Worker
    from paceline.drivers.watching.watch import watch
    from paceline.errors import PacelineError
    from paceline.optim.accumulate import Accumulate
    from paceline.optim.lars import LARS
    from paceline.optim.ratios import layer_ratios
    from paceline.optim.schedules import scale_lr, warmup_poly
    from paceline.pipeline import PipelineError
    from paceline.pipeline.devices import Device, Link
    from paceline.pipeline.plan import Plan
    from paceline.recipes import Recipe, RecipeError
    from paceline.runs import Race, Result, simulate
    from paceline.runs.replaying import replay
    from paceline.runs.serving import serve
    from paceline.runs.training import train
    from paceline.strategies import LGC, STRATEGIES, Async, FastestK, Full
    from paceline.strategies.shares import SharesBySpeed

_HOMES = {
    "Race": "runs",
    "Recipe": "recipes",
    "RecipeError": "recipes",
    "Result": "runs",
    "Worker": "drivers.served.worker",
    "Balance": "drivers.balancing.balance",
    "compress": "drivers.ddp",
    "plan_pipeline": "drivers.pipelining.planning",
    "pruning_page": "analysis.pruning",
    "replay": "runs.replaying",
    "serve": "runs.serving",
    "simulate": "runs",
    "train": "runs.training",
    "BMUF": "drivers.averaging.averager",
    "DiLoCo": "drivers.averaging.averager",
    "HPSGD": "drivers.averaging.averager",
    "LocalSGD": "drivers.averaging.averager",
    "PSGD": "drivers.averaging.averager",
    "SSGD": "drivers.averaging.averager",
    "FastestKSync": "drivers.rounds.synchronizer",
    "FullSync": "drivers.rounds.synchronizer",
    "LGCSync": "drivers.rounds.synchronizer",
    "PacelineError": "errors",
    "FinePruning": "data.pruning.sampler",
    "InfoBatch": "data.pruning.sampler",
    "PruningError": "data.pruning.policy",
    "Pipeline": "drivers.pipelining.pipeline",
    "PipelineError": "pipeline",
    "Accumulate": "optim.accumulate",
    "LARS": "optim.lars",
    "layer_ratios": "optim.ratios",
    "scale_lr": "optim.schedules",
    "warmup_poly": "optim.schedules",
    "watch": "drivers.watching.watch",
    "Device": "pipeline.devices",
    "Link": "pipeline.devices",
    "Plan": "pipeline.plan",
    "LGC": "strategies",
    "STRATEGIES": "strategies",
    "Async": "strategies",
    "FastestK": "strategies",
    "Full": "strategies",
    "SharesBySpeed": "strategies.shares",
}

__all__ = [
    "BMUF",
    "HPSGD",
    "LARS",
    "LGC",
    "PSGD",
    "SSGD",
    "STRATEGIES",
    "Accumulate",
    "Async",
    "Balance",
    "Device",
    "DiLoCo",
    "FastestK",
    "FastestKSync",
    "FinePruning",
    "Full",
    "FullSync",
    "InfoBatch",
    "LGCSync",
    "Link",
    "LocalSGD",
    "PacelineError",
    "Pipeline",
    "PipelineError",
    "Plan",
    "PruningError",
    "Race",
    "Recipe",
    "RecipeError",
    "Result",
    "SharesBySpeed",
    "Worker",
    "compress",
    "layer_ratios",
    "plan_pipeline",
    "pruning_page",
    "replay",
    "scale_lr",
    "serve",
    "simulate",
    "train",
    "warmup_poly",
    "watch",
]

_PACKAGES = ("averaging", "cluster", "codecs", "data", "loggers", "optim", "pipeline", "recipes", "reports")
_FRAMEWORKS = ("huggingface", "lightning", "ray")  # each an extra

if not TYPE_CHECKING:  # mypy reads the imports above instead, and so still sees a misspelt name
    __getattr__ = lazy_names(__name__, _HOMES, (*_PACKAGES, *_FRAMEWORKS))


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES, *_FRAMEWORKS, "__version__"])
