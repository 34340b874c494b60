"""Recipes carried out: under the simulator, by a server and its workers, by ranks that average, or from a recording."""

from paceline.runs.race import Race, Vary, check_strategies, check_vary, with_strategies
from paceline.runs.simulation import Result, Run, as_document, make_run, result_of, simulate

__all__ = [
    "Race",
    "Result",
    "Run",
    "Vary",
    "as_document",
    "check_strategies",
    "check_vary",
    "make_run",
    "result_of",
    "simulate",
    "with_strategies",
]
