"""The sampler: whatever loader fetches from it, whatever stands in between, the same samples in the same order."""

from __future__ import annotations

import io
import itertools
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.data.pruning.info_batch import InfoPolicy
from paceline.data.pruning.sampler import PrunedBatches
from tests.data.pruning_play import EPOCHS, KINDS, SAMPLES, SMALL, kept, losses_of, passes

every_kind = pytest.mark.parametrize("kind", KINDS)


def loaded(pruning, epochs, *, in_between=lambda: None, **loader):
    """What a DataLoader gives, with `observe` after each batch."""
    loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_sampler=pruning, **loader)
    taken = []
    while pruning.epoch <= epochs:
        epoch = pruning.epoch
        for (batch,) in loader:
            taken.append((epoch, batch.tolist()))
            in_between()
            pruning.observe(losses_of(batch, epoch))
    return taken


@every_kind
def test_every_sample_comes_once_or_sits_out_and_the_number_of_batches_is_told(kind):
    pruning, sat_out = KINDS[kind](), 0
    for epoch in range(1, EPOCHS + 1):
        told = len(pruning)
        batches = [batch for batch in pruning if pruning.observe(losses_of(batch, epoch)) is not None]
        met = [index for batch in batches for index in batch]
        assert len(met) == len(set(met))
        assert told == len(batches) == -(-len(met) // 8)
        sat_out += SAMPLES - len(met)
        assert int(pruning.times_pruned.sum()) == sat_out
    assert sat_out > 0
    assert pruning.epoch == EPOCHS + 1


@every_kind
def test_a_loader_that_fetches_ahead_gives_the_same_batches(kind):
    expected = passes(KINDS[kind](), 4)
    assert loaded(KINDS[kind](), 4) == expected
    assert loaded(KINDS[kind](), 4, num_workers=2, prefetch_factor=3, persistent_workers=True) == expected


@every_kind
@pytest.mark.parametrize("stop_after", [3, 7, 20, 40])
def test_a_sampler_that_is_saved_in_mid_epoch_goes_on_in_the_same_order(kind, stop_after):
    whole, first = passes(KINDS[kind](), EPOCHS), KINDS[kind]()
    before = passes(first, EPOCHS, stop_after=stop_after)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = KINDS[kind]()
    second.load_state_dict(torch.load(file, weights_only=True))
    assert before + passes(second, EPOCHS) == whole
    assert len(before) == stop_after


def test_what_was_fetched_ahead_when_a_state_was_saved_comes_again():
    whole, first, taken = passes(KINDS["fine-pruning"](), 5), KINDS["fine-pruning"](), []
    loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_sampler=first, num_workers=1)
    for (batch,) in loader:
        taken.append((1, batch.tolist()))
        first.observe(losses_of(batch, 1))
        if len(taken) == 2:
            break
    second = KINDS["fine-pruning"]()
    second.load_state_dict(first.state_dict())
    assert taken + passes(second, 5) == whole


@every_kind
def test_an_epoch_that_is_broken_off_is_begun_again_and_nothing_counts_twice(kind):
    calm, broken = KINDS[kind](), KINDS[kind]()
    expected, found = kept(passes(calm, 5)), {}
    for epoch in range(1, 6):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for batch in broken:
                broken.observe(losses_of(batch, epoch))
                break
            found |= kept([(epoch, batch) for batch in broken if broken.observe(losses_of(batch, epoch)) is not None])
    assert found == expected
    assert np.array_equal(broken.times_pruned, calm.times_pruned)
    assert all(
        np.array_equal(value, calm.policy.state_dict()[name]) for name, value in broken.policy.state_dict().items()
    )


def test_breaking_off_is_told_and_a_look_at_the_first_batch_is_not():
    pruning, looked_at = KINDS["fine-pruning"](), KINDS["fine-pruning"]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(looked_at))
        assert passes(looked_at, 1) == passes(KINDS["fine-pruning"](), 1)  # and the order is what it would have been
    pruning.observe(losses_of(next(iter(pruning)), 1))
    with pytest.warns(UserWarning, match="1 of 7 batches of epoch 1 were observed: it is begun again"):
        next(iter(pruning))


def test_an_epoch_that_is_ended_early_counts_with_what_was_observed():
    pruning = KINDS["fine-pruning"](starting_point=0, block=1, count=1)
    for batch in pruning:
        pruning.observe(losses_of(batch, 1))
        pruning.end_epoch()
    assert pruning.epoch == 2
    above = losses_of(batch, 1) >= losses_of(batch, 1).mean()
    assert {index for index in range(SAMPLES) if pruning.policy.counts[index]} == {
        index for index, hard in zip(batch, above, strict=True) if hard
    }


def test_a_batch_that_is_skipped_teaches_nothing():
    pruning = KINDS["fine-pruning"]()
    for number, batch in enumerate(pruning):
        if number == 2:
            pruning.skip()
            skipped = batch
        else:
            pruning.observe(losses_of(batch, 1))
    assert pruning.epoch == 2
    assert not pruning.policy.counts[skipped].any()
    assert pruning.policy.counts.sum() > 0


