"""Laws of dealing: every sample once in an epoch, whatever shares, loaders, resumptions and numbers of ranks do."""

from __future__ import annotations

import threading
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, WeightedRandomSampler

import paceline
from paceline.drivers.balancing.balance import Balance
from paceline.drivers.balancing.passes import BatchPass
from paceline.drivers.balancing.schedule import DealtBatch
from tests.balancing.dealing import DealingRank, Loader, samplers_of

quick = settings(deadline=None, max_examples=60, derandomize=True)
shares_of = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def dealt_anew(data, batch, ranks):
    """Other shares of the same batch for as many ranks, at least 1 each."""
    cuts = sorted(data.draw(st.lists(st.integers(1, batch - 1), min_size=ranks - 1, max_size=ranks - 1, unique=True)))
    return [end - begin for begin, end in zip([0, *cuts], [*cuts, batch], strict=True)]


def train(ranks, samplers, data, *, most_steps=None):
    """Train a pass on all ranks, in which shares may change; return how often each sample was computed."""
    loaders = [
        Loader(rank, sampler, data.draw(st.integers(0, 5))) for rank, sampler in zip(ranks, samplers, strict=True)
    ]
    seen, steps = Counter(), 0
    while most_steps is None or steps < most_steps:
        taken = [loader.next() for loader in loaders]
        if None in taken:
            assert taken == [None] * len(taken), "some ranks have more batches than others"
            break
        steps += 1
        seen.update(sample for batch, _ in taken for sample in batch)
        assert len({dealt.total for _, dealt in taken}) == 1
        assert sum(dealt.samples for _, dealt in taken) == taken[0][1].total
        weights = [Fraction(len(ranks) * dealt.samples, dealt.total) for _, dealt in taken]
        assert sum(weights) == len(ranks)
        if len(ranks) < ranks[0].batch_size and data.draw(st.booleans()):
            shares = dealt_anew(data, ranks[0].batch_size, len(ranks)) if len(ranks) > 1 else [ranks[0].batch_size]
            furthest = max(rank.current.place for rank in ranks)
            for rank in ranks:
                rank.schedule.change(furthest, shares)
    return seen


@quick
@given(shares=shares_of, samples=st.integers(1, 120), epochs=st.integers(1, 3), shuffle=st.booleans(), data=st.data())
def test_each_sample_comes_once_in_an_epoch_whatever_the_shares_do(shares, samples, epochs, shuffle, data):
    ranks = [DealingRank(rank, shares) for rank in range(len(shares))]
    samplers = samplers_of(ranks, samples, shuffle=shuffle)
    for _ in range(epochs):
        assert train(ranks, samplers, data) == Counter(range(samples))


@quick
@given(shares=shares_of, samples=st.integers(1, 120), data=st.data())
def test_with_drop_last_each_sample_comes_at_most_once_and_every_step_is_whole(shares, samples, data):
    batch = sum(shares)
    ranks = [DealingRank(rank, shares) for rank in range(len(shares))]
    seen = train(ranks, samplers_of(ranks, samples, drop_last=True), data)
    assert seen.total() == samples // batch * batch
    assert max(seen.values(), default=1) == 1


@quick
@given(first=shares_of, second=shares_of, samples=st.integers(1, 120), stop=st.integers(0, 8), data=st.data())
def test_an_epoch_goes_on_with_another_number_of_ranks_and_another_batch_size(first, second, samples, stop, data):
    ranks = [DealingRank(rank, first) for rank in range(len(first))]
    samplers = samplers_of(ranks, samples)
    seen = train(ranks, samplers, data, most_steps=stop)
    states = [sampler.state_dict() for sampler in samplers]
    assert all(state == states[0] for state in states)
    ranks = [DealingRank(rank, second) for rank in range(len(second))]
    samplers = samplers_of(ranks, samples)
    for sampler in samplers:
        sampler.load_state_dict(states[0])
    if seen.total() == samples:  # that epoch was over: this is the next
        assert samplers[0].epoch == 1
        seen = Counter()
    assert seen + train(ranks, samplers, data) == Counter(range(samples))
    assert samplers[0].state_dict()["epoch"] == states[0]["epoch"] + 1


@quick
@given(shares=st.lists(st.integers(2, 9), min_size=1, max_size=4), samples=st.integers(2, 80))
def test_a_rank_that_takes_part_has_at_least_as_many_as_batch_norm_needs(shares, samples):
    ranks = [DealingRank(rank, shares, least=2) for rank in range(len(shares))]
    loaders = [Loader(rank, sampler, 0) for rank, sampler in zip(ranks, samplers_of(ranks, samples), strict=True)]
    seen = Counter()
    while None not in (taken := [loader.next() for loader in loaders]):
        assert all(len(batch) != 1 for batch, _ in taken)
        seen.update(sample for batch, _ in taken for sample in batch)
    assert seen == Counter(range(samples))


def test_epochs_have_other_orders_and_set_epoch_says_which():
    balance = Balance(torch.nn.Linear(1, 1), batch_size=4)
    sampler, again = balance.sampler(20, seed=3), balance.sampler(20, seed=3)
    first = list(sampler)
    assert list(sampler) == first, "nothing was trained: it is the same epoch"
    sampler.set_epoch(1)
    assert list(sampler) != first
    again.set_epoch(0)
    assert list(again) == first
    assert sorted(sample for batch in first for sample in batch) == list(range(20))


def test_a_state_of_other_data_is_refused_and_changes_nothing():
    balance = Balance(torch.nn.Linear(1, 1), batch_size=4)
    sampler = balance.sampler(20)
    for change in ({"samples": 21}, {"seed": 1}, {"done_samples": 20}, {"epoch": -1}, {"epoch": "1"}):
        with pytest.raises(ValueError, match=r"samples|seed|epoch"):
            sampler.load_state_dict(sampler.state_dict() | change)
    assert sampler.state_dict()["epoch"] == 0


