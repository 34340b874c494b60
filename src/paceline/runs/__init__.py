"""Recipes carried out: under the simulator, by a server and its workers, by ranks that average, or from a recording."""

from paceline.runs.race import Race, check_strategies, with_strategies
from paceline.runs.simulation import Result, Run, as_document, make_run, result_of, simulate

__all__ = [
    "Race",
    "Result",
    "Run",
    "as_document",
    "check_strategies",
    "make_run",
    "result_of",
    "simulate",
    "with_strategies",
]
