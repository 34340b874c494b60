"""Balance under scripts that do what scripts do: what cannot be weighed right is refused on all ranks, by its name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import paceline
from paceline.drivers.balancing.schedule import BalanceError
from tests.balancing.odd_jobs import KINDS, SCRIPTS
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.xdist_group("balancing")
DATA = TensorDataset(torch.randn(40, 4), torch.zeros(40).long(), torch.arange(40))

REFUSED = {
    "chained": "goes into the model again",
    "in_eval_mode": "in eval\\(\\), after it was trained",
    "penalty": "create_graph=True",
    "groups_at_once": "several batches were drawn at once",
    "ahead_across_epochs": "is fetched and not trained",
    "only_one_rank_loads": "fingerprint of shares",
    "weighs_in_a_group": "Accumulate weighs its parts",
    "prunes_alone": "leave rank and world_size out",
}
FOUND = {
    "evaluated_with_gradients": 1,
    "loads_in_mid_epoch": [True, True, 4],
    "sums_in_groups": 0,
    "batches_from_elsewhere": 0,
    "of_a_plain_module": ["Balance weighs gradients for t"],
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("odd"), 2, "tests.balancing.odd_jobs") as pair:
        yield pair


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hidden"])
def test_whatever_a_model_returns_its_gradient_is_that_of_the_whole_batch(pair, kind):
    for told in pair.do("output", kind=kind):
        assert not told["error"]
        distance, done = told["found"]
        assert distance < 1e-12
        assert done == 8


def test_an_output_that_cannot_be_opened_is_refused_in_the_backward_pass(pair):
    assert all("finds no tensor" in told["error"] for told in pair.do("output", kind="hidden"))


def test_a_rank_that_makes_no_balance_and_one_that_is_stopped_are_named_by_all_others(tmp_path):
    waited = "rank {rank} waited to {moment} in balancing, and not all ranks came (it waits for 2 s at most): {why}"
    with Ranks(tmp_path, 3, "tests.balancing.odd_jobs") as three:
        absent = three.do("made", timeout_seconds=2.0, ranks_there=2, ranks=(0, 1))
        assert three.do("made", timeout_seconds=2.0) == [3.0] * 3
        three.freeze(2)
        stopped = three.do("asked", ranks_there=2, ranks=(0, 1))
    for rank in (0, 1):
        first_to_say = [f"rank {each} waited 2 s for rank 2 to begin" for each in (0, 1)]
        assert absent[rank] in [waited.format(rank=rank, moment="begin", why=why) for why in first_to_say]
        moment = "say how much its batch weighs"
        assert stopped[rank] == waited.format(rank=rank, moment=moment, why="rank 2 did not")


def test_where_one_rank_is_dead_another_that_is_slow_is_not_blamed(tmp_path):
    """The dead one's connections are lost at once on all ranks, long before the slow one comes."""
    with Ranks(tmp_path, 3, "tests.balancing.odd_jobs") as three:
        three.do("made", timeout_seconds=30.0)
        three.kill(1)
        told = three.do("asked_later", slow=2, ranks=(0, 2))
    for words in told:
        assert words.endswith("(it waits for 30 s at most): rank 1 did not"), told


def test_every_script_has_what_it_must_come_to():
    assert set(SCRIPTS) == {*REFUSED, *FOUND}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_weighed_is_refused_on_all_ranks(pair, name):
    for told in pair.do("script", name=name):
        with pytest.raises(ValueError, match=REFUSED[name]):
            raise ValueError(told["error"])


@pytest.mark.parametrize("name", FOUND)
def test_what_can_be_weighed_is_right(pair, name):
    for told in pair.do("script", name=name):
        assert not told["error"]
        assert told["found"] == (pytest.approx(FOUND[name], abs=1e-12) if FOUND[name] == 0 else FOUND[name])


# -- one process -----------------------------------------------------------------------------------------------------


def one(batch_size=8, model=None):
    model = nn.Linear(4, 2) if model is None else model
    return model, paceline.Balance(model, batch_size=batch_size)


