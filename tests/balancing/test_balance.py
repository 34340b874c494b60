"""Balance on three real ranks under DDP: the update is one process's on the whole batch, and all decide alike."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.optim.rank_samples import RANK_SAMPLES
from tests.balancing.jobs import BATCH
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.xdist_group("balancing")
NEARLY = 1e-12
few = settings(
    deadline=None, max_examples=8, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
any_shares = st.lists(st.integers(1, 9), min_size=3, max_size=3)


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("trio"), 3, "tests.balancing.jobs") as trio:
        yield trio


# -- the gradient ----------------------------------------------------------------------------------------------------


@few
@given(shares=any_shares, later=any_shares, kind=st.sampled_from(["sgd", "lars"]), drop_last=st.booleans())
def test_for_any_shares_the_update_is_that_of_one_process_on_the_whole_batch(trio, shares, later, kind, drop_last):
    total = sum(later)
    changed = [max(1, BATCH * each // total) for each in later]
    changed[0] += BATCH - sum(changed)
    found = trio.do("update", shares=shares, later=changed, kind=kind, epochs=2, drop_last=drop_last)
    assert max(each["far"] for each in found) < NEARLY
    assert len({each["steps"] for each in found}) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_model_that_computes_its_own_loss_is_weighed_once(trio, workers):
    found = trio.do("update", shares=[5, 1, 2], how="own loss", workers=workers)
    assert max(each["far"] for each in found) < NEARLY
    assert found[0]["sizes"][0] > found[1]["sizes"][0]


@few
@given(shares=any_shares, parts=st.integers(1, 4), tokens=st.booleans())
def test_groups_of_parts_weigh_by_the_samples_or_tokens_of_all_ranks(trio, shares, parts, tokens):
    found = trio.do("accumulated", shares=shares, parts=parts, tokens=tokens)
    assert max(each["far"] for each in found) < NEARLY
    assert len(found[0]["steps"]) == -(-5 // parts)


def test_accumulation_by_hand_with_no_sync_is_the_mean_of_the_parts(trio):
    assert max(trio.do("by_hand", shares=[1, 5, 2], parts=3)) < NEARLY


def test_a_mean_over_tokens_is_weighed_by_tokens(trio):
    assert max(trio.do("weighed_by_tokens", shares=[1, 5, 2])) < NEARLY


@pytest.mark.parametrize("kind", ["info-batch", "fine-pruning"])
@pytest.mark.parametrize("shares", [[1, 1, 1], [5, 1, 2]])
def test_pruning_with_shares_decides_and_updates_as_one_process(trio, kind, shares):
    found = trio.do("pruned", shares=shares, kind=kind)
    assert max(each["far"] for each in found) < 1e-6  # losses are observed in float32
    assert all(each["same"] and each["pruned"] for each in found)


@pytest.mark.parametrize("codec", ["one-bit", "top-k fraction=0.1"])
def test_with_a_codec_nothing_of_the_weighed_gradients_is_lost_but_what_it_holds_back(trio, codec):
    assert max(trio.do("compressed", shares=[5, 1, 2], codec=codec)) < 1e-4


def test_under_autocast_the_gradient_is_weighed_alike(trio):
    assert max(trio.do("autocast", shares=[5, 1, 2])) < 0.05


# -- shares ----------------------------------------------------------------------------------------------------------


def test_a_slow_rank_gets_less_and_all_decide_alike_however_far_they_fetch_ahead(trio):
    found = trio.do("by_speed", slow=[1, 1, 4], batches=30, ahead=[0, 2, 1])
    changes = found[0]["changes"]
    assert changes
    assert all(each["changes"] == changes and each["equal"] and each["each_once"] for each in found)
    shares = found[0]["shares"]
    assert sum(shares) == BATCH
    assert shares[2] < 0.7 * shares[0]
    assert shares[2] < 0.7 * shares[1]
    assert "with equal shares the slowest rank" in found[0]["table"]
    assert found[0]["figures"]["predicted_seconds"] < found[0]["figures"]["equal_seconds"]


def test_a_rank_that_slows_down_gets_less_and_more_again_later(trio):
    found = trio.do("slowing_down", factor=5, less=0.5 * BATCH / 3, more=0.8 * BATCH / 3, most_batches=400)
    shares = [shares[0] for _, shares in found[0]["changes"]]
    assert all(each["changes"] == found[0]["changes"] and each["each_once"] for each in found)
    assert min(shares) <= 0.5 * BATCH / 3, found[0]["changes"]
    assert shares[-1] >= 0.8 * BATCH / 3, found[0]["changes"]


def test_a_rank_gets_no_more_than_it_can_hold(trio):
    found = trio.do("by_speed", slow=[1, 1, 6], batches=20, ahead=[0, 0, 0], most=[9, None, None])
    assert found[0]["shares"][0] <= 9
    assert found[0]["shares"][2] < BATCH / 3


# -- what cannot be right --------------------------------------------------------------------------------------------


def test_ranks_with_other_settings_all_refuse_and_say_who(trio):
    found = trio.do("refused", settings=[{"batch_size": 24}, {"batch_size": 30}, {"batch_size": 24}])
    assert all("rank 1 has (30" in each for each in found)


def test_one_rank_that_refuses_leaves_nobody_waiting(trio):
    found = trio.do("refused", settings=[{"batch_size": 24}, {"batch_size": -3}, {"batch_size": 24}])
    assert "batch_size must be a whole number" in found[1]
    assert "rank 1 refuses to share batches: batch_size must be" in found[0]
    assert found[0] == found[2]


def test_ranks_in_another_order_refuse_before_the_first_step(trio):
    found = trio.do("refused", settings=[{"batch_size": 24}] * 3, sampler=[{"seed": 1}, {"seed": 1}, {"seed": 2}])
    assert all("order is" in each and "rank 2" in each for each in found)


def test_a_step_with_gradients_that_were_not_weighed_is_refused(trio):
    assert all("no forward pass of the model that Balance was given" in each for each in trio.do("beside_it"))


# -- one process -----------------------------------------------------------------------------------------------------


def plain_loop(model, loader, optimizer):
    for inputs, targets in loader:
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_with_one_rank_training_is_plain_to_the_bit():
    torch.manual_seed(0)
    dataset = torch.utils.data.TensorDataset(torch.randn(50, 4), torch.randint(0, 3, (50,)))
    ours, theirs = (nn.Linear(4, 3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    balance = paceline.Balance(ours, batch_size=8)
    sampler = balance.sampler(dataset)
    batches = list(sampler)
    plain_loop(ours, DataLoader(dataset, batch_sampler=sampler), torch.optim.SGD(ours.parameters(), lr=0.1))
    plain_loop(theirs, DataLoader(dataset, batch_sampler=batches), torch.optim.SGD(theirs.parameters(), lr=0.1))
    assert torch.equal(ours.weight, theirs.weight)
    assert sampler.state_dict()["epoch"] == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_in_mid_epoch_is_after_the_last_batch_that_was_trained(workers):
    dataset = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.arange(40))
    model = nn.Linear(4, 40)
    balance = paceline.Balance(model, batch_size=8)
    sampler, seen = balance.sampler(dataset), []
    for inputs, numbers in DataLoader(dataset, batch_sampler=sampler, num_workers=workers):
        nn.functional.cross_entropy(model(inputs), numbers).backward()
        seen += numbers.tolist()
        if len(seen) == 24:
            break
    state = sampler.state_dict()
    balance.close()
    again = paceline.Balance(model, batch_size=10).sampler(dataset)
    again.load_state_dict(state)
    assert len(again) == 2
    rest = [number for batch in again for number in batch]
    assert sorted(seen + rest) == list(range(40))


def test_evaluations_are_not_counted_and_change_nothing():
    model, dataset = nn.Linear(2, 2), torch.utils.data.TensorDataset(torch.randn(12, 2), torch.zeros(12).long())
    balance = paceline.Balance(model, batch_size=4)
    sampler = balance.sampler(dataset)
    for number, (inputs, targets) in enumerate(DataLoader(dataset, batch_sampler=sampler), 1):
        nn.functional.cross_entropy(model(inputs), targets).backward()
        with torch.no_grad():
            model(inputs)
        model.eval()
        model(inputs)  # without no_grad, as some do
        model.train()
        assert sampler.state_dict()["done_samples"] == (4 * number) % 12


def test_copies_of_a_model_are_not_weighed_and_closing_takes_the_hooks_off():
    model = nn.Linear(2, 2)
    balance = paceline.Balance(model, batch_size=4)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own bytes
        assert other(torch.ones(1, 2)).grad_fn.name() != model(torch.ones(1, 2)).grad_fn.name()
    with pytest.raises(ValueError, match="has a Balance already"):
        paceline.Balance(model, batch_size=4)
    balance.close()
    assert model not in RANK_SAMPLES
    assert not model._forward_hooks
    paceline.Balance(model, batch_size=4).close()
