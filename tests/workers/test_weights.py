"""Samples that weigh more: the gradient is the weighted sum, and the losses told are as without."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.workers.engine import make_engine
from paceline.workers.gradients import Assignment, LoopGradients
from paceline.workers.grouped import GroupedGradients

ENGINES = {"loop": LoopGradients, "in blocks": lambda m: LoopGradients(m, block_by_block=True), "one": GroupedGradients}


def work(number, *, weights, blocks_done=4):
    generator = torch.Generator().manual_seed(number)
    return Assignment(
        inputs=torch.randn(8, 3, generator=generator),
        targets=torch.randint(0, 2, (8,), generator=generator),
        weights=weights,
        blocks=4,
        blocks_done=blocks_done,
    )


def by_sample(module, assignment):
    """Sum of weight x gradient of each sample done, over the size of the batch; and the losses."""
    weights = torch.ones(8) if assignment.weights is None else assignment.weights
    total, losses = [torch.zeros_like(parameter) for parameter in module.parameters()], []
    for index in range(assignment.samples_done):
        one = slice(index, index + 1)
        loss = F.cross_entropy(module(assignment.inputs[one]), assignment.targets[one])
        for sum_, gradient in zip(total, torch.autograd.grad(loss, list(module.parameters())), strict=True):
            sum_.add_(gradient, alpha=float(weights[index]) / 8)
        losses.append(loss.detach())
    return torch.cat([part.reshape(-1) for part in total]), torch.stack(losses)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gradient_is_the_weighted_sum_of_those_of_its_samples(engine):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    weights = torch.tensor([2.0, 1, 0, 2, 1, 5, 1, 0.5])
    works = [work(1, weights=weights), work(2, weights=None), work(3, weights=weights.flip(0), blocks_done=2)]
    made = ENGINES[engine](module)
    found = made.compute(made.model.parameters.clone(), made.model.buffers, works)
    for row, assignment in enumerate(works):
        gradient, losses = by_sample(module, assignment)
        torch.testing.assert_close(found.gradients[row], gradient)
        torch.testing.assert_close(found.sample_losses[row], losses)  # not weighed
        torch.testing.assert_close(found.losses[row], losses.mean())


def test_weights_do_not_change_which_engine_is_taken_and_ones_change_nothing():
    torch.manual_seed(0)
    engine = make_engine(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    start = engine._loop.model.parameters.clone(), engine._loop.model.buffers
    plain = engine.compute(*start, [work(1, weights=None), work(2, weights=None)])
    ones = engine.compute(*start, [work(1, weights=torch.ones(8)), work(2, weights=torch.ones(8))])
    assert engine.in_one_pass
    assert torch.equal(plain.gradients, ones.gradients)


def test_weights_for_other_samples_are_refused():
    with pytest.raises(ValueError, match=r"shape=\(7,\), samples=8"):
        work(1, weights=torch.ones(7))
