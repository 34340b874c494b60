"""Batches of workers that prune: each by its own losses, in order, empty when it joins; and what all left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.data.pruning import PruningSettings
from paceline.drivers.ranks.checkpoints import RankCheckpoints
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data, make_training
from paceline.training import Batches, pruning_of

WORKERS = 3
FINE = PruningSettings(name="fine-pruning", window=50, starting_point=0, block=1, count=1)
POLICIES = {
    "fine-pruning": FINE,
    "info-batch": PruningSettings(name="info-batch"),
}
every = pytest.mark.parametrize("pruning", POLICIES.values(), ids=POLICIES)


@pytest.fixture(scope="module")
def plain():
    recipe = Recipe().with_settings(
        cluster={"workers": WORKERS}, strategy={"k": 2}, data={"split": "iid"}, worker={"batch_size": 160}
    )
    return make_training(recipe, load_data(recipe))


def play(batches, draws, *, worker=0, judged=lambda draw: True):
    """Draw and judge; what came."""
    found = []
    for draw in draws:
        work = batches.assignment(worker=worker, draw=draw)
        if judged(draw):
            batches.judge(worker=worker, draw=draw, losses=work.inputs.flatten(1).sum(1) * (1 + draw % 3))
        found.append(work)
    return found


def equal(some, others):
    return all(
        torch.equal(one.inputs, other.inputs)
        and (torch.equal(one.weights, other.weights) if one.weights is not None else other.weights is None)
        for one, other in zip(some, others, strict=True)
    )


@pytest.mark.parametrize("pruning", [replace(FINE, prune=0.0), PruningSettings(name="info-batch", ratio=0.0)])
def test_who_leaves_nobody_out_draws_the_plain_batches(plain, pruning):
    assert equal(play(Batches(plain), range(12)), play(Batches(replace(plain, pruning=pruning)), range(12)))


@every
def test_a_worker_does_not_see_what_others_do(plain, pruning):
    alone, among = (Batches(replace(plain, pruning=pruning)) for _ in range(2))
    for draw in range(12):
        play(among, [draw], worker=1)
        assert equal(play(among, [draw]), play(alone, [draw]))
    assert alone.pruned.sat_out > 0


@every
def test_batches_come_in_order_and_those_left_out_were_drawn_and_not_judged(plain, pruning):
    """As a replay meets them: a gradient that was refused is not in the journal, and its worker did not judge it."""
    worker, replayed = (Batches(replace(plain, pruning=pruning)) for _ in range(2))
    all_of_them = play(worker, range(14), judged=lambda draw: draw not in (4, 5, 8))
    arrived = [draw for draw in range(14) if draw not in (4, 5, 8)]
    assert equal([all_of_them[draw] for draw in arrived], play(replayed, arrived))
    with pytest.raises(ValueError, match="worker 0 goes on with draw 14, and asks for draw 13"):
        replayed.assignment(worker=0, draw=13)
    with pytest.raises(ValueError, match="asks for draw 99999999"):
        replayed.assignment(worker=0, draw=99_999_999)
    with pytest.raises(ValueError, match="draw 12 cannot be judged, its last is 13"):
        replayed.judge(worker=0, draw=12, losses=torch.ones(1))


@every
def test_whoever_joins_begins_empty_and_what_was_left_out_before_still_counts(plain, pruning):
    training = replace(plain, pruning=pruning)
    lost, fresh = Batches(training), Batches(training)
    play(lost, range(12))
    before, passes = pruning_of(lost, training).times_pruned, lost.pruned.passes
    lost.joined(0, draw=12)
    fresh.joined(0, draw=12)
    assert equal(play(lost, range(12, 24)), play(fresh, range(12, 24)))
    after, own = pruning_of(lost, training), pruning_of(fresh, training)
    assert np.array_equal(after.times_pruned, before + own.times_pruned)
    assert lost.pruned.passes == (passes[0] + fresh.pruned.passes[0],)
    assert np.array_equal(after.difficulty, own.difficulty)


@every
def test_what_all_left_out_is_told_for_every_sample_of_the_data_set(plain, pruning):
    training = replace(plain, pruning=pruning)
    batches = Batches(training)
    for worker, draws in enumerate((12, 0, 15)):
        play(batches, range(draws), worker=worker)
    batches.assignment(worker=WORKERS, shard=2, draw=0)  # one more holds the last shard
    totals = pruning_of(batches, training)
    assert totals.times_pruned.dtype == np.uint16
    assert totals.difficulty.dtype == np.float32
    assert int(totals.times_pruned.sum()) == batches.pruned.sat_out > 0
    held = [shard.numpy() for shard in training.shards]
    assert [set(totals.passes[shard].tolist()) for shard in held] == [{batches.pruned.passes[0]}, {0}, {_last(batches)}]
    met = sum(passes * len(held[0]) for passes in batches.pruned.passes)
    assert batches.pruned.share_pruned == batches.pruned.sat_out / met
    hardest = {
        "fine-pruning": totals.times_pruned.argmax(),
        "info-batch": totals.difficulty.argmax(),
    }[pruning.name]
    assert totals.difficulty[hardest] > 0
    assert totals.difficulty[held[1]].max() == 0


def _last(batches):
    return batches.pruned.passes[1]  # by number, of those that drew anything


def test_a_run_that_prunes_nothing_has_nothing_to_tell(plain):
    with pytest.raises(ValueError, match="prunes nothing"):
        pruning_of(Batches(plain), plain)


@every
def test_a_rank_that_kept_its_state_goes_on_as_if_nothing_had_been(plain, pruning, tmp_path):
    training = replace(plain, pruning=pruning)
    undisturbed, killed, resumed = (Batches(training) for _ in range(3))
    expected = play(undisturbed, range(24), worker=1)
    play(killed, range(11), worker=1)
    RankCheckpoints(tmp_path, rank=1).keep(11, {"pruning": killed.state_dict()})
    resumed.load_state_dict(RankCheckpoints(tmp_path, rank=1).read(11)["pruning"])
    assert equal(expected[11:], play(resumed, range(11, 24), worker=1))
    assert np.array_equal(*(pruning_of(each, training).times_pruned for each in (undisturbed, resumed)))
    assert undisturbed.pruned.sat_out == resumed.pruned.sat_out