def test_epochs_are_counted_though_an_output_is_changed_in_place():
    model, balance = one()
    sampler, orders = balance.sampler(DATA), []
    for _ in range(3):
        order = []
        for inputs, targets, numbers in DataLoader(DATA, batch_sampler=sampler):
            scores = model(inputs)
            scores *= 2
            cross_entropy(scores, targets).backward()
            order += numbers.tolist()
        orders.append(order)
    assert sampler.state_dict()["epoch"] == 3
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.filterwarnings("ignore:3 of 5 batches of epoch 1 were observed")
def test_a_pruned_epoch_that_was_broken_off_begins_again():
    model, balance = one()
    pruning = paceline.InfoBatch(40, batch_size=8, epochs=4)
    loader = DataLoader(DATA, batch_sampler=balance.sampler(pruning))
    for step, (inputs, targets, _) in enumerate(loader):
        pruning.observe(cross_entropy(model(inputs), targets, reduction="none")).backward()
        if step == 2:
            break
    assert len([pruning.skip() for _ in loader]) == 5


def test_a_pruned_epoch_goes_on_though_its_state_was_loaded_before_it_was_dealt():
    model, balance = one()
    pruning = paceline.InfoBatch(40, batch_size=8, epochs=4)
    for step, (inputs, targets, _) in enumerate(DataLoader(DATA, batch_sampler=balance.sampler(pruning))):
        pruning.observe(cross_entropy(model(inputs), targets, reduction="none")).backward()
        if step == 2:
            break
    state = pruning.state_dict()
    balance.close()
    again = paceline.InfoBatch(40, batch_size=8, epochs=4)
    again.load_state_dict(state)
    _, balance = one(model=model)
    assert len([again.skip() for _ in DataLoader(DATA, batch_sampler=balance.sampler(again))]) == 2


def test_a_sampler_that_draws_another_order_does_not_go_on_in_mid_epoch():
    def made():
        model, balance = one()
        return model, balance.sampler(RandomSampler(DATA, generator=torch.Generator().manual_seed(0)))

    model, sampler = made()
    for epoch in range(2):
        for step, (inputs, targets, _) in enumerate(DataLoader(DATA, batch_sampler=sampler)):
            cross_entropy(model(inputs), targets).backward()
            if epoch == 1 and step == 2:
                break
    state = sampler.state_dict()
    _, sampler = made()
    sampler.load_state_dict(state)
    with pytest.raises(BalanceError, match="draws another order"):
        next(iter(sampler))


@pytest.mark.parametrize(("first_batch", "second_batch", "sizes"), [(20, 19, [20]), (38, 38, [2]), (39, 19, None)])
def test_a_rest_that_comes_by_resuming_has_no_batch_of_one_for_batch_norm(first_batch, second_batch, sizes):
    first = nn.Linear(4, 2)
    _, balance = one(batch_size=first_batch, model=first)
    sampler = balance.sampler(DATA)
    for inputs, targets, _ in DataLoader(DATA, batch_sampler=sampler):
        cross_entropy(first(inputs), targets).backward()
        break
    _, balance = one(batch_size=second_batch, model=nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    resumed = balance.sampler(DATA)
    resumed.load_state_dict(sampler.state_dict())
    if sizes is None:  # only one sample is left at all
        with pytest.raises(ValueError, match="has 1 samples, and a rank needs 2"):
            iter(resumed)
    else:
        assert [len(batch) for batch in resumed] == sizes


def test_nothing_to_weigh_is_refused_with_one_rank_too():
    model, balance = one()
    inputs, _, _ = next(iter(DataLoader(DATA, batch_sampler=balance.sampler(DATA))))
    model(inputs)
    with pytest.raises(ValueError, match="anything to weigh"):
        balance.weigh(0)


def test_a_forward_pass_before_the_first_batch_is_refused():
    model, balance = one()
    iter(balance.sampler(DATA))
    with pytest.raises(BalanceError, match="handed out no batch yet"):
        model(torch.zeros(1, 4))


def test_a_loader_is_no_data_set():
    _, balance = one()
    with pytest.raises(TypeError, match=r"give Balance\.sampler the data set, not a loader"):
        balance.sampler(DataLoader(DATA, batch_size=4))


def test_loaders_of_a_closed_balance_end():
    _, balance = one()
    batches = iter(balance.sampler(DATA))
    next(batches)
    balance.close()
    with pytest.raises(BalanceError, match="is closed"):
        next(batches)
