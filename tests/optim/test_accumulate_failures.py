"""What goes wrong outside of Accumulate must not become a wrong gradient: failed backwards, steps not taken."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from paceline.optim.accumulate import Accumulate
from tests.optim.accumulate_cases import WORDS, Branches, all_at_once, close, close_after_all, gradients, losses

# -- a backward that fails ----------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Has no memory left for its backward."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError


def failing(model, part):
    """A loss whose backward fails when its gradient has reached the weights: what was computed last goes first."""
    fails = Fails.apply(torch.ones((), requires_grad=True))
    return model(part).mean() + fails


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_group_whose_backward_failed_is_refused_until_it_is_forgotten(at, reduction):
    model = nn.Linear(1, 1)
    accumulate, seen = Accumulate(model, 3, reduction=reduction), []

    def epoch():
        for part in accumulate(torch.ones(6, 1).split(1)):
            seen.append(accumulate.part)
            if accumulate.part != at:
                accumulate.backward(model(part).mean())
                continue
            with pytest.raises(MemoryError):
                accumulate.backward(failing(model, part))
            assert not accumulate.ready
            assert model.weight.grad.item() > accumulate.part / 4  # it is there, and would be counted
            with pytest.raises(RuntimeError, match=rf"part {at}'s backward failed: call accumulate\.forget\(\)"):
                accumulate.backward(model(part).mean())

    with pytest.raises(RuntimeError, match=rf"part {at}'s backward failed: call accumulate\.forget\(\)"):
        epoch()
    assert seen == list(range(1, at + 1))
    with pytest.raises(RuntimeError, match=rf"gradients of {at} of 3 parts are left .*forget"):
        epoch()
    accumulate.forget()
    assert reduction == "sum" or close_after_all(accumulate, model)


def test_a_group_that_failed_and_is_forgotten_in_the_loop_is_left_out():
    model = Branches()
    parts = (torch.arange(12) % WORDS).split([3, 1, 2, 4, 2])
    accumulate, found = Accumulate(model, 3), []
    for number, words in enumerate(accumulate(parts), 1):
        try:
            accumulate.backward(failing(model, words) if number == 2 else losses(model, words).mean())
        except MemoryError:
            accumulate.forget()
        if accumulate.ready:
            found.append(gradients(model))
    assert len(found) == 1
    assert close(found[0], all_at_once(model, torch.cat(parts[2:])))


# -- gradients that are left over ---------------------------------------------------------------------------------


def epoch_of(accumulate, model, *, behave, groups=3):
    """An epoch of parts of one sample; `behave` is called when a group is ready."""
    for part in accumulate(torch.ones(2 * groups, 1).split(1)):
        accumulate.backward(model(part).mean())
        if accumulate.ready:
            behave()


@pytest.mark.parametrize("sparse", [False, True])
def test_a_step_behind_the_loop_is_found_out_at_the_next_epoch(sparse):
    """Its gradients are still there, for `ready` is not true behind the loop."""
    model, words = nn.Embedding(2, 1, sparse=sparse), torch.tensor([0, 1])
    accumulate = Accumulate(model, 2)
    for part in accumulate(words.split(1)):
        accumulate.backward(model(part).mean())
    assert not accumulate.ready
    for part in accumulate(words.split(1)):
        if accumulate.part == 1:
            with pytest.raises(RuntimeError, match=r"gradients are there already .*\(weight\).*at accumulate\.ready"):
                accumulate.backward(model(part).mean())
            model.zero_grad()
        accumulate.backward(model(part).mean())
    assert torch.equal(gradients(model)["weight"], torch.full((2, 1), 0.5))


def test_a_step_without_a_zero_grad_is_found_out_at_the_second_group():
    model, done = nn.Linear(1, 1), []
    with pytest.raises(RuntimeError, match="gradients are there already"):
        epoch_of(Accumulate(model, 2), model, behave=lambda: done.append(1))
    assert done == [1]


def test_what_is_left_in_one_of_several_models_is_found():
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    first(torch.ones(1, 1)).mean().backward()
    for parameter in second.parameters():
        parameter.grad = torch.zeros_like(parameter)
    accumulate = Accumulate([first, second], 2)
    with pytest.raises(RuntimeError, match="gradients are there already"):
        epoch_of(accumulate, second, behave=second.zero_grad)


@pytest.mark.parametrize("how", ["none", "zeros", "in the loop", "skipped by a scaler", "frozen", "sparse"])
def test_gradients_that_are_zero_at_the_first_backward_are_fine(how):
    model = nn.Embedding(2, 1, sparse=True) if how == "sparse" else nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=how == "skipped by a scaler")
    accumulate, before, groups = Accumulate(model, 2), model.weight.detach().clone(), 0
    if how == "frozen":
        model.bias.grad = torch.ones(1)
        model.bias.requires_grad_(False)
    for part in (part for _ in range(2) for part in accumulate(torch.ones(6, 1).split(1))):
        if how == "in the loop" and accumulate.part == 1:
            optimizer.zero_grad()
        loss = model(part.long() if how == "sparse" else part).mean()
        accumulate.backward(scaler.scale(loss) * (math.inf if scaler.is_enabled() else 1))
        if accumulate.ready:
            groups += 1
            scaler.step(optimizer)
            scaler.update()
            if how == "frozen":
                model.weight.grad = None
            elif how != "in the loop":
                optimizer.zero_grad(set_to_none=how not in ("zeros", "sparse"))
    assert groups == 6
    assert torch.equal(model.weight, before) == (how == "skipped by a scaler")


# -- gradients that are not left alone in the middle of a group ---------------------------------------------------


def clipped(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


SLIPS = {
    "zeroed": (lambda model, optimizer: optimizer.zero_grad(), "gradients of the parts before are gone"),
    "filled with zeros": (lambda model, optimizer: optimizer.zero_grad(set_to_none=False), "have been changed"),
    "clipped": (clipped, "the gradients of the parts before have been changed"),
    "stepped": (lambda model, optimizer: optimizer.step(), "the parameters have been changed"),
}


@pytest.mark.parametrize(("slip", "words"), SLIPS.values(), ids=SLIPS)
def test_what_belongs_to_the_end_of_a_group_is_refused_in_its_middle(slip, words):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate = Accumulate(model, 3)

    def slipping():
        for inputs in accumulate(torch.ones(6, 1).split(1)):
            accumulate.backward(model(inputs).mean())
            slip(model, optimizer)

    with pytest.raises(RuntimeError, match=words) as refused:
        slipping()
    assert "accumulate.ready" in str(refused.value)
    accumulate.forget()
    for inputs in accumulate(torch.ones(6, 1).split(1)):
        accumulate.backward(model(inputs).mean())
        if accumulate.ready:
            slip(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
