"""A local step of a worker that averages: its own batch -> its own gradient, the same wherever it is taken."""

from __future__ import annotations

import torch
from torch import nn

from paceline.training.batches import Batches
from paceline.workers.gradients import accumulate


def local_gradient(module: nn.Module, batches: Batches, *, worker: int, draw: int) -> float:
    """Leave the gradient of a worker's batch number `draw` in `.grad`; returns the mean loss.

    >>> from paceline.recipes import Recipe
    >>> from paceline.recipes.assembly import load_data, make_training
    >>> training = make_training(Recipe(), load_data(Recipe()))
    >>> local_gradient(training.module, Batches(training), worker=0, draw=0) > 0
    True
    """
    assignment = batches.assignment(worker=worker, draw=draw, blocks=1)
    module.train()
    module.zero_grad(set_to_none=True)
    torch.default_generator.manual_seed(assignment.seed)
    losses, _ = accumulate(module, assignment, parts=1)
    batches.judge(worker=worker, draw=draw, losses=losses)
    return float(losses.mean())
