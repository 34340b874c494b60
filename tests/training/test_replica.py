"""The books of a replica: what types of numbers, buffers and gradients that are not there do to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.codecs import machine_code
from paceline.strategies.averaging import make_averaging
from paceline.training import replica as replica_module
from paceline.training.replica import GradientReplica, Replica, averaged_buffers

WORKERS = 4


def averaged(replicas, *, weight, open_steps=0, brings=None):
    """One average of all: what each sends, added up, and merged by each."""
    messages = [torch.empty(replica.size, dtype=replica.dtype) for replica in replicas]
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


class Doubled(nn.Module):
    """Parameters in float32, of which one has kernels, beside a buffer in float64."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(replica_module.KERNEL_ELEMENTS))
        self.register_buffer("scale", torch.tensor([1.0, 1e300], dtype=torch.float64))


def averaged_of(kind, module, workers):
    parameters, buffers = list(module.parameters()), averaged_buffers(module)
    if kind == "ssgd":
        return GradientReplica(parameters, buffers, workers=workers, step=lambda: None)
    return Replica(parameters, buffers, make_averaging(kind), workers=workers)


@pytest.mark.parametrize("kind", ["local-sgd", "hpsgd", "ssgd"])
def test_buffers_in_float64_beside_float32_parameters_are_averaged_in_float64(kind):
    modules = [Doubled() for _ in range(4)]
    replicas = [averaged_of(kind, module, 4) for module in modules]
    for number, module in enumerate(modules):
        module.scale *= 1.0 + number * 2.0**-45
        with torch.no_grad():
            module.weight += float(number)
        module.weight.grad = torch.full_like(module.weight, float(number))
    averaged(replicas, weight=1 / 4)
    for module in modules:
        assert module.scale.tolist() == pytest.approx(
            [1.0 + 1.5 * 2.0**-45, 1e300 * (1.0 + 1.5 * 2.0**-45)], rel=1e-15, abs=0
        )
        moved = module.weight.grad if kind == "ssgd" else module.weight
        assert torch.equal(moved, torch.full_like(moved, 1.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("workers", [1, 3, 7])
@pytest.mark.parametrize("count", [2**24 + 1, 10**9 + 7, 2**40 + 3, -(2**30) - 5])
def test_a_counter_beyond_what_float32_counts_is_averaged_exactly(count, workers, dtype):
    modules = [nn.BatchNorm1d(2).to(dtype) for _ in range(workers)]
    replicas = [averaged_of("local-sgd", module, workers) for module in modules]
    for number, module in enumerate(modules):
        module.num_batches_tracked += count + 2 * number
    averaged(replicas, weight=1 / workers)
    assert [int(module.num_batches_tracked) for module in modules] == [count + workers - 1] * workers


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


# -- kernels and torch's operations ------------------------------------------------------------------------------------

MEMBERS = {
    "local-sgd": {},
    "hpsgd": {},
    "hpsgd, the paper": {"rebase": False},
    "diloco, overlap": {"period": 3, "overlap": True},
}


def trained(member, tensors, *, threads):
    """A life of one replica: steps, averages with and without an open window, a flush; every vector on the way."""
    name = member.partition(",")[0]
    draws = torch.Generator().manual_seed(5)
    replica = Replica(tensors, [], make_averaging(name, **MEMBERS[member]), workers=3)
    message, seen, before = torch.zeros(replica.size), [], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for open_steps, brings in ((1, True), (2, True), (0, True), (0, False), (1, True)):
            for tensor in tensors:
                tensor.data.add_(torch.randn(tensor.shape, generator=draws))
            replica.pack_change(message, scale=1.0 if open_steps else 0.25, brings=brings)
            seen.append(message.clone())
            message.add_(torch.randn(replica.size, generator=draws))
            replica.merge(message, weight=1 / 3, open_steps=open_steps)
            replica.catch_up()
            seen += [replica.shared.clone(), replica._base.clone(), *(tensor.detach().clone() for tensor in tensors)]
    finally:
        torch.set_num_threads(before)
    return replica, seen


def tensors_of(kind):
    draws = torch.Generator().manual_seed(3)
    small, large, last = (torch.randn(*shape, generator=draws) for shape in ((7,), (90, 110), (3, 5)))
    if kind == "transposed":
        large = large.t()
    return [nn.Parameter(tensor) for tensor in (small, large, last)]


@pytest.mark.parametrize("kind", ["plain", "transposed"])
@pytest.mark.parametrize("member", MEMBERS)
def test_kernels_give_the_bits_of_torchs_operations_on_any_number_of_threads(member, kind, monkeypatch):
    monkeypatch.setattr(replica_module, "KERNEL_ELEMENTS", 10**9)
    plain, expected = trained(member, tensors_of(kind), threads=1)
    assert [span.has_kernels for span in plain._spans] == [False]
    monkeypatch.setattr(replica_module, "KERNEL_ELEMENTS", 1_000)
    monkeypatch.setattr(machine_code, "LEAST_ELEMENTS", 1)
    for threads in (1, 3):
        fast, found = trained(member, tensors_of(kind), threads=threads)
        assert [span.has_kernels for span in fast._spans] == [False, True, False]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_parameter_whose_memory_is_set_to_another_is_found_there(monkeypatch):
    monkeypatch.setattr(replica_module, "KERNEL_ELEMENTS", 4)
    weight = nn.Parameter(torch.zeros(2, 4))
    replica = Replica([weight], [], make_averaging("hpsgd"), workers=2)
    message = torch.empty(replica.size)
    for moved in (torch.ones(2, 4), torch.full((4, 2), 2.0).t(), torch.full((2, 4), 4.0, dtype=torch.float64)):
        weight.data = moved
        replica.pack_change(message, scale=1.0, brings=True)
        assert message.tolist() == [float(moved[0, 0])] * 8
        assert torch.equal(weight.float(), moved.float())  # the shared model is zeros, and ahead of it by the change
        replica._base.zero_()
    weight.data = torch.zeros(2)
    with pytest.raises(RuntimeError):
        replica.pack_change(message, scale=1.0, brings=True)


def test_a_graph_from_before_an_average_is_not_gone_through_with_other_weights(monkeypatch):
    monkeypatch.setattr(replica_module, "KERNEL_ELEMENTS", 4)
    weight = nn.Parameter(torch.ones(4))
    replica = Replica([weight], [], make_averaging("hpsgd"), workers=2)
    loss = weight.square().sum()
    with torch.no_grad():
        replica.pack_change(torch.empty(replica.size), scale=1.0, brings=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_mean_gradient_is_written_where_the_gradient_was_unless_it_was_kept_for_later():
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    replicas = [GradientReplica([weight], [], workers=2, step=lambda: None) for weight in weights]
    gradients = [torch.full((3,), 2.0), torch.full((3,), 4.0)]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    averaged(replicas, weight=0.5, brings=(0,))
    assert weights[0].grad is gradients[0]
    assert weights[0].grad.tolist() == [1.0] * 3
    assert weights[1].grad.tolist() == [4.0] * 3  # it stepped with the mean, and has its own gradient back
    weights[0].grad = torch.ones(1).expand(3)  # no memory of its own to write to
    averaged(replicas, weight=0.5)
    assert weights[0].grad.tolist() == weights[1].grad.tolist() == [2.5] * 3


def test_a_state_that_is_refused_changes_nothing():
    weight = torch.nn.Parameter(torch.zeros(3))
    replica = Replica([weight], [], make_averaging("bmuf"), workers=1)
    before = {name: tensor.clone() for name, tensor in replica.state_dict().items()}
    for damage in ({"velocity": torch.ones(2)}, {"base": torch.ones(2)}):
        state = {"shared": torch.ones(3), "base": torch.ones(3), "velocity": torch.ones(3)} | damage
        with pytest.raises(ValueError, match=next(iter(damage))):
            replica.load_state_dict(state)
        assert all(torch.equal(tensor, before[name]) for name, tensor in replica.state_dict().items())
