"""A batch in parts has the gradient of the batch at once; and what is no batch in parts is refused."""

from __future__ import annotations

import contextlib
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.optim.accumulate import Accumulate
from paceline.optim.parts import Group

WORDS = 4


class Branches(nn.Module):
    """Some parts do not touch all of it: rows of a sparse embedding, and a branch for words above 1 alone."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(WORDS, 3, sparse=True, dtype=dtype)
        self.all = nn.Linear(3, 2, dtype=dtype)
        self.some = nn.Linear(3, 2, dtype=dtype)
        self.none = nn.Linear(3, 2, dtype=dtype)
        self.frozen = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)

    def forward(self, words):
        found = self.words(words)
        outputs = torch.tanh(self.all(found)) * self.frozen
        rare = words > 1
        if rare.any():
            outputs = outputs + rare[:, None] * self.some(found) ** 2
        return outputs


def losses(model, words):
    """One for each sample."""
    return (model(words) - 0.3).square().sum(1)


def gradients(model):
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: gradient.to_dense().clone() for name, gradient in found.items() if gradient is not None}


def all_at_once(model, words, weights=None, reduction="mean"):
    """What a batch gives without parts; `weights` is how much each of its samples counts."""
    model.zero_grad()
    each = losses(model, words)
    if reduction == "sum":
        each.sum().backward()
    else:
        weights = torch.ones(len(words)) if weights is None else weights
        ((each * weights).sum() / weights.sum()).backward()
    found = gradients(model)
    model.zero_grad()
    return found


def close(found, wanted, tolerance=1e-12):
    """Alike; a gradient of zeros is none."""
    for name in found.keys() | wanted.keys():
        known = found.get(name, wanted.get(name))
        one, other = found.get(name, torch.zeros_like(known)), wanted.get(name, torch.zeros_like(known))
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    return True


def in_groups(parts, steps):
    return [parts[first : first + steps] for first in range(0, len(parts), steps)]


word_parts = st.lists(st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=5).map(torch.tensor), max_size=8)


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
    group, weights = Group(steps=len(samples) + extra, samples=Fraction(0)), []
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


# -- the loop -----------------------------------------------------------------------------------------------------


def test_the_loader_is_asked_one_part_ahead_but_never_past_the_end_of_a_group():
    asked, seen = [], []
    model = nn.Linear(1, 1)

    def loader():
        for number in range(5):
            asked.append(number)
            yield torch.ones(1, 1) * number

    accumulate = Accumulate(model, 3)
    for part in accumulate(loader()):
        seen.append((int(part), len(asked), accumulate.ready))
        accumulate.backward(model(part).mean())
        seen[-1] += (accumulate.ready,)
        if accumulate.ready:
            model.zero_grad()
    assert seen == [(0, 2, 0, 0), (1, 3, 0, 0), (2, 3, 0, 1), (3, 5, 0, 0), (4, 5, 0, 1)]
    assert (accumulate.part, accumulate.ready) == (0, False)


class Averaging(nn.Linear):
    """What Accumulate sees of a DistributedDataParallel."""

    quiet = 0

    def __init__(self):
        super().__init__(1, 1)

    @contextlib.contextmanager
    def no_sync(self):
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential, lambda model: [nn.Linear(1, 1), model]])
def test_all_parts_but_the_last_are_quiet(wrap):
    model, quiet = Averaging(), []
    accumulate = Accumulate(wrap(model), 3)
    for part in accumulate(torch.ones(5, 1).split(1)):
        quiet.append(model.quiet)
        accumulate.backward(model(part).mean())
        quiet.append(model.quiet)
        if accumulate.ready:
            model.zero_grad()
    assert quiet == [1, 1, 1, 1, 0, 0, 1, 1, 0, 0]
    assert model.quiet == 0


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("how", ["break", "raise", "no backward", "the loader", "held"])
def test_a_loop_that_is_left_is_not_quiet_and_must_be_forgotten(how):
    model = Averaging()
    accumulate = Accumulate(model, 3)

    def loader():
        yield from torch.ones(2, 1).split(1)
        if how == "the loader":
            raise BrokenError
        yield torch.ones(1, 1)

    parts = accumulate(loader())
    with (
        pytest.raises(RuntimeError, match="part 2 of 3 had no backward")
        if how == "no backward"
        else (contextlib.suppress(BrokenError))
    ):
        for part in parts if how == "held" else accumulate(loader()):
            if accumulate.part == 2:
                assert model.quiet == 1
                if how in ("break", "held"):
                    break
                if how == "raise":
                    raise BrokenError
                continue
            accumulate.backward(model(part).mean())
    if how == "held":  # nobody can know that the loop will not go on
        with pytest.raises(RuntimeError, match="not at its end"):
            next(accumulate(loader()))
        parts.close()
    assert model.quiet == 0
    with pytest.raises(RuntimeError, match=r"gradients of 1 of 3 parts are left .*forget"):
        next(accumulate(loader()))
    accumulate.forget()
    assert model.weight.grad is None
    assert close_after_all(accumulate, model)


def close_after_all(accumulate, model):
    """It works as if nothing had been."""
    inputs = torch.arange(1.0, 5.0).view(4, 1)
    for part in accumulate(inputs.split([1, 2, 1])):
        accumulate.backward(model(part).square().mean())
    found = gradients(model)
    model.zero_grad()
    model(inputs).square().mean().backward()
    return close(found, gradients(model), 1e-5)


@pytest.mark.parametrize("leave_at", [1, 3])
def test_a_loop_that_is_left_between_groups_leaves_nothing(leave_at):
    """Before the first backward of a group, or after its step."""
    model = nn.Linear(1, 1)
    accumulate = Accumulate(model, 3)
    for part in accumulate(torch.ones(9, 1).split(1)):
        if accumulate.part == leave_at == 1:
            break
        accumulate.backward(model(part).mean())
        if accumulate.ready:
            model.zero_grad()
            break
    assert close_after_all(accumulate, model)


@pytest.mark.parametrize("before_backward", [True, False])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_group_that_is_forgotten_in_the_loop_is_left_out(at, before_backward):
    model, found = Branches(), []
    parts = (torch.arange(21) % WORDS).split([3, 1, 2, 4, 3, 1, 2, 5])
    accumulate = Accumulate(model, 3)
    for number, words in enumerate(accumulate(parts), 1):
        if number == at and before_backward:
            accumulate.forget()
            with pytest.raises(RuntimeError, match="group is forgotten"):
                accumulate.backward(losses(model, words).mean())
            continue
        accumulate.backward(losses(model, words).mean())
        if number == at:
            accumulate.forget()
            assert not accumulate.ready
        if accumulate.ready:
            found.append(gradients(model))
            model.zero_grad()
    for one, group in zip(found, in_groups(parts[at:], 3), strict=True):
        assert close(one, all_at_once(model, torch.cat(group)))


# -- misuse -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"steps": 0}, ValueError, r"steps must be a whole number, 1 or more \(steps=0\)"),
        ({"steps": 2.0}, ValueError, r"\(steps=2\.0\)"),
        ({"steps": True}, ValueError, r"\(steps=True\)"),
        ({"reduction": "men"}, ValueError, "unknown reduction 'men'; did you mean 'mean'"),
        ({"model": None}, TypeError, r"must be a torch.nn.Module, or several of them \(model=NoneType\)"),
        ({"model": []}, TypeError, r"\(model=\[\]\)"),
        ({"model": [nn.Linear(1, 1), "b"]}, TypeError, r"\(model=str\)"),
    ],
)
def test_bad_settings_are_refused(settings, error, says):
    with pytest.raises(error, match=says):
        Accumulate(**({"model": nn.Linear(1, 1), "steps": 2} | settings))


@pytest.mark.parametrize(
    ("attributes", "bad", "good"),
    [
        ({"no_sync": contextlib.nullcontext, "static_graph": True}, {"steps": 2}, {"steps": 1}),
        ({"set_requires_gradient_sync": print}, {"steps": 2}, {"steps": 2, "reduction": "sum"}),
    ],
    ids=["static graph", "fully sharded"],
)
def test_a_model_whose_gradients_cannot_be_had_in_parts_is_refused_at_once(attributes, bad, good):
    inner = nn.Linear(1, 1)
    for name, value in attributes.items():
        setattr(inner, name, value)
    with pytest.raises(ValueError, match=r"static_graph|fully_shard"):
        Accumulate(nn.Sequential(inner), **bad)
    Accumulate(nn.Sequential(inner), **good)


@pytest.mark.parametrize(
    ("part", "samples", "says"),
    [
        (torch.ones(2, 1), 0, r"samples must be more than 0, and finite \(samples=0\)"),
        (torch.ones(2, 1), -1.5, r"samples=-1\.5"),
        (torch.ones(2, 1), float("nan"), "samples=nan"),
        (torch.ones(2, 1), torch.tensor(float("inf")), "samples=inf"),
        (torch.ones(0, 1), None, "samples=0"),
        (["words"], None, r"cannot see how many samples this part has .*: backward\(loss, samples=\.\.\.\)"),
    ],
)
def test_a_part_without_samples_is_refused_and_may_be_told_again(part, samples, says):
    model = nn.Linear(1, 1)
    accumulate = Accumulate(model, 2)
    for _ in accumulate([part]):
        loss = model(torch.ones(3, 1)).mean()
        with pytest.raises(ValueError, match=says):
            accumulate.backward(loss, samples=samples)
        accumulate.backward(loss, samples=3)
        assert accumulate.ready
    assert model.weight.grad.item() == 1


@pytest.mark.parametrize("loss", [torch.ones(2, requires_grad=True), 1.0])
def test_a_loss_of_many_samples_or_of_none_is_refused(loss):
    accumulate = Accumulate(nn.Linear(1, 1), 2)
    for _ in accumulate([torch.ones(2, 1)]):
        with pytest.raises(
            ValueError, match=r"loss must be one number, the mean over the part \((shape \(2,\)|float)\)"
        ):
            accumulate.backward(loss)
        break


def test_sums_have_no_samples():
    accumulate = Accumulate(nn.Linear(1, 1), 2, reduction="sum")
    for _ in accumulate([torch.ones(2, 1)]):
        with pytest.raises(ValueError, match="samples is for means"):
            accumulate.backward(torch.ones((), requires_grad=True), samples=2)
        break


def test_sums_that_are_left_over_must_be_forgotten_too():
    accumulate = Accumulate(nn.Linear(1, 1), 2, reduction="sum")
    for _ in accumulate([1, 2]):
        accumulate.backward(torch.ones((), requires_grad=True))
        break
    with pytest.raises(RuntimeError, match="gradients of 1 of 2 parts are left"):
        next(accumulate([1, 2]))


def test_a_part_has_one_backward_in_one_loop():
    model = nn.Linear(1, 1)
    accumulate, parts = Accumulate(model, 2), torch.ones(2, 1).split(1)
    with pytest.raises(RuntimeError, match="inside of the loop"):
        accumulate.backward(model(parts[0]).mean())
    for part in accumulate(parts):
        with pytest.raises(RuntimeError, match="nested loop needs an Accumulate of its own"):
            next(accumulate(parts))
        accumulate.backward(model(part).mean())
        with pytest.raises(RuntimeError, match="already"):
            accumulate.backward(model(part).mean())
    with pytest.raises(RuntimeError, match="inside of the loop"):
        accumulate.backward(model(parts[0]).mean())
    assert model.weight.grad.item() == 1


def test_another_model_than_the_one_that_is_trained_is_found_out():
    model = nn.Linear(1, 1)
    accumulate = Accumulate(nn.Linear(1, 1), 3)
    for part in accumulate(torch.ones(2, 1).split(1)):
        loss, last = model(part).mean(), accumulate.part == 2
        says = "give Accumulate the model that is trained"
        with pytest.raises(RuntimeError, match=says) if last else contextlib.nullcontext():
            accumulate.backward(loss)
        if last:
            break
