"""A rank's model: what goes out is its gradient, what comes in moves it as plain training would."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.training.rank_model import RankModel
from paceline.training.replica import averaged_buffers

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1),
    "adamw, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
}


def network(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def rank_model(module, optimizer):
    model = RankModel(list(module.parameters()), averaged_buffers(module), optimizer.step)
    return model, torch.empty(model.layout.size, dtype=model.dtype)


def backward(module, number):
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(12, 6, generator=generator).to(next(module.parameters()).dtype)
    F.cross_entropy(module(inputs), torch.randint(3, (12,), generator=generator)).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_rank_alone_trains_as_plain_training_does(name, dtype):
    """With bfloat16 too: a gradient of a bfloat16 parameter is as it was after a way in float32."""
    ours, plain = network(dtype), network(dtype)
    optimizers = [OPTIMIZERS[name](module.parameters()) for module in (ours, plain)]
    model, message = rank_model(ours, optimizers[0])
    for number in range(5):
        backward(ours, number)
        model.apply(model.pack(message))
        optimizers[1].zero_grad()
        backward(plain, number)
        optimizers[1].step()
        for (key, one), other in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
            exact = "running" not in key  # which travels as a change, and so is rounded once more
            torch.testing.assert_close(one, other, rtol=0 if exact else 0.05, atol=0 if exact else 1e-2)
            if exact:
                assert torch.equal(one, other), key


def test_buffers_move_by_the_change_and_a_batch_that_is_not_counted_leaves_none():
    module = network()
    model, message = rank_model(module, torch.optim.SGD(module.parameters(), lr=0.1))
    norm = module[1]
    for _ in range(3):  # as many blocks
        backward(module, 1)
    model.pack(message)
    assert model.layout.buffers_of(message)[-1] == 3.0  # the counter
    model.apply(message * 0.5)  # two gradients of which the other changed nothing: 1.5 is rounded to even
    assert norm.num_batches_tracked == 2
    kept = [buffer.clone() for buffer in module.buffers()]
    backward(module, 2)
    assert norm.num_batches_tracked == 3
    model.forget_gradients()
    assert all(torch.equal(one, other) for one, other in zip(kept, module.buffers(), strict=True))
    assert all(parameter.grad is None for parameter in module.parameters())


def test_an_infinite_mask_stays_and_float64_moves():
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.tensor([float("-inf"), float("inf"), 0.0]))
    module.register_buffer("precise", torch.tensor([1 / 3], dtype=torch.float64))
    module.register_buffer("table", torch.tensor([5]))
    model, message = rank_model(module, torch.optim.SGD(module.parameters(), lr=0.1))
    module(torch.ones(1, 2)).sum().backward()
    module.precise += 0.5
    model.pack(message)
    assert torch.isfinite(message).all()
    model.apply(message)
    assert module.mask.tolist() == [float("-inf"), float("inf"), 0.0]
    assert module.precise.item() == 1 / 3 + 0.5
    assert module.table.item() == 5


def test_the_change_of_a_buffer_in_float64_is_not_rounded_to_the_float32_of_the_parameters():
    module = nn.Linear(2, 2)
    module.register_buffer("precise", torch.tensor([1.0], dtype=torch.float64))
    model, message = rank_model(module, torch.optim.SGD(module.parameters(), lr=0.1))
    module(torch.ones(1, 2)).sum().backward()
    module.precise += 1 / 3
    model.apply(model.pack(message))
    assert module.precise.item() == 1.0 + 1 / 3


def test_a_counter_beyond_what_float32_counts_goes_on_one_by_one():
    module = network()
    norm = module[1]
    norm.num_batches_tracked += 2**24
    model, message = rank_model(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for number in range(3):
        backward(module, number)
        model.apply(model.pack(message))
    assert norm.num_batches_tracked == 2**24 + 3


def test_a_parameter_without_a_gradient_anywhere_is_untouched_and_has_no_state():
    module = network()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1, weight_decay=0.5)
    model, message = rank_model(module, optimizer)
    before = [parameter.detach().clone() for parameter in module[3].parameters()]
    module[1](module[0](torch.ones(4, 6))).square().sum().backward()
    model.apply(model.pack(message))
    assert all(torch.equal(one, other) for one, other in zip(before, module[3].parameters(), strict=True))
    assert module[3].weight not in optimizer.state
    assert module[0].weight in optimizer.state


def test_a_parameter_that_another_rank_has_a_gradient_for_moves_here_too():
    module = network()
    model, message = rank_model(module, torch.optim.SGD(module.parameters(), lr=1.0))
    before = module[3].bias.detach().clone()
    message.zero_()
    model.layout.flags_of(message)[-1] = 1.0
    model.layout.gradient_of(message)[-3:] = 2.0
    model.apply(message)
    torch.testing.assert_close(module[3].bias.detach(), before - 2.0)


def test_sparse_gradients_are_refused():
    module = nn.Embedding(4, 2, sparse=True)
    model, message = rank_model(module, torch.optim.SGD(module.parameters(), lr=1.0))
    module(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"sparse gradient: rounds add up dense ones \(sparse=False\)"):
        model.pack(message)


# -- fingerprints ------------------------------------------------------------------------------------------------------

WORDS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float64: torch.int64,
}


def fingerprint_of(tensors):
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    return RankModel(parameters, [], lambda: None).fingerprint()


@given(st.sampled_from(list(WORDS)), st.integers(1, 9), st.integers(0, 4), st.integers(0, 8), st.integers(0, 63))
def test_any_bit_of_any_parameter_changes_the_fingerprint(dtype, elements, place, element, bit):
    tensors = [torch.randn(elements).to(dtype) for _ in range(5)]
    before = fingerprint_of(tensors)
    words = tensors[place].view(WORDS[dtype])
    bits = 8 * words.element_size()
    flipped = 1 << bit % bits
    words[element % elements] ^= flipped - (1 << bits) * (flipped >= 1 << (bits - 1))
    assert fingerprint_of(tensors) != before


@given(st.sampled_from(list(WORDS)), st.integers(0, 9), st.integers(0, 5))
def test_a_fingerprint_is_of_the_numbers_wherever_they_lie(dtype, elements, offset):
    whole = torch.randn(elements + offset + 1).to(dtype)
    here = whole[offset : offset + elements]
    assert fingerprint_of([here.clone(), here.clone()]) == fingerprint_of([here, here])


def test_a_fingerprint_is_of_the_numbers_in_whatever_order_they_lie():
    image = torch.randn(2, 3, 4, 4)
    assert fingerprint_of([image]) == fingerprint_of([image.to(memory_format=torch.channels_last)])
    assert fingerprint_of([image[0], image[1]]) != fingerprint_of([image[1], image[0]])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_weights_in_channels_last_move_as_in_plain_training(kind, how):
    """Fused kernels take gradients for laid out as their parameters are."""
    ours, plain = (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    optimizer, expected = kind(ours.parameters(), lr=0.1, **how), kind(plain.parameters(), lr=0.1, **how)
    model, message = rank_model(ours, optimizer)
    for number in range(3):
        inputs = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(number))
        for module in (ours, plain):
            module(inputs).square().mean().backward()
        model.apply(model.pack(message).clone())
        expected.step()
        expected.zero_grad()
    torch.testing.assert_close(ours.weight, plain.weight)


def test_late_changes_do_not_make_a_running_variance_negative():
    """Changes since an older model, several at once, would: 1.0 - 3 * 0.9."""
    norm = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    buffers = averaged_buffers(norm)
    variances = [buffer is norm.running_var for buffer in buffers]
    model = RankModel(list(norm.parameters()), buffers, optimizer.step, variances=variances)
    update = torch.zeros(model.layout.size)
    model.layout.buffers_of(update).copy_(torch.tensor([-5.0, -5.0, -2.7, 0.5, 1.0]))
    model.apply(update)
    assert norm.running_mean.tolist() == [-5.0, -5.0]
    torch.testing.assert_close(norm.running_var, torch.tensor([0.1, 1.5]))
