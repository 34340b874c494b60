"""Chooses how a round's gradients are computed: in one pass where the model allows it, else one by one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from paceline.workers.assignment import Assignment, Gradients
from paceline.workers.grouped import GroupedGradients, why_not_grouped
from paceline.workers.loop import LoopGradients

AGREEMENT = 1e-4


class Engine(Protocol):
    """What computes gradients."""

    def compute(self, parameters: torch.Tensor, buffers: torch.Tensor, assignments: Sequence[Assignment]) -> Gradients:
        """The gradient of each assignment at the given parameters."""


def make_engine(module: nn.Module) -> Engine:
    """The fastest engine that is right for a model; works on a copy of it.

    >>> type(make_engine(nn.LSTM(2, 2))).__name__, type(make_engine(nn.Linear(2, 2))).__name__
    ('LoopGradients', 'CheckedGradients')
    """
    loop = LoopGradients(copy.deepcopy(module))
    if why_not_grouped(module):
        return loop
    return CheckedGradients(GroupedGradients(copy.deepcopy(module)), loop)


class CheckedGradients:
    """One pass, once the first has been compared with the loop; the loop for good if they disagree.

    A module can do what its layers do not show: use a weight twice, or mix the samples of a batch.

    >>> engine = make_engine(nn.Sequential(nn.Linear(2, 2)))
    >>> batch = Assignment(inputs=torch.eye(2), targets=torch.tensor([0, 1]))
    >>> engine.compute(torch.zeros(6), torch.zeros(0), [batch]).losses
    tensor([0.6931])
    """

    def __init__(self, grouped: GroupedGradients, loop: LoopGradients) -> None:
        self._grouped = grouped
        self._loop = loop
        self._chosen: Engine | None = None

    @property
    def in_one_pass(self) -> bool:
        """Whether the comparison was made and held."""
        return self._chosen is self._grouped

    def compute(self, parameters: torch.Tensor, buffers: torch.Tensor, assignments: Sequence[Assignment]) -> Gradients:
        """The gradient of each assignment at the given parameters."""
        if self._chosen is not None:
            return self._compute_chosen(self._chosen, parameters, buffers, assignments)
        if len(assignments) == 1:  # nothing could be mixed up between workers yet: compare later
            return self._loop.compute(parameters, buffers, assignments)
        return self._compare(parameters, buffers, assignments)

    def _compute_chosen(
        self, chosen: Engine, parameters: torch.Tensor, buffers: torch.Tensor, assignments: Sequence[Assignment]
    ) -> Gradients:
        try:
            return chosen.compute(parameters, buffers, assignments)
        except RuntimeError:  # a path through the model that the comparison did not take
            if chosen is self._loop:
                raise
            self._chosen = self._loop
            return self._loop.compute(parameters, buffers, assignments)

    def _compare(self, parameters: torch.Tensor, buffers: torch.Tensor, assignments: Sequence[Assignment]) -> Gradients:
        expected = self._loop.compute(parameters, buffers, assignments)
        try:
            found = self._grouped.compute(parameters, buffers, assignments)
        except RuntimeError:  # a shape the model computes from its batch, for instance
            self._chosen = self._loop
            return expected
        self._chosen = self._grouped if _agree(expected, found) else self._loop
        return expected


def _agree(expected: Gradients, found: Gradients) -> bool:
    pairs = ((expected.gradients, found.gradients), (expected.buffers, found.buffers))
    return all(
        bool(torch.linalg.vector_norm(a - b) <= AGREEMENT * (1e-6 + torch.linalg.vector_norm(a))) for a, b in pairs
    )
