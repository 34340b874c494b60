"""A batch in parts has the gradient of the batch at once; and what is no batch in parts is refused."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.optim.accumulate import Accumulate, PartWeights
from tests.optim.accumulate_cases import WORDS, Branches, all_at_once, close, gradients, in_groups, losses, word_parts

# -- the law ------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    parts=word_parts,
    steps=st.integers(1, 5),
    reduction=st.sampled_from(["mean", "sum"]),
    set_to_none=st.booleans(),
    scale=st.sampled_from([None, 2.0**10]),
)
def test_a_batch_in_parts_is_the_batch_at_once(parts, steps, reduction, set_to_none, scale):
    model, reference = Branches(), Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    accumulate, found, numbers = Accumulate(model, steps, reduction=reduction), [], []
    for words in accumulate(words for words in parts):  # it has no length
        each = losses(model, words)
        accumulate.backward(scaler.scale(each.mean() if reduction == "mean" else each.sum()))
        numbers.append(accumulate.part)
        if accumulate.ready:
            scaler.unscale_(optimizer)
            found.append(gradients(model))
            scaler.update()
            optimizer.zero_grad(set_to_none=set_to_none)
    groups = in_groups(parts, steps)
    assert numbers == [number for group in groups for number in range(1, len(group) + 1)]
    assert len(found) == len(groups)
    for one, group in zip(found, groups, strict=True):
        assert close(one, all_at_once(reference, torch.cat(group), reduction=reduction))


@settings(max_examples=30)
@given(parts=word_parts.filter(len), steps=st.integers(1, 5), seed=st.integers(0, 100))
def test_tokens_count_instead_of_samples_where_they_are_told(parts, steps, seed):
    model = Branches()
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(1, 50, (len(words),), generator=generator).double() for words in parts]
    accumulate, found = Accumulate(model, steps), []
    for words, counts in accumulate(zip(parts, tokens, strict=True)):
        accumulate.backward((losses(model, words) * counts).sum() / counts.sum(), samples=counts.sum())
        if accumulate.ready:
            found.append(gradients(model))
            model.zero_grad()
    groups = zip(in_groups(parts, steps), in_groups(tokens, steps), strict=True)
    for one, (words, counts) in zip(found, groups, strict=True):
        assert close(one, all_at_once(model, torch.cat(words), torch.cat(counts)))


@settings(max_examples=30)
@given(
    samples=st.lists(st.fractions(Fraction(1, 9), 99, max_denominator=9), min_size=1, max_size=9),
    extra=st.integers(0, 4),
)
def test_weights_are_shares_of_the_whole_exactly(samples, extra):
    """In fractions, there is no rounding to hide behind; groups may end before their steps."""
    group, weights = PartWeights(steps=len(samples) + extra, samples=Fraction(0)), []
    for number, each in enumerate(samples, 1):
        so_far, own = group.add(each, last=number == len(samples))
        weights = [weight * Fraction(so_far) for weight in weights] + [own]
    assert weights == [each / sum(samples) for each in samples]


def test_groups_of_equal_parts_are_not_gone_over_again_and_steps_of_one_change_no_bit(monkeypatch):
    passes = []
    scale = Accumulate._scale_gradients
    monkeypatch.setattr(Accumulate, "_scale_gradients", lambda self, by: (passes.append(by), scale(self, by)))
    model, words = Branches(), torch.arange(28) % WORDS
    for steps, size, expected in [(2, 7, []), (3, 7, []), (3, 6, [18 / 10]), (2, 8, [16 / 12]), (1, 5, [])]:
        passes.clear()
        accumulate = Accumulate(model, steps)
        for part in accumulate(words.split(size)):
            loss = losses(model, part).mean()
            accumulate.backward(loss)
            if steps == 1:
                in_parts = gradients(model)
                model.zero_grad()
                losses(model, part).mean().backward()
                assert all(torch.equal(in_parts[name], one) for name, one in gradients(model).items())
            if accumulate.ready:
                model.zero_grad()
        assert passes == pytest.approx(expected), (steps, size)


def test_half_precision_does_not_overflow_because_a_batch_comes_in_parts():
    """The whole batch's gradient is just below the largest number of fp16; a sum that is divided later is above it."""
    weight = nn.ParameterList([torch.ones(1, dtype=torch.float16)])
    accumulate = Accumulate(weight, 4)
    for inputs in accumulate([torch.full((2,), 60_000.0).half()] * 3):
        accumulate.backward((weight[0] * inputs).mean())
    assert weight[0].grad.item() == pytest.approx(60_000, rel=2e-3)


def test_several_models_are_weighted_and_what_they_share_is_weighted_once():
    shared = nn.Linear(1, 1, bias=False)
    first, second = nn.Sequential(shared), nn.Sequential(shared, nn.Linear(1, 1, bias=False))
    inputs = torch.arange(1.0, 7.0).view(6, 1)
    first(inputs).add(second(inputs)).mean().backward()
    wanted = [parameter.grad.clone() for parameter in second.parameters()]
    second.zero_grad()
    accumulate = Accumulate([first, second], 3)
    for part in accumulate(inputs.split([1, 4, 1])):
        accumulate.backward(first(part).add(second(part)).mean())
    torch.testing.assert_close([parameter.grad for parameter in second.parameters()], wanted)
