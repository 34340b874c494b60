"""What scripts do wrong, or unexpectedly, with a Balance: it is said, or it does no harm."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.drivers.balancing.schedule import BalanceError
from paceline.strategies.shares.sharing import PERIOD


@pytest.fixture
def script():
    model = nn.Linear(2, 1)
    data = TensorDataset(torch.randn(24, 2), torch.zeros(24, 1))
    balance = paceline.Balance(model, batch_size=4)
    yield model, data, balance
    balance.close()


def train(model, batches):
    for inputs, targets in batches:
        nn.functional.mse_loss(model(inputs), targets).backward()


def train_both(model, first, second):
    for both in zip(first, second, strict=True):
        train(model, both)


@pytest.mark.parametrize("workers", [0, 1])
def test_two_loaders_at_once_are_refused(script, workers):
    model, data, balance = script
    first = DataLoader(data, batch_sampler=balance.sampler(data), num_workers=workers)
    second = DataLoader(data, batch_sampler=balance.sampler(data, seed=1), num_workers=workers)
    with pytest.raises(BalanceError, match="another pass over a loader of the same Balance has begun"):
        train_both(model, first, second)


@pytest.mark.parametrize("workers", [0, 1])
def test_two_loaders_one_after_the_other_are_two_data_sets(script, workers):
    model, data, balance = script
    samplers = [balance.sampler(data, seed=seed) for seed in (0, 1)]
    loaders = [DataLoader(data, batch_sampler=sampler, num_workers=workers) for sampler in samplers]
    for _ in range(2):
        for loader in loaders:
            train(model, loader)
    assert [sampler.state_dict()["epoch"] for sampler in samplers] == [2, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_was_left_and_a_look_at_a_batch_disturb_nobody(script, workers):
    model, data, balance = script
    sampler = balance.sampler(data)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    for number, batch in enumerate(loader):
        train(model, [batch])
        if number == 2:
            break
    next(iter(loader))
    train(model, loader)
    assert sampler.state_dict() == sampler.state_dict() | {"epoch": 2, "done_samples": 0}


def test_batches_that_are_not_of_the_balance_are_told(script, monkeypatch, caplog):
    model, data, balance = script
    monkeypatch.setattr(balance, "ranks", 2)
    with caplog.at_level(logging.WARNING, "paceline.balance"):
        train(model, list(DataLoader(data, batch_size=1))[: PERIOD + 3])
    (told,) = (record.getMessage() for record in caplog.records)
    assert "batch_sampler=balance.sampler(dataset)" in told


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 7])
def test_each_part_of_a_group_is_the_next_batch(script, steps, workers):
    """Accumulate asks ahead within a group only; the last of 6 batches has 2 samples where the others have 4."""
    model, data, balance = script
    sampler = balance.sampler(22)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    accumulate = paceline.Accumulate(model, steps=steps)
    for epoch in range(2):
        done = []
        for inputs, targets in accumulate(loader):
            accumulate.backward(nn.functional.mse_loss(model(inputs), targets))
            assert balance.rank_samples() == (len(inputs), len(inputs))
            done.append(sampler.state_dict()["done_samples"])
            if accumulate.ready:
                model.zero_grad()
        assert done == [4, 8, 12, 16, 20, 0]
        assert sampler.state_dict()["epoch"] == epoch + 1