def test_a_sampler_of_ones_own_is_dealt_as_it_draws():
    balance = Balance(torch.nn.Linear(1, 1), batch_size=4)
    base = WeightedRandomSampler([0.0, 1.0, 0.0], 10, generator=torch.Generator().manual_seed(0))
    assert list(balance.sampler(base)) == [[1] * 4, [1] * 4, [1] * 2]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (torch.utils.data.DistributedSampler(range(8), 2, 0), "draws for one of several"),
        (iter([1, 2]), "with a length"),
        ("abc"[:0], "there are 0"),
    ],
)
def test_what_cannot_be_dealt_is_refused(wrong, words):
    balance = Balance(torch.nn.Linear(1, 1), batch_size=4)
    with pytest.raises((TypeError, ValueError), match=words):
        balance.sampler(wrong)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"batch_size": 2.5}, "batch_size must be a whole number"),
        ({"batch_size": 8, "most": 4}, "can take between"),
        ({"batch_size": 8, "period": 0}, "period must be"),
        ({"batch_size": 8, "shares": [1, 2]}, "shares must be 1 numbers"),
        ({"batch_size": 8, "reduction": "max"}, "unknown reduction"),
    ],
)
def test_settings_that_cannot_be_right_are_refused_with_the_range(settings, words):
    with pytest.raises(ValueError, match=words):
        Balance(torch.nn.Linear(1, 1), **settings)


def test_a_last_step_of_one_sample_is_joined_to_the_one_before_where_batch_norm_would_fail_in_it():
    balance = Balance(torch.nn.BatchNorm1d(2), batch_size=4)
    assert [len(batch) for batch in balance.sampler(9)] == [4, 5]
    assert [len(batch) for batch in balance.sampler(9, drop_last=True)] == [4, 4]
    assert [len(batch) for batch in Balance(torch.nn.Linear(2, 1), batch_size=4).sampler(9)] == [4, 4, 1]
    with pytest.raises(ValueError, match="the step has 1 samples, and a rank needs 2"):
        balance.sampler(1)
    pruning = paceline.FinePruning(9, batch_size=4)
    assert [len(batch) for batch in balance.sampler(pruning)] == [4, 5]
    assert pruning.plan(1).whole == (9, 2)
    tight = Balance(torch.nn.BatchNorm1d(2), batch_size=4, most=4)
    with pytest.raises(ValueError, match=r"drop_last=True, a larger most"):
        tight.sampler(9)
    with pytest.raises(ValueError, match=r"drop_last=True, a larger most"):
        tight.sampler(paceline.InfoBatch(9, batch_size=4, epochs=2))  # nobody knows how many samples will be left
    assert len(tight.sampler(10)) == 3


# -- which batch is trained ----------------------------------------------------------------------------------------


def a_pass(steps):
    """A pass whose batches have as many samples as their number."""

    def take(step):
        return ([step] * (step + 1), DealtBatch(samples=step + 1, total=99, first=0, ranks=1)) if step < steps else None

    return BatchPass(take, number=0, steps=steps, lock=threading.RLock())


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 99

    def __getitem__(self, index):
        return index


def trained_sizes(batches, loader, passes=1):
    """Pairs of the samples that a batch has and that the pass says it has."""
    for batch in loader:
        for _ in range(passes):
            batches.begin_forward()
            yield len(batch), batches.dealt.samples
            batches.end_backward()


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 5, 12])
def test_the_batch_that_is_trained_is_known_however_far_a_loader_fetches_ahead(workers, passes, steps):
    batches = a_pass(steps)

    class Sampler(torch.utils.data.Sampler):
        def __iter__(self):
            return batches

        def __len__(self):
            return steps

    loader = DataLoader(Numbers(), batch_sampler=Sampler(), num_workers=workers)
    found = list(trained_sizes(batches, loader, passes))
    assert len(found) == steps * passes
    assert all(has == said for has, said in found)
    assert batches.done == steps


def one_ahead(loader):
    """Hold a batch back, as those do who must know which is the last."""
    iterator = iter(loader)
    held = next(iterator, None)
    while held is not None:
        following = next(iterator, None)
        yield held
        held = following


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_holds_a_batch_back_is_followed_to_its_end(workers):
    batches = a_pass(7)

    class Sampler(torch.utils.data.Sampler):
        def __iter__(self):
            return batches

    found = list(trained_sizes(batches, one_ahead(DataLoader(Numbers(), batch_sampler=Sampler(), num_workers=workers))))
    assert [has for has, _ in found] == [said for _, said in found] == list(range(1, 8))


def test_a_loader_that_asks_in_a_thread_of_its_own_is_followed_by_backward_passes():
    batches, fetched, room = a_pass(9), [], threading.Semaphore(3)

    def fetch():
        for batch in batches:
            fetched.append(batch)
            room.acquire(timeout=20)

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()

    def loader():
        for step in range(9):
            for _ in range(2000):
                if len(fetched) > step:
                    break
                threading.Event().wait(0.005)
            yield fetched[step]
            room.release()

    found = list(trained_sizes(batches, loader()))
    thread.join(20)
    assert found == [(size, size) for size in range(1, 10)]


def test_a_batch_that_is_skipped_is_not_counted_as_trained_later():
    batches, found = a_pass(6), []
    for number, batch in enumerate(batches):
        if number == 2:
            continue
        batches.begin_forward()
        found.append(len(batch) == batches.dealt.samples)
        batches.end_backward()
    assert found == [True] * 5
