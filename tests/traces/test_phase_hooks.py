"""Hooks that tell forward from backward: whatever a model returns, and without a trace on the model."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from paceline.traces.phase_hooks import PhaseHooks
from paceline.traces.step_clock import StepClock

RETURNED = {
    "a tensor": lambda y: y,
    "a tuple": lambda y: (torch.zeros(1), y),
    "a dict of lists": lambda y: {"none": None, "logits": [y]},
}


class Returns(nn.Module):
    def __init__(self, how) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(3, 2), how

    def forward(self, x):
        self.output = self.layer(x)
        return RETURNED[self.how](self.output)


def watched(how="a tensor"):
    clock, model = StepClock(lambda times: None), Returns(how)
    hooks = PhaseHooks(model, clock)
    hooks.attach()
    return model, clock, hooks


@pytest.mark.parametrize("how", RETURNED)
def test_phases_follow_the_passes_and_gradients_are_the_same_bits(how):
    model, clock, hooks = watched(how)
    inputs = torch.ones(2, 3)
    for _ in range(2):
        model(inputs)
        assert clock.phase == "forward"
        model.output.square().sum().backward()
        assert clock.phase == "backward"
    found = model.layer.weight.grad.clone()
    hooks.detach()
    model.zero_grad()
    clock.enter("other")
    for _ in range(2):
        model(inputs)
        model.output.square().sum().backward()
    assert clock.phase == "other"
    assert torch.equal(found, model.layer.weight.grad)


def test_passes_without_gradients_are_nobody_s_phase():
    model, clock, _ = watched()
    with torch.no_grad():
        model(torch.ones(2, 3))
    assert clock.phase == "input"


def test_a_copy_and_a_saved_model_tell_nobody():
    model, clock, hooks = watched()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other(torch.ones(2, 3)).sum().backward()
        assert clock.phase == "input"
    hooks.detach()
    hooks.detach()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_parameter_that_is_returned_keeps_no_hooks_and_eval_mode_is_forward():
    model, clock, _ = watched()
    model.how = "its weight"
    RETURNED["its weight"] = lambda y: (model.layer.weight, y)
    try:
        model.eval()
        for _ in range(3):
            model(torch.ones(2, 3))
            assert clock.phase == "forward"
    finally:
        del RETURNED["its weight"]
    assert not model.layer.weight._backward_hooks
