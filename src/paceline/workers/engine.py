"""Chooses how a round's gradients are computed: in one pass where the model allows it and it pays, else one by one.

A module can do what its layers do not show (use a weight twice, mix the samples of a batch), so the one-pass engine
checks itself: the two engines are compared once, in float64 and at shifted parameters, and the loop is used for good if
they disagree. It is also used where one pass would be slower: by a rule on the sizes of the layers' outputs, never by a
clock, so that the same recipe gives the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from paceline.randomness import torch_generator
from paceline.workers.gradients import Assignment, Gradients, LoopGradients
from paceline.workers.grouped import GroupedGradients, why_not_grouped
from paceline.workers.losses import CrossEntropy, SampleLoss

AGREEMENT = 1e-6
COMPARED_WORKERS = 2

# One pass over all workers' samples loses to the loop once a layer's output no longer fits the processor's cache.
# Measured (`make bench ARGS="gradients"`): ahead in every case up to 21 MB, behind in most from 31 MB on.
LARGEST_OUTPUT_BYTES = 24_000_000
MOST_WASTED = 1 / 3


class Engine(Protocol):
    """Computes the gradients of several workers."""

    def compute(self, parameters: torch.Tensor, buffers: torch.Tensor, assignments: Sequence[Assignment]) -> Gradients:
        """Return the gradient of each assignment at the given parameters."""


def make_engine(module: nn.Module, loss: SampleLoss | None = None) -> Engine:
    """Return the fastest engine that is right for a model and a loss; it works on a copy of the model.

    >>> type(make_engine(nn.LSTM(2, 2))).__name__, type(make_engine(nn.Linear(2, 2))).__name__
    ('LoopGradients', 'CheckedGradients')
    """
    if why_not_grouped(module) or (loss is not None and not loss.per_sample):
        return LoopGradients(copy.deepcopy(module), loss)
    return CheckedGradients(module, loss)


class CheckedGradients:
    """One pass once a comparison with the loop has held, for as long as its layers' outputs stay small.

    A module can do what its layers do not show: use a weight twice, or mix the samples of a batch. So the two engines
    are compared once, in float64 (where rounding hides nothing) and at shifted parameters (where a zero hides nothing).
    The choice depends on the model and on shapes alone, never on a clock: it is part of what makes a result the same
    to the last bit. Batches of different sizes, where workers have shares by their speed, are as many passes.

    >>> engine = make_engine(nn.Sequential(nn.Linear(2, 2)))
    >>> batch = Assignment(inputs=torch.eye(2), targets=torch.tensor([0, 1]))
    >>> engine.compute(torch.zeros(6), torch.zeros(0), [batch, batch]).losses
    tensor([0.6931, 0.6931])
    >>> engine.in_one_pass
    True
    """

    def __init__(self, module: nn.Module, loss: SampleLoss | None = None) -> None:
        self._loss = CrossEntropy() if loss is None else loss
        self._loop = LoopGradients(copy.deepcopy(module), self._loss)
        self._grouped = GroupedGradients(copy.deepcopy(module), self._loss)
        self._output_bytes_per_sample: int | None = None
        self.in_one_pass = False

    def compute(self, parameters: torch.Tensor, buffers: torch.Tensor, assignments: Sequence[Assignment]) -> Gradients:
        """Return the gradient of each assignment at the given parameters."""
        if len(assignments) > 1 and self._output_bytes_per_sample is None:
            compared = cut_alike(assignments[:COMPARED_WORKERS])
            self._output_bytes_per_sample, self.in_one_pass = _compare(
                self._loop.model.module, self._loss, parameters, buffers, compared
            )
        sizes = [(len(assignment.inputs), assignment.blocks) for assignment in assignments]
        if len(set(sizes)) <= 1:
            return self._compute_alike(parameters, buffers, assignments)
        found: dict[int, tuple[Gradients, int]] = {}  # by place among the assignments: where its row is
        for size in dict.fromkeys(sizes):
            places = [place for place, each in enumerate(sizes) if each == size]
            rows = self._compute_alike(parameters, buffers, [assignments[place] for place in places])
            found |= {place: (rows, row) for row, place in enumerate(places)}
        return _in_order([found[place] for place in range(len(assignments))])

    def _compute_alike(
        self, parameters: torch.Tensor, buffers: torch.Tensor, assignments: Sequence[Assignment]
    ) -> Gradients:
        """Return the gradient of each assignment; all have one size and one number of blocks."""
        if not self.takes_one_pass(assignments):
            return self._loop.compute(parameters, buffers, assignments)
        try:
            return self._grouped.compute(parameters, buffers, assignments)
        except Exception:  # a path through the model that the comparison did not take
            self.in_one_pass = False
            return self._loop.compute(parameters, buffers, assignments)

    def takes_one_pass(self, assignments: Sequence[Assignment]) -> bool:
        """Return whether these would be computed in one pass, as far as is known yet."""
        if not self.in_one_pass or self._output_bytes_per_sample is None or len(assignments) == 1:
            return False
        if len({(len(assignment.inputs), assignment.blocks) for assignment in assignments}) > 1:
            return False
        samples = sum(len(assignment.inputs) for assignment in assignments)
        done = [assignment.blocks_done for assignment in assignments]
        wasted = 1 - sum(done) / (len(done) * max(done))  # a pass goes as far as whoever got furthest
        return samples * self._output_bytes_per_sample <= LARGEST_OUTPUT_BYTES and wasted <= MOST_WASTED


def cut_alike(assignments: Sequence[Assignment]) -> list[Assignment]:
    """Return the assignments with as many samples each as the smallest has.

    >>> batches = [Assignment(inputs=torch.zeros(samples, 2), targets=torch.zeros(samples)) for samples in (6, 4)]
    >>> [len(each.inputs) for each in cut_alike(batches)]
    [4, 4]
    """
    samples = min(len(assignment.inputs) for assignment in assignments)
    if all(len(assignment.inputs) == samples for assignment in assignments):
        return list(assignments)
    return [
        replace(
            assignment,
            inputs=assignment.inputs[:samples],
            targets=assignment.targets[:samples],
            weights=None if assignment.weights is None else assignment.weights[:samples],
        )
        for assignment in assignments
    ]


def _in_order(rows: Sequence[tuple[Gradients, int]]) -> Gradients:
    """Return rows of several results as one."""
    return Gradients(
        gradients=torch.stack([found.gradients[row] for found, row in rows]),
        buffers=torch.stack([found.buffers[row] for found, row in rows]),
        losses=torch.stack([found.losses[row] for found, row in rows]),
        loss_variances=torch.stack([found.loss_variances[row] for found, row in rows]),
        sample_losses=tuple(found.sample_losses[row] for found, row in rows),
    )


def _compare(
    module: nn.Module,
    loss: SampleLoss,
    parameters: torch.Tensor,
    buffers: torch.Tensor,
    assignments: Sequence[Assignment],
) -> tuple[int, bool]:
    """Return the bytes of the largest output of a layer for one sample, and whether the engines agree."""
    exact = [
        replace(
            assignment,
            inputs=_exact(assignment.inputs),
            targets=_exact(assignment.targets),
            weights=None,
            seed=0,
        )
        for assignment in assignments
    ]
    shift = torch.randn(parameters.numel(), generator=torch_generator(0, "comparison")).double()
    shifted = parameters.double() + 0.01 * shift
    loop, grouped = (kind(copy.deepcopy(module).double(), loss) for kind in (LoopGradients, GroupedGradients))
    try:
        with _largest_output(loop.model.module) as sizes:
            expected = loop.compute(shifted, buffers.double(), exact)
        found = grouped.compute(shifted, buffers.double(), exact)
    except Exception:  # it will not run in float64, or takes shapes from its batch: no proof, no pass
        return 0, False
    pairs = ((expected.gradients, found.gradients), (expected.buffers, found.buffers))
    norm = torch.linalg.vector_norm
    return 4 * max(sizes, default=0), all(bool(norm(a - b) <= AGREEMENT * norm(a)) for a, b in pairs)


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def _largest_output(module: nn.Module) -> Iterator[list[int]]:
    """Collect how many numbers each layer puts out for one sample."""
    sizes: list[int] = []

    def note(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.dim():
            sizes.append(output[0].numel())

    hooks = [part.register_forward_hook(note) for part in module.modules()]
    try:
        yield sizes
    finally:
        for hook in hooks:
            hook.remove()
