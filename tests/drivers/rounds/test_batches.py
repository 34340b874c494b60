"""Batches of epochs that others end, and batches in blocks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from paceline.drivers.rounds.batches import BatchSource, OpenBatch, rounds_in
from paceline.workers.blocks import cut_batch


@given(st.integers(1, 5), st.lists(st.integers(0, 7), max_size=5))
def test_no_batch_is_left_out_whoever_ends_epochs_when(length, taken):
    source = BatchSource(range(length))
    found = [source.next() for count in taken for _ in range(count)]
    assert found == list(itertools.islice(itertools.cycle(range(length)), sum(taken)))


def test_a_loader_is_begun_anew_for_each_pass_and_not_before():
    begun = []

    class Loader:
        def __iter__(self):
            begun.append(True)
            return iter([1, 2])

    source = BatchSource(Loader())
    assert not begun
    assert [source.next() for _ in range(4)] == [1, 2, 1, 2]
    assert len(begun) == 2


@pytest.mark.parametrize("loader", [[], DataLoader(TensorDataset(torch.zeros(2)), batch_size=3, drop_last=True)])
def test_a_loader_without_batches_is_an_error_and_no_endless_loop(loader):
    with pytest.raises(ValueError, match="the loader has no batch"):
        BatchSource(loader).next()


@pytest.mark.parametrize(
    ("loader", "rounds", "error"),
    [
        ([], None, r"at least one round \(rounds=0\)"),
        ([1], 0, r"at least one round \(rounds=0\)"),
        ([1], -2, r"at least one round \(rounds=-2\)"),
        ([1], 2.5, r"a whole number \(rounds=2.5\)"),
        (iter([1]), None, r"give epoch\(loader, rounds=...\)"),
    ],
)
def test_an_epoch_needs_rounds(loader, rounds, error):
    with pytest.raises(ValueError, match=error):
        rounds_in(loader, rounds)


@given(st.integers(1, 40), st.integers(1, 12))
def test_blocks_are_equal_in_order_and_not_too_many(samples, most):
    inputs, targets = torch.arange(2 * samples).view(samples, 2), torch.arange(samples)
    blocks = cut_batch((inputs, targets), most)
    assert 1 <= len(blocks) <= most
    assert len({len(x) for x, y in blocks} | {len(y) for x, y in blocks}) == 1
    assert torch.equal(torch.cat([x for x, _ in blocks]), inputs)
    assert torch.equal(torch.cat([y for _, y in blocks]), targets)
    if samples % min(samples, most) == 0:
        assert len(blocks) == min(samples, most)


@pytest.mark.parametrize(("samples", "sizes"), [(32, [8] * 4), (30, [10] * 3), (31, [31]), (3, [1] * 3)])
def test_a_batch_that_does_not_divide_comes_in_fewer_blocks(samples, sizes):
    assert [len(block) for block in cut_batch((torch.zeros(samples),), 4)] == sizes


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ((), "at least one sample"),
        ((torch.zeros(0, 3),), "at least one sample"),
        ((torch.zeros(4), torch.zeros(3)), r"of one length \(they have 4, 3\)"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch, error):
    with pytest.raises(ValueError, match=error):
        cut_batch(batch, 4)


def test_a_batch_that_is_not_cut_is_one_block_since_the_model_was_taken():
    batch = OpenBatch()
    done, blocks, seconds = batch.end(held_since=0.0)
    assert (done, blocks) == (1, 1)
    assert seconds > 0


def test_blocks_of_a_batch_are_its_own():
    batch = OpenBatch()
    batch.begin(4)
    batch.done = 3
    assert batch.end(held_since=0.0)[:2] == (3, 4)
    assert batch.end(held_since=0.0)[:2] == (1, 1)
