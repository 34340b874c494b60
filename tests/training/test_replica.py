"""The books of a replica: what types of numbers, buffers and gradients that are not there do to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.strategies.averaging import make_averaging
from paceline.training.replica import GradientReplica, Replica, averaged_buffers

WORKERS = 4


def averaged(replicas, *, weight, open_steps=0, brings=None):
    """One average of all: what each sends, added up, and merged by each."""
    messages = [torch.empty(replica.size) for replica in replicas]
    for number, (replica, message) in enumerate(zip(replicas, messages, strict=True)):
        replica.pack_change(message, scale=1.0, brings=brings is None or number in brings)
    total = torch.stack(messages).sum(0)
    for replica in replicas:
        replica.merge(total.clone(), weight=weight, open_steps=open_steps)
        replica.catch_up()
    return total


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("member", ["local-sgd", "hpsgd"])
def test_small_changes_of_coarse_parameters_add_up(kind, member):
    """A worker that moves by one unit in the last place again and again: the shared model follows by a fourth of it.

    Counted from the shared model, and not from what the rounded parameters really were, most of it was lost.
    """
    weights = [torch.ones(1, dtype=kind) for _ in range(WORKERS)]
    replicas = [Replica([weight], [], make_averaging(member), workers=WORKERS) for weight in weights]
    moved = 0.0
    for _ in range(100):
        before = weights[0].clone()
        weights[0].copy_(
            torch.nextafter(before.float() * (1 + torch.finfo(kind).eps / 2), torch.tensor([9.0])).to(kind)
        )
        moved += float(weights[0].float() - before.float())
        averaged(replicas, weight=1 / WORKERS)
    assert moved > 50 * torch.finfo(kind).eps
    for replica, weight in zip(replicas, weights, strict=True):
        assert float(replica.shared) == pytest.approx(1.0 + moved / WORKERS, rel=1e-6)
        assert torch.equal(weight, replica.shared.to(kind))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_an_open_window_of_coarse_parameters_keeps_what_it_has(kind):
    weight = torch.ones(1, dtype=kind)
    member = make_averaging("diloco", period=9, overlap=True, outer_rate=1.0, outer_momentum=0.0)
    replica = Replica([weight], [], member, workers=1)
    weight += 0.25
    replica.merge(torch.tensor([0.001]), weight=1.0, open_steps=1)  # less than bfloat16 can tell from nothing
    replica.catch_up()
    message = torch.empty(1)
    replica.pack_change(message, scale=1.0, brings=True)
    assert float(message) == 0.25
    assert float(replica.shared) == pytest.approx(1.001)


class Mask(nn.Module):
    """Buffers of every kind."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.tensor([torch.finfo(torch.float32).min, float("-inf"), 0.1]))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("table", torch.tensor(1234567891))


def test_only_buffers_that_somebody_changes_are_averaged_and_the_others_keep_their_bits():
    modules = [Mask() for _ in range(3)]
    replicas = [
        Replica(list(module.parameters()), averaged_buffers(module), make_averaging("local-sgd"), workers=3)
        for module in modules
    ]
    for number, module in enumerate(modules):
        module.norm.running_mean += float(number)
        module.norm.num_batches_tracked += 3 * number
        module.scratch += float(number)
    averaged(replicas, weight=1 / 3)
    for number, module in enumerate(modules):
        assert module.norm.running_mean.tolist() == [1.0, 1.0]
        assert int(module.norm.num_batches_tracked) == 3
        assert torch.equal(module.norm.running_var, torch.ones(2))
        assert torch.equal(module.mask, Mask().mask)
        assert int(module.table) == 1234567891
        assert module.scratch.tolist() == [float(number)] * 3


def test_where_nobody_brings_anything_buffers_are_made_equal_and_nothing_else_moves():
    modules = [nn.BatchNorm1d(2) for _ in range(2)]
    member = make_averaging("diloco")
    replicas = [Replica(list(m.parameters()), averaged_buffers(m), member, workers=2) for m in modules]
    averaged(replicas, weight=0.5)  # the outer step has a velocity from here on, if only of zeros
    replicas[0]._outer._velocity.add_(1.0)
    before = replicas[0].shared.clone()
    modules[1].running_mean += 2.0
    averaged(replicas, weight=0.0, brings=())
    assert [module.running_mean.tolist() for module in modules] == [[1.0, 1.0]] * 2
    assert torch.equal(replicas[0].shared, before)


def test_a_parameter_without_a_gradient_anywhere_is_left_alone_by_the_optimiser():
    models = [nn.ParameterDict({"used": torch.ones(1), "unused": torch.ones(1)}) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5) for model in models]
    replicas = [
        GradientReplica(list(model.parameters()), [], workers=2, step=optimizer.step)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    models[0]["used"].grad = torch.full((1,), 4.0)  # the second worker has come to its end, and steps along
    averaged(replicas, weight=0.5, brings=(0,))
    assert models[0]["used"].grad.tolist() == [2.0]
    assert models[0]["unused"].grad is None
    optimizers[0].step()
    for model in models:
        assert model["unused"].tolist() == [1.0]
        assert torch.equal(model["used"], models[0]["used"])
    assert models[1]["used"].grad is None