@every_kind
def test_accumulating_and_evaluating_in_between_change_nothing(kind):
    """Gradients over two batches, each fetched before both are observed; another loader runs in the middle."""
    pruning, other = KINDS[kind](), DataLoader(TensorDataset(torch.arange(9)), batch_size=4)
    expected, taken = passes(KINDS[kind](), 4), []
    while pruning.epoch <= 4:
        epoch, batches = pruning.epoch, iter(pruning)
        while held := list(itertools.islice(batches, 2)):
            list(other)
            for each in held:
                pruning.observe(losses_of(each, epoch))
                taken.append((epoch, each))
    assert taken == expected


@pytest.mark.parametrize("samples", [16, 19])
def test_drop_last_leaves_out_what_is_no_whole_batch(samples):
    pruning = paceline.FinePruning(samples, batch_size=8, drop_last=True, **SMALL)
    for epoch, size in ((1, 2), (2, 2), (3, (samples - samples * 3 // 10) // 8)):
        batches = [batch for batch in pruning if pruning.observe(losses_of(batch, epoch)) is not None]
        assert [len(batch) for batch in batches] == [8] * size


def test_without_a_number_of_epochs_info_batch_prunes_to_the_end_and_without_a_warning():
    pruning, pruned = paceline.InfoBatch(SAMPLES, batch_size=8), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(1, 31):
            sizes = [len(batch) for batch in pruning if pruning.observe(losses_of(batch, epoch)) is not None]
            pruned.append(sum(sizes) < SAMPLES)
    assert pruned == [False] + [True] * 29
    assert pruning.plan(30).pruned_epochs == tuple(range(2, 31))
    with pytest.raises(ValueError, match=r"give epochs, to plan\(\) or to InfoBatch"):
        pruning.plan()
    whole = paceline.InfoBatch(SAMPLES, batch_size=8, delta=0.0)
    assert not whole.plan(30).pruned_epochs
    assert {epoch: len(who) for epoch, who in kept(passes(whole, 5)).items()} == dict.fromkeys(range(1, 6), SAMPLES)


@every_kind
def test_200_epochs_with_batch_norm_never_end_in_a_batch_of_one_and_each_sample_comes_once(kind):
    """97 samples are 6 batches of 16 and one sample; 65, those of a pruned epoch of fine-pruning, 4 and one."""
    fine = {**SMALL, "prune": 32}
    pruning = KINDS[kind](97, batch_size=16, **(fine if kind == "fine-pruning" else {"epochs": 200}))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    inputs, joined = torch.randn(97, 4, generator=torch.Generator().manual_seed(0)), 0
    for epoch in range(1, 201):
        keep, weights = pruning.policy.decide(epoch, (epoch - 1) / 200).keep, pruning.policy.decide(epoch).weights
        expected = range(97) if keep is None else np.flatnonzero(keep)
        met = []
        for batch in pruning:
            losses = model(inputs[batch]).square().squeeze(1)
            mean = pruning.observe(losses)
            mean.backward()
            if keep is not None and weights is not None:
                assert torch.allclose(mean, (torch.from_numpy(weights[batch]) * losses).sum() / len(batch))
            met += batch
            joined += len(batch) == 17
        assert sorted(met) == list(expected)
    assert joined > 5


def test_a_sample_that_is_left_over_is_judged_with_the_batch_that_it_was_trained_in():
    pruning = paceline.FinePruning(9, batch_size=4, **SMALL)
    batches = [batch for batch in pruning if pruning.observe(torch.tensor([float(index) for index in batch])) >= 0]
    assert [len(batch) for batch in batches] == [4, 5]
    hard = [index for batch in batches for index in batch if index >= sum(batch) / len(batch)]
    assert np.flatnonzero(pruning.policy.counts).tolist() == sorted(hard)


def test_weights_are_the_policys_and_the_mean_is_weighted():
    pruning = KINDS["info-batch"]()
    passes(pruning, 1)
    decision = pruning.policy.decide(2)
    assert set(decision.weights.tolist()) == {1.0, 2.0}
    for batch in pruning:
        losses = losses_of(batch, 2).requires_grad_()
        mean = pruning.observe(losses)
        mean.backward()
        weights = torch.from_numpy(decision.weights[batch])
        assert torch.allclose(mean, (weights * losses).sum() / len(batch))
        assert torch.equal(losses.grad, weights / len(batch))


def test_the_hardest_are_those_who_were_most_often_above_the_mean():
    pruning = KINDS["fine-pruning"](starting_point=0, block=2, count=1, prune=0.1)
    while pruning.epoch <= 5:
        for batch in pruning:
            pruning.observe(torch.tensor(batch).float() + 1)
    hardest = pruning.hardest(5)
    assert {sample.index for sample in hardest} <= set(range(25, SAMPLES))
    assert [sample.times_pruned for sample in hardest] == sorted((s.times_pruned for s in hardest), reverse=True)
    assert hardest[0].times_pruned == int(pruning.times_pruned.max()) > 0
    assert len(pruning.hardest(10**6)) == SAMPLES


def test_the_length_is_that_of_the_pass_until_the_loop_is_over():
    """Loops that accumulate ask whether this is the last batch, after they have observed it."""
    for workers in (0, 1):
        pruning = KINDS["fine-pruning"]()
        loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_sampler=pruning, num_workers=workers)
        for epoch in range(1, 5):
            last = []
            for number, (batch,) in enumerate(loader, start=1):
                pruning.observe(losses_of(batch, epoch))
                last.append((number == len(loader), pruning.last_batch))
            assert last == [(False, False)] * (len(last) - 1) + [(True, True)]
        assert workers or len(loader) == 7  # epoch 5 is whole


@pytest.mark.parametrize("chunks", [(2, 2, 2, 1), (7,), (3, 3, 1)])
def test_loops_that_fetch_some_batches_and_then_train_on_them(chunks):
    pruning, taken = KINDS["fine-pruning"](), []
    batches = iter(pruning)
    for size in chunks:
        held = [next(batches) for _ in range(size)]
        for batch in held:
            pruning.observe(losses_of(batch, 1))
            taken.append((1, batch))
    assert taken == passes(KINDS["fine-pruning"](), 1)


def test_a_sampler_can_be_sent_to_another_process():
    pruning = pickle.loads(pickle.dumps(KINDS["fine-pruning"]()))  # noqa: S301 - our own
    assert passes(pruning, 2) == passes(KINDS["fine-pruning"](), 2)


class TwoRanks:
    """The meetings of rank 0 with another that has seen nothing."""

    rank, ranks = 0, 2

    def compare(self, moment, numbers, **how):
        pass

    def add_up(self, values):
        pass


def test_ranks_that_come_up_after_the_length_was_asked_for_are_dealt_their_parts():
    there = [None]
    pruning = PrunedBatches(InfoPolicy(20), batch_size=4, find_ranks=lambda: there[0])
    assert len(pruning) == 5
    there[0] = TwoRanks()
    assert len(pruning) == 3
    assert len(passes(pruning, 1)) == 3


def test_numbers_of_numpy_and_data_sets_are_taken_as_what_they_are():
    given = {"window": np.int64(6), "starting_point": 2, "block": 3, "count": 2, "prune": np.float32(0.5)}
    pruning = paceline.FinePruning(TensorDataset(torch.arange(SAMPLES)), batch_size=np.int32(8), **given)
    assert sum(len(batch) for epoch, batch in passes(pruning, 3) if epoch == 3) == SAMPLES // 2


class Elsewhere(torch.Tensor):
    """A tensor that says it is not on the CPU, and so is not looked at before it is fetched."""

    is_cpu = False


def elsewhere(losses):
    return losses.as_subclass(Elsewhere)


@every_kind
def test_losses_on_a_device_are_fetched_late_and_judged_alike(kind):
    pruning, buffer = KINDS[kind](), torch.empty(8)
    expected = passes(KINDS[kind](), 5)
    taken = []
    while pruning.epoch <= 5:
        epoch = pruning.epoch
        for batch in pruning:
            buffer[: len(batch)] = losses_of(batch, epoch)  # a captured graph puts its losses there every time
            pruning.observe(elsewhere(buffer[: len(batch)]))
            taken.append((epoch, batch))
    assert taken == expected


def test_a_loss_on_a_device_that_is_not_finite_is_told_late_and_costs_no_other():
    pruning, lost = KINDS["info-batch"](), []

    def train():
        for number, batch in enumerate(pruning):
            losses = losses_of(batch, 1)
            if number == 3:
                losses[2] = torch.nan
                lost.append(batch[2])
            pruning.observe(elsewhere(losses))

    with pytest.warns(UserWarning, match=r"the loss of sample \d+ was nan: it is not judged"):
        train()
    assert np.flatnonzero(np.isnan(pruning.policy.scores)).tolist() == lost


@every_kind
def test_the_next_pass_and_the_next_weights_are_told_while_a_loader_is_ahead(kind):
    """The weights are those of the mean that `observe` returns; all batches are fetched before one is observed."""
    pruning, weighted = KINDS[kind](), 0
    for epoch in range(1, EPOCHS + 1):
        told, batches = pruning.batches_ahead, list(pruning)
        assert told == len(batches)
        for batch in batches:
            losses, weights = losses_of(batch, epoch), pruning.next_weights()
            expected = losses.mean() if weights is None else (weights * losses).mean()
            torch.testing.assert_close(pruning.observe(losses), expected)
            weighted += weights is not None and bool((weights != 1).any())
        if epoch < EPOCHS:
            state = pruning.state_dict()
            resumed = KINDS[kind]()
            resumed.load_state_dict(state)
            assert resumed.batches_ahead == pruning.batches_ahead
    assert bool(weighted) == ("info" in kind)
