"""One run of `pruning`: the loop of `paceline.reproduce.pruning_training`, with the policy that is only tried here."""

from __future__ import annotations

from benchmarks.pruning_cases import POLICIES, Ending, Size, Task
from paceline.reproduce import pruning_training
from paceline.reproduce.pruning_training import load

__all__ = ["load", "train"]


def train(size: Size, task: Task) -> Ending:
    """Carry out one run."""
    return pruning_training.train(size, task, POLICIES)
