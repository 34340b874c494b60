"""The loop of Accumulate: one part ahead, quiet until the last, left in the middle; and what it refuses."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from paceline.optim.accumulate import Accumulate
from tests.optim.accumulate_cases import (
    WORDS,
    Branches,
    all_at_once,
    close,
    close_after_all,
    gradients,
    in_groups,
    losses,
)

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
