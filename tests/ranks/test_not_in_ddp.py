"""A model that DistributedDataParallel averages is refused by whatever averages it too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.drivers.ranks.tracked_model import is_in_live_ddp

KINDS = [paceline.HPSGD, paceline.SSGD, paceline.FullSync]


@pytest.fixture(autouse=True)
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_is_wrapped_is_told_not_to_be(kind):
    wrapped = DistributedDataParallel(network())
    with pytest.raises(ValueError, match="do not wrap the model in DistributedDataParallel"):
        kind(wrapped, sgd(wrapped))


@pytest.mark.parametrize("kind", KINDS)
def test_the_module_inside_is_refused_while_its_wrapper_lives(kind):
    model = network()
    wrapped = DistributedDataParallel(model)
    with pytest.raises(ValueError, match="the model is also inside a DistributedDataParallel"):
        kind(model, sgd(model))
    with pytest.raises(ValueError, match="the model is also inside"):
        kind(model[2], sgd(model[2]))  # a part of it, too
    ring = [wrapped]
    ring.append(ring)  # only the collector finds it
    del wrapped, ring
    with kind(model, sgd(model)):
        pass


def test_a_wrapper_of_ones_own_kind_is_one():
    class Mine(DistributedDataParallel):
        pass

    wrapped = Mine(network())
    assert is_in_live_ddp(wrapped.module)


def test_another_model_may_be_in_one():
    wrapped = DistributedDataParallel(network())
    assert not is_in_live_ddp(network())
    assert is_in_live_ddp(wrapped.module)
    with pytest.raises(RuntimeError, match="require"):
        DistributedDataParallel(torch.nn.ReLU())  # refused by torch while it is made
