"""Models as vectors, and what a worker is told to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.workers.flat import FlatModel
from paceline.workers.gradients import Assignment, LoopGradients
from paceline.workers.grouped import GroupedGradients


def batch(samples, blocks=1, blocks_done=1):
    generator = torch.Generator().manual_seed(samples)
    return Assignment(
        inputs=torch.randn(samples, 3, generator=generator),
        targets=torch.randint(0, 2, (samples,), generator=generator),
        blocks=blocks,
        blocks_done=blocks_done,
    )


def test_the_module_and_the_vector_are_the_same_memory():
    flat = FlatModel(nn.Linear(3, 2))
    flat.parameters.fill_(0.5)
    flat.gradient.fill_(2.0)
    assert all(bool((parameter == 0.5).all()) for parameter in flat.module.parameters())
    torch.optim.SGD(flat.module.parameters(), lr=0.25).step()
    assert torch.equal(flat.parameters, torch.zeros(8))


def test_buffers_go_round_through_a_vector_and_whole_numbers_stay_whole():
    flat = FlatModel(nn.BatchNorm1d(2))
    vector = torch.tensor([0.1, 0.2, 1.5, 2.5, 6.4])
    flat.load_buffers(vector)
    assert flat.module.num_batches_tracked.item() == 6
    assert torch.equal(flat.buffers, torch.tensor([0.1, 0.2, 1.5, 2.5, 6.0]))


def test_a_model_with_nothing_to_train_and_one_in_another_precision_are_refused():
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        FlatModel(nn.ReLU())
    with pytest.raises(ValueError, match=r"all float64 \(found torch.float16\)"):
        FlatModel(nn.Linear(2, 2).half())
    with pytest.raises(ValueError, match=r"found torch\.float32, torch\.float64"):
        FlatModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))


def with_buffer(buffer):
    module = nn.Linear(2, 2)
    module.register_buffer("extra", buffer)
    return module


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        (torch.zeros(2, dtype=torch.float64), "buffer extra is float64, and buffers travel in .* float32: call"),
        (torch.zeros(2, dtype=torch.complex64), "buffer extra is complex64"),
        (torch.tensor([1, -(2**24) - 1]), "buffer extra has whole numbers beyond 16,777,216"),
    ],
)
def test_buffers_that_a_vector_of_the_parameters_type_would_round_are_refused(buffer, said):
    with pytest.raises(ValueError, match=said):
        FlatModel(with_buffer(buffer))


@pytest.mark.parametrize(
    "buffer",
    [
        torch.tensor([2**24, -(2**24)]),
        torch.tensor([True, False]),
        torch.tensor([1 / 3], dtype=torch.bfloat16),
        torch.zeros(0, dtype=torch.int64),
        torch.tensor(255, dtype=torch.uint8),
    ],
)
def test_buffers_that_such_a_vector_holds_go_round_exactly(buffer):
    flat = FlatModel(with_buffer(buffer.clone()))
    flat.load_buffers(flat.buffers)
    assert torch.equal(flat.module.extra, buffer)


def test_a_model_in_float64_has_buffers_in_float64_and_counters_to_2_to_the_53():
    flat = FlatModel(with_buffer(torch.tensor([2**53])).double())
    assert flat.buffers.tolist() == [2.0**53]
    flat = FlatModel(with_buffer(torch.tensor([1 / 3], dtype=torch.float64)).double())
    assert flat.buffers.tolist() == [1 / 3]


def test_a_batch_that_does_not_divide_and_blocks_that_cannot_be_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="batch size 9, blocks 4"):
        batch(9, blocks=4)
    with pytest.raises(ValueError, match="blocks_done=5, blocks=4"):
        batch(8, blocks=4, blocks_done=5)
    with pytest.raises(ValueError, match="blocks_done=0, blocks=4"):
        batch(8, blocks=4, blocks_done=0)


def test_blocks_add_up_to_the_gradient_of_the_whole_batch_and_r_of_s_blocks_count_r_of_s():
    module = nn.Linear(3, 2)
    loop = LoopGradients(module)
    start = loop.model.parameters.clone(), loop.model.buffers

    def gradient(work):
        return loop.compute(*start, [work]).gradients[0]

    whole = batch(8, blocks=4, blocks_done=4)
    parts = [Assignment(inputs=whole.inputs[i : i + 2], targets=whole.targets[i : i + 2]) for i in range(0, 8, 2)]
    block_gradients = torch.stack([gradient(part) for part in parts])
    torch.testing.assert_close(gradient(whole), block_gradients.mean(0))
    half = Assignment(inputs=whole.inputs, targets=whole.targets, blocks=4, blocks_done=2)
    torch.testing.assert_close(gradient(half), block_gradients[:2].sum(0) / 4)


def test_a_worker_reports_the_mean_and_the_variance_of_the_losses_of_the_samples_it_did():
    loop = LoopGradients(nn.Linear(3, 2))
    start = loop.model.parameters.clone(), loop.model.buffers
    half = batch(8, blocks=4, blocks_done=2)
    losses = nn.functional.cross_entropy(loop.model.module(half.inputs[:4]), half.targets[:4], reduction="none")
    found = loop.compute(*start, [half])
    torch.testing.assert_close(found.losses[0], losses.detach().mean())
    torch.testing.assert_close(found.loss_variances[0], ((losses - losses.mean()) ** 2).mean().detach())


def test_one_pass_needs_equal_batches():
    grouped = GroupedGradients(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="one batch size and one number of blocks"):
        grouped.compute(grouped.model.parameters.clone(), grouped.model.buffers, [batch(8), batch(4)])


def test_a_model_that_does_not_qualify_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="it has dropout"):
        GroupedGradients(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.1)))
