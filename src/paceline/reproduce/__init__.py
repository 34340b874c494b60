"""Every table and figure of the five sources, as an experiment that can be run: `paceline reproduce NAME`.

The rule of this package: the paper's figure stands beside ours, and what does not come out is said. Published numbers
stand in `published` with their source, and nowhere else; what an experiment concludes is a pure function of outcomes
that were computed.

    experiment   what an experiment is: jobs, outcomes, claims, findings
    claims       how a claim is judged: an order, a limit, a direction
    published    the numbers that the sources print
    running      jobs over all cores, their outcomes kept and gone on with
    documents    findings as a table in the terminal, as a page, as results.json; all of them as one page
    recipe_runs  a job that most experiments have: a recipe, simulated
    pruning_training, large_batch_training
                 the plain loops of the experiments on pruning and on LARS
    lgc, pruning, hpsgd, lars, lecture
                 the experiments of each source
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paceline.lookup import unknown

if TYPE_CHECKING:
    from paceline.reproduce.experiment import Experiment

__all__ = ["EXPERIMENTS", "experiment_named"]

_MODULES = {
    "lgc": ("1", "3", "4", "5", "6", "sizes"),
    "pruning": ("1", "2", "3", "formulas", "table-1", "table-2", "overhead", "bad-samples"),
    "hpsgd": ("4a", "4b", "5a", "5b", "6a", "6b", "analysis"),
    "lars": (*(f"table-{number}" for number in range(1, 7)), *(f"figure-{number}" for number in range(1, 5))),
    "lecture": ("one-bit", "sparsifier", "qsgd", "tradeoff", "theorem", "idle", "placement", "trends"),
}

EXPERIMENTS: dict[str, str] = {f"{module}-{rest}": module for module, names in _MODULES.items() for rest in names}
"""The name of every experiment, and the module that has it in its table EXPERIMENTS.

>>> "lgc-3" in EXPERIMENTS
True
"""


def experiment_named(name: str) -> Experiment:
    """Return an experiment; its module is imported now.

    >>> experiment_named("lgc-33")
    Traceback (most recent call last):
    ValueError: unknown experiment 'lgc-33'; did you mean 'lgc-3'? choose from lgc-1...
    """
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    module = importlib.import_module(f"paceline.reproduce.{EXPERIMENTS[name]}")
    found: Experiment = module.EXPERIMENTS[name]
    return found
