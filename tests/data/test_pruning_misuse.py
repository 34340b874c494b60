"""Misuse gets a clear error, and never a wrong count."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline
from paceline.data.pruning.policy import PruningError
from tests.data.pruning_play import SMALL, losses_of, passes

SAMPLES = 64


def sampler(**more):
    return paceline.FinePruning(SAMPLES, **{"batch_size": 4} | SMALL | more)


def nothing_counted(pruning):
    return pruning.epoch == 1 and not pruning.policy.counts.any() and not pruning.times_pruned.any()


def misused(pruning, how, *, workers):
    """Train on the 16 batches of an epoch, and misuse `observe` as told."""
    for number, (batch,) in enumerate(
        DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_sampler=pruning, num_workers=workers)
    ):
        how(pruning, number, losses_of(batch, 1))


def twice(at):
    def how(pruning, number, losses):
        pruning.observe(losses)
        if number == at:
            pruning.observe(losses.clone())

    return how


def not_at_all(at):
    def how(pruning, number, losses):
        if number != at:
            pruning.observe(losses)

    return how


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("how", "told"),
    [
        (twice(0), "twice|more than once"),
        (twice(5), "twice|more than once"),
        (not_at_all(5), "batch 6 was not observed, and the next one has been taken"),
    ],
)
def test_a_batch_observed_twice_or_not_at_all_is_told_at_once_however_far_the_loader_is_ahead(workers, how, told):
    pruning = sampler()
    with pytest.raises(PruningError, match=told):
        misused(pruning, how, workers=workers)
    assert nothing_counted(pruning)


def test_the_same_losses_again_are_told_at_once_where_the_loader_is_ahead():
    pruning = sampler()
    batches = iter(pruning)
    ahead = [next(batches) for _ in range(3)]
    losses = losses_of(ahead[0], 1)
    pruning.observe(losses)
    with pytest.raises(PruningError, match="observed before"):
        pruning.observe(losses)


@pytest.mark.parametrize("at", [0, 15])
def test_a_batch_that_is_missed_where_it_cannot_be_told_at_once_makes_the_epoch_begin_again(at):
    pruning = sampler()
    misused(pruning, not_at_all(at), workers=0)
    assert nothing_counted(pruning)
    with pytest.warns(UserWarning, match=r"15 of 16 batches .* call observe\(\) for every batch"):
        next(iter(pruning))
    assert nothing_counted(pruning)


def test_a_failed_pass_goes_no_further_and_the_next_one_is_whole():
    pruning = sampler()
    with pytest.raises(PruningError):
        misused(pruning, not_at_all(5), workers=0)
    with pytest.raises(PruningError, match="begin the epoch again"):
        pruning.observe(torch.ones(4))
    calm = sampler()
    passes(pruning, 1), passes(calm, 1)
    assert np.array_equal(pruning.policy.counts, calm.policy.counts)


def test_whole_passes_without_observe_are_told():
    pruning = sampler()
    list(pruning)
    list(pruning)
    with pytest.raises(PruningError, match="none of the batches of epoch 1 was observed, and so"):
        list(pruning)


def test_observe_without_a_batch():
    pruning = sampler()
    with pytest.raises(PruningError, match="no new pass over the loader has begun"):
        pruning.observe(torch.ones(4))
    passes(pruning, 1)
    with pytest.raises(PruningError):
        pruning.observe(torch.ones(4))
    with pytest.raises(PruningError):
        pruning.skip()


@pytest.mark.parametrize("ahead", [1, 3, 16])
@pytest.mark.parametrize("at", [13, 14, 15])
def test_a_batch_observed_twice_where_all_are_handed_out_is_told_before_anything_counts(ahead, at):
    """The end of an epoch, and epochs that are shorter than what the loader fetches ahead."""
    pruning = sampler()
    batches, fetched = iter(pruning), []

    def train():
        for number in range(16):
            fetched.extend(itertools.islice(batches, ahead - len(fetched)))
            pruning.observe(losses_of(fetched.pop(0), 1))
            if number == at:
                pruning.observe(losses_of(range(4), 1))

    with pytest.raises(PruningError, match=r"twice|more than once"):
        train()
    assert nothing_counted(pruning)


@pytest.mark.parametrize("at", [2, 15])
def test_the_same_tensor_twice_is_told_at_once(at):
    pruning = sampler()
    ahead = list(itertools.islice(iter(pruning), 16))
    for number, batch in enumerate(ahead):
        losses = losses_of(batch, 1)
        pruning.observe(losses)
        if number == at:
            with pytest.raises(PruningError):
                pruning.observe(losses)
            break


def test_a_failed_pass_is_not_saved():
    pruning, resumed, calm = sampler(), sampler(), sampler()
    with pytest.raises(PruningError):
        misused(pruning, not_at_all(5), workers=0)
    resumed.load_state_dict(pruning.state_dict())
    assert passes(resumed, 1) == passes(calm, 1)
    assert np.array_equal(resumed.policy.counts, calm.policy.counts)


def test_an_epoch_that_is_never_observed_to_its_end_is_told_the_second_time():
    pruning = sampler()
    misused(pruning, not_at_all(15), workers=0)
    with pytest.warns(UserWarning, match="begun again"):
        misused(pruning, not_at_all(15), workers=0)
    with pytest.raises(PruningError, match="15 of 16 batches of epoch 1 were observed, and so"):
        misused(pruning, not_at_all(15), workers=0)


def test_passes_that_nobody_could_train_on_are_nothing_to_complain_of():
    pruning = sampler()
    with torch.no_grad():
        for _ in range(4):
            list(pruning)
    assert passes(pruning, 1) == passes(sampler(), 1)


def test_losses_of_other_samples_are_refused_where_the_numbers_are_given():
    pruning = sampler()
    batch = next(iter(pruning))
    with pytest.raises(PruningError, match=r"not those of batch 1.*in_order=True"):
        pruning.observe(losses_of(batch, 1), indices=batch[::-1])
    pruning.observe(losses_of(batch, 1), indices=torch.tensor(batch))


def test_two_passes_at_once_are_refused():
    pruning = sampler()
    first = iter(pruning)
    next(first)
    next(iter(pruning))
    with pytest.raises(PruningError, match="another pass"):
        next(first)


@pytest.mark.parametrize(
    ("losses", "error", "told"),
    [
        (torch.tensor(0.5), ValueError, "single number.*reduction='none'"),
        (torch.ones(3), ValueError, r"batch 1 has 4 samples, and losses has the shape \(3,\)"),
        (torch.ones(4, 1), ValueError, r"the shape \(4, 1\)"),
        (torch.tensor([1.0, math.nan, 1.0, 1.0]), ValueError, "loss of sample {1} in batch 1 of epoch 1 is nan"),
        (torch.tensor([1.0, 1.0, math.inf, 1.0]), ValueError, "loss of sample {2} in batch 1 of epoch 1 is inf"),
        ([1.0] * 4, TypeError, "losses must be a tensor"),
    ],
)
def test_what_is_no_loss_is_refused_and_the_batch_can_still_be_observed(losses, error, told):
    pruning, calm = sampler(), sampler()
    passes(calm, 1)
    for number, batch in enumerate(pruning):
        if number == 0:
            for place in (1, 2):
                told = told.replace(f"{{{place}}}", str(batch[place]))
            with pytest.raises(error, match=told):
                pruning.observe(losses)
        pruning.observe(losses_of(batch, 1))
    assert np.array_equal(pruning.policy.counts, calm.policy.counts)
    assert pruning.epoch == 2


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"prune": 1.0}, r"prune, as a share, must be at least 0 and below 1 \(prune=1.0\)"),
        ({"prune": SAMPLES}, "prune must leave at least one sample .*give 63 or fewer"),
        ({"batch_size": 2.5}, r"batch_size must be a whole number of at least 1 \(batch_size=2.5\)"),
        ({"prune": "0.3"}, "prune must be a finite number"),
        ({"window": 6.5}, "window must be a whole number"),
        ({"timeout_seconds": -1}, r"timeout_seconds must be above 0 \(timeout_seconds=-1\)"),
        ({"batch_size": 0}, r"batch_size must be a whole number of at least 1 \(batch_size=0\)"),
        ({"rank": 1}, "give rank and world_size together"),
        ({"rank": 2, "world_size": 2}, r"rank must be a whole number between 0 and 1 \(rank=2\)"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(settings, told):
    with pytest.raises(ValueError, match=told):
        sampler(**settings)


def test_ranks_without_a_process_group_are_refused():
    with pytest.raises(RuntimeError, match="2 ranks must agree on who sits out"):
        next(iter(sampler(rank=0, world_size=2)))


def test_drop_last_with_less_than_a_batch_is_refused_before_it_comes_to_it():
    with pytest.raises(ValueError, match="7 samples take part in a pruned epoch, and with drop_last a batch takes 8"):
        paceline.FinePruning(9, batch_size=8, drop_last=True, **SMALL)


def test_a_number_that_looks_like_per_cent_is_told():
    with pytest.warns(UserWarning, match=r"prune=30 is a number of samples, of 50,000: write 0.3 for a share of 30 %"):
        paceline.FinePruning(50_000, batch_size=8, prune=30)


@pytest.mark.parametrize(
    ("base", "told"),
    [
        (iter(range(64)), "used up after one"),
        (DistributedSampler(range(64), num_replicas=2, rank=0), "which draws for one of several"),
    ],
)
def test_a_base_that_can_be_none_is_refused_at_once(base, told):
    with pytest.raises(TypeError, match=told):
        sampler(base=base)


def test_a_loader_is_no_base():
    with pytest.raises(TypeError, match="base must give numbers of samples, one by one"):
        next(iter(sampler(base=DataLoader(range(64), batch_size=4))))


@pytest.mark.parametrize(("base", "told"), [([0, 64], "index 64, and there are 64 samples"), ([], "no index at all")])
def test_a_base_that_draws_what_is_not_there_is_refused(base, told):
    with pytest.raises(ValueError, match=told):
        next(iter(sampler(base=base)))


MISSING = object()


def damaged(**changes):
    pruning = sampler()
    passes(pruning, 3, stop_after=36)
    state = pruning.state_dict()
    return {name: value for name, value in (state | changes).items() if value is not MISSING}


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (damaged(epoch=MISSING), "'epoch' is missing"),
        (damaged(epoch=0), "epoch must be a whole number between 1"),
        (damaged(observed=10**6), "observed must be below the 11 batches"),
        (damaged(order=torch.arange(3)), "order must be 3 values of type int32"),
        (
            damaged(order=torch.full((45,), 64, dtype=torch.int32)),
            "order must hold numbers of samples that take part, below 64",
        ),
        (damaged(losses=torch.zeros(3)), "losses must be 45 values"),
        (damaged(rank=1), "give every rank its own state"),
        (damaged(batch_size=8), "batch_size=8, and here it is 4"),
        (damaged(policy={"name": "fine-pruning", "samples": 64}), "'counts' is missing"),
        (damaged(policy=5), "policy must be what a policy has learned"),
        (damaged(policy=sampler().state_dict()["policy"] | {"counts_of": "x"}), "counts_of must be a whole number"),
        (damaged(drop_last=True), "drop_last=True, and here it is False"),
        (damaged(order=torch.zeros(45, dtype=torch.int32), keep=torch.zeros(64, dtype=torch.bool)), "that take part"),
        (damaged(shares=torch.full((45,), torch.nan)), "must be finite"),
        (damaged(policy={"name": "info-batch"}), "this state is of info-batch, and the sampler prunes by fine-pruning"),
        (paceline.FinePruning(65, batch_size=4).state_dict(), "65 samples.*another data set|counts must be 64 values"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(state, told):
    pruning, calm = sampler(), sampler()
    passes(pruning, 1), passes(calm, 1)
    with pytest.raises(ValueError, match=told):
        pruning.load_state_dict(state)
    assert passes(pruning, 4) == passes(calm, 4)


def test_a_run_that_is_too_short_for_fine_pruning_is_warned_of():
    with pytest.warns(UserWarning, match=r"none of 20 epochs is pruned \(window=60, starting_point=30\)"):
        paceline.FinePruning(64, batch_size=8, epochs=20)
    pruning = paceline.FinePruning(64, batch_size=8, epochs=40)
    assert pruning.plan() == pruning.plan(40) != pruning.plan(60)
    with pytest.raises(ValueError, match=r"give epochs, to plan\(\) or to FinePruning"):
        paceline.FinePruning(64, batch_size=8).plan()
    short = sampler(epochs=8)  # its windows go on after `epochs`, and nobody is told otherwise
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passes(short, 12)
    assert any(short.schedule.is_pruned(epoch) for epoch in (9, 10, 11, 12))
