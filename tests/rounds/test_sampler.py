"""Batches that ranks in rounds take from one order: each sample once, and none alone, whoever asks when."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from paceline import SharesBySpeed
from paceline.drivers.rounds.preparation import prepare
from paceline.drivers.rounds.sampler import SampleCounter, TakenBatches
from paceline.strategies import LGC


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    samples=st.integers(2, 60),
    shares=st.lists(st.integers(2, 9), min_size=1, max_size=4),
    fewest=st.integers(1, 3),
    data=st.data(),
)
def test_each_sample_is_taken_once_and_no_batch_is_smaller_than_the_fewest(samples, shares, fewest, data):
    store = HashStore()
    shares = [max(share, fewest) for share in shares]
    ranks = [
        TakenBatches(samples, SampleCounter(store), lambda size=share: size, whole=sum(shares), fewest=fewest)
        for share in shares
    ]
    passes, taken = dict(enumerate(map(iter, ranks))), Counter()
    while passes:
        rank = data.draw(st.sampled_from(sorted(passes)))
        batch = next(passes[rank], None)
        if batch is None or ranks[rank].state_dict()["epoch"]:  # a rank that came too late is in the next epoch
            del passes[rank]
            continue
        assert len(batch) >= min(fewest, samples)
        taken.update(batch)
    assert taken == Counter(range(samples))


def test_a_state_goes_on_behind_samples_that_were_joined_to_the_last_batch():
    counter = SampleCounter(HashStore())
    sampler = TakenBatches(9, counter, lambda: 4, whole=4, shuffle=False)
    batches = iter(sampler)
    assert [next(batches), next(batches)] == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    sampler.mark_trained()
    again = TakenBatches(9, SampleCounter(HashStore()), lambda: 4, whole=4, shuffle=False)
    again.load_state_dict(sampler.state_dict())
    assert list(again) == [[4, 5, 6, 7, 8]]


def test_blocks_have_two_samples_where_batch_norm_needs_them():
    shares = SharesBySpeed(batch_size=32)
    for norm, least in ((torch.nn.BatchNorm1d(2), 8), (torch.nn.LayerNorm(2), 4)):
        optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
        made, _, _ = prepare(
            norm,
            optimizer,
            LGC(k=1),
            schedulers=[],
            codec="identity",
            plan="auto",
            blocks=4,
            most_behind=1,
            shares=shares,
        )
        assert made.shares.least == least
