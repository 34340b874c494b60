"""Samplers of one's own below a pruning sampler, and how what they draw is dealt to ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler

import paceline
from paceline.data.pruning.epoch import BatchLayout
from tests.data.pruning_play import EPOCHS, KINDS, SAMPLES, SMALL, losses_of, passes

every_kind = pytest.mark.parametrize("kind", KINDS)


def weighted():
    weights = torch.ones(SAMPLES)
    weights[:10] = 5
    return WeightedRandomSampler(weights, 80, generator=torch.Generator().manual_seed(3))


@every_kind
def test_with_a_base_the_pruned_are_taken_out_of_what_it_draws(kind):
    pruning, alike = KINDS[kind](base=weighted()), weighted()
    for epoch in range(1, 6):
        keep = pruning.policy.decide(epoch, (epoch - 1) / EPOCHS).keep
        drawn = [index for index in alike if keep is None or keep[index]]
        batches = [batch for batch in pruning if pruning.observe(losses_of(batch, epoch)) is not None]
        assert [index for batch in batches for index in batch] == drawn
    assert pruning.times_pruned.sum() > 0


def test_a_sample_that_a_base_draws_often_counts_once_an_epoch():
    pruning = paceline.FinePruning(4, batch_size=3, base=[3] * 6 + [0, 1, 2], **SMALL)
    for batch in pruning:
        pruning.observe(torch.tensor(batch).float())
    assert pruning.policy.counts.max() == 1


@pytest.mark.parametrize("stop_after", [4, 10, 14, 24])
@pytest.mark.parametrize("ask", [True, False])
def test_a_base_with_a_generator_draws_after_a_resumption_what_it_would_have_drawn(stop_after, ask):
    whole = passes(KINDS["fine-pruning"](base=weighted()), 4)
    first = KINDS["fine-pruning"](base=weighted())
    before = passes(first, 4, stop_after=stop_after)
    if ask and stop_after == 10:  # an epoch of 80 is over: asked how long the next one is, the base has drawn it
        list(first), len(first)
    second = KINDS["fine-pruning"](base=weighted())
    second.load_state_dict(first.state_dict())
    assert before + passes(second, 4) == whole


def test_a_share_is_one_of_those_whom_a_base_draws():
    base = SubsetRandomSampler(range(30, SAMPLES), generator=torch.Generator().manual_seed(0))
    pruning = KINDS["fine-pruning"](base=base)
    sizes = [sum(len(batch) for _, batch in passes(pruning, epoch)) for epoch in range(1, 5)]
    assert sizes == [20, 20, 14, 14]
    assert not pruning.times_pruned[:30].any()
    assert pruning.share_pruned == pytest.approx(12 / 80)


def test_a_base_that_wants_to_know_the_epoch_is_told():
    told = []

    class Base(list):
        def set_epoch(self, epoch):
            told.append(epoch)

    passes(KINDS["fine-pruning"](base=Base(range(SAMPLES))), 3)
    assert told == [0, 1, 2]


# -- dealing ------------------------------------------------------------------------------------------------------


@given(
    samples=st.integers(1, 60), batch_size=st.integers(1, 9), ranks=st.integers(1, 5), drop_last=st.booleans()
)  # fmt: skip
def test_every_rank_gets_as_many_batches_of_one_size_and_together_they_have_every_sample(
    samples, batch_size, ranks, drop_last
):
    dealt = [BatchLayout(batch_size=batch_size, rank=rank, ranks=ranks, drop_last=drop_last) for rank in range(ranks)]
    places = []
    for step in range(dealt[0].steps(samples)):
        parts = [dealing.places(step, samples) for dealing in dealt]
        assert len({stop - start for start, stop in parts}) == 1
        size = parts[0][1] - parts[0][0]
        assert size <= batch_size + (batch_size > 1)
        assert size > 1 or batch_size == 1 or samples <= ranks, "BatchNorm refuses a batch of one"
        places += [place for start, stop in parts for place in range(start, stop)]
        assert places == list(range(len(places)))
    whole = samples // (batch_size * ranks) * batch_size * ranks if drop_last else samples
    assert whole <= len(places) < whole + ranks
    assert dealt[0].ends(samples)[-1:].tolist() == [whole][: len(places)]
