"""Batches of epochs that others end, and batches in blocks."""

from __future__ import annotations

import io
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.data.pruning.sampler import InfoBatch
from paceline.drivers.rounds.batches import BatchSource, OpenBatch, rounds_in
from paceline.workers.blocks import cut_batch


@given(st.integers(1, 5), st.lists(st.integers(0, 7), max_size=5))
def test_no_batch_is_left_out_whoever_ends_epochs_when(length, taken):
    source = BatchSource(range(length))
    found = [source.next() for count in taken for _ in range(count)]
    assert found == list(itertools.islice(itertools.cycle(range(length)), sum(taken)))


def test_a_loader_is_begun_anew_for_each_pass_and_not_before():
    begun = []

    class Loader:
        def __iter__(self):
            begun.append(True)
            return iter([1, 2])

    source = BatchSource(Loader())
    assert not begun
    assert [source.next() for _ in range(4)] == [1, 2, 1, 2]
    assert len(begun) == 2


@pytest.mark.parametrize("loader", [[], DataLoader(TensorDataset(torch.zeros(2)), batch_size=3, drop_last=True)])
def test_a_loader_without_batches_is_an_error_and_no_endless_loop(loader):
    with pytest.raises(ValueError, match="the loader has no batch"):
        BatchSource(loader).next()


@pytest.mark.parametrize(
    ("loader", "rounds", "error"),
    [
        ([], None, r"at least one round \(rounds=0\)"),
        ([1], 0, r"at least one round \(rounds=0\)"),
        ([1], -2, r"at least one round \(rounds=-2\)"),
        ([1], 2.5, r"a whole number \(rounds=2.5\)"),
        (iter([1]), None, r"give epoch\(loader, rounds=...\)"),
    ],
)
def test_an_epoch_needs_rounds(loader, rounds, error):
    with pytest.raises(ValueError, match=error):
        rounds_in(loader, rounds)


@given(st.integers(1, 40), st.integers(1, 12))
def test_blocks_are_equal_in_order_and_not_too_many(samples, most):
    inputs, targets = torch.arange(2 * samples).view(samples, 2), torch.arange(samples)
    blocks = cut_batch((inputs, targets), most)
    assert 1 <= len(blocks) <= most
    assert len({len(x) for x, y in blocks} | {len(y) for x, y in blocks}) == 1
    assert torch.equal(torch.cat([x for x, _ in blocks]), inputs)
    assert torch.equal(torch.cat([y for _, y in blocks]), targets)
    size = len(blocks[0][0])
    assert size > 1 or samples == 1, "BatchNorm refuses a block of one sample"
    for fewer in range(2, size):  # blocks that are smaller would be too many, or not equal
        assert samples % fewer or samples // fewer > most


@given(st.integers(2, 12), st.integers(1, 12))
def test_blocks_of_a_small_batch_pass_a_batch_norm_and_their_mean_is_the_batch_s(samples, most):
    """As `blocks` adds them up: the sum of the blocks' means, divided by all blocks."""
    torch.nn.BatchNorm1d(3)(cut_batch((torch.rand(samples, 3),), most)[0])
    inputs = torch.arange(2.0 * samples).view(samples, 2)
    blocks = cut_batch((inputs,), most)
    torch.testing.assert_close(sum(block.mean(0) for block in blocks) / len(blocks), inputs.mean(0))


@pytest.mark.parametrize(
    ("samples", "sizes"),
    [(32, [8] * 4), (30, [10] * 3), (31, [31]), (4, [2] * 2), (3, [3]), (2, [2]), (1, [1])],
)
def test_a_batch_that_does_not_divide_comes_in_fewer_blocks(samples, sizes):
    assert [len(block) for block in cut_batch((torch.zeros(samples),), 4)] == sizes


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ((), "at least one sample"),
        ((torch.zeros(0, 3),), "at least one sample"),
        ((torch.zeros(4), torch.zeros(3)), r"of one length \(they have 4, 3\)"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch, error):
    with pytest.raises(ValueError, match=error):
        cut_batch(batch, 4)


def test_a_batch_that_is_not_cut_is_one_block_since_the_model_was_taken():
    batch = OpenBatch()
    done, blocks, seconds = batch.end(held_since=0.0)
    assert (done, blocks) == (1, 1)
    assert seconds > 0


def test_blocks_of_a_batch_are_its_own():
    batch = OpenBatch()
    batch.begin(4)
    batch.done = 3
    assert batch.end(held_since=0.0)[:2] == (3, 4)
    assert batch.end(held_since=0.0)[:2] == (1, 1)


# -- going on within a pass --------------------------------------------------------------------------------------------


class Noted(Dataset):
    """Ten numbers, and which of them were loaded."""

    def __init__(self):
        self.loaded = []

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.loaded.append(index)
        return index


def seeded(seed):
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


def distributed(data, **settings):
    sampler = DistributedSampler(data, num_replicas=2, rank=1, seed=4)
    sampler.set_epoch(7)
    return DataLoader(data, batch_size=2, sampler=sampler, **settings)


LOADERS = {
    "in order": lambda data: DataLoader(data, batch_size=3),
    "shuffled": lambda data: DataLoader(data, batch_size=3, shuffle=True),
    "shuffled by a seed": lambda data: DataLoader(data, batch_size=4, shuffle=True, generator=seeded(5)),
    "with replacement": lambda data: DataLoader(
        data, batch_size=3, sampler=RandomSampler(data, replacement=True, num_samples=40, generator=seeded(6))
    ),
    "weighted": lambda data: DataLoader(data, batch_size=2, sampler=WeightedRandomSampler([1.0] * 10, 10)),
    "a subset": lambda data: DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(range(5), seeded(1))),
    "dealt to ranks": distributed,
    "single samples": lambda data: DataLoader(data, batch_size=None, shuffle=True, generator=seeded(2)),
    "a list": lambda data: [[0, 1], [2, 3], [4]],
}


def numbers(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def taken(source, count):
    found = []
    for _ in range(count):
        found.append(numbers(source.next()))
        source.mark_trained()
    return found


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("trained", [1, 3, 5, 7])
def test_a_resumed_loader_goes_on_with_the_batches_that_were_not_trained_and_loads_no_other(kind, trained):
    """In the first or the second pass, or between them; the batch under way is computed again."""
    torch.manual_seed(trained)
    source = BatchSource(LOADERS[kind](Noted()))
    taken(source, trained)
    state = saved(source.state_dict())
    before = torch.get_rng_state()
    expected = taken(source, 9)
    torch.set_rng_state(before)  # as a script does that goes on exactly; whole passes that come follow from it
    data = Noted()
    source = BatchSource(LOADERS[kind](data), state)
    first = taken(source, 1)
    assert data.loaded == ([] if kind == "a list" else numbers_of(first))
    assert first + taken(source, 8) == expected


@pytest.mark.parametrize("kind", LOADERS)
def test_the_rest_of_a_pass_follows_from_its_state_alone_and_changes_no_other_random_numbers(kind):
    source = BatchSource(LOADERS[kind](Noted()))
    taken(source, 1)
    state, expected = saved(source.state_dict()), taken(source, 2)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert taken(BatchSource(LOADERS[kind](Noted()), state), 2) == expected
    assert torch.equal(torch.get_rng_state(), before)


def numbers_of(batches):
    return [number for batch in batches for number in (batch if isinstance(batch, list) else [batch])]


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("lives_on", [False, True])
def test_a_resumed_loader_with_workers_that_fetch_ahead_skips_what_was_trained_and_no_more(lives_on):
    def loader():
        settings = {"num_workers": 1, "persistent_workers": lives_on, "generator": seeded(3)}
        return DataLoader(range(10), batch_size=2, shuffle=True, **settings)

    source = BatchSource(loader())
    taken(source, 7)
    source.next()  # and not trained
    state = source.state_dict()
    expected = [numbers(source._batches._next_data()) for _ in range(2)]  # the rest of the second pass
    again = BatchSource(loader(), state)
    found = taken(again, 3)
    assert found[1:] == expected
    assert sorted(numbers_of(taken(BatchSource(loader(), state), 8)[3:])) == list(range(10))


def test_a_place_that_cannot_be_found_again_is_said_once_and_the_loader_begins_anew(caplog):
    class Own(Sampler):
        def __iter__(self):
            return iter([3, 1, 2])

        def __len__(self):
            return 3

    source = BatchSource(DataLoader(range(4), sampler=Own()))
    taken(source, 2)
    again = BatchSource(DataLoader(range(4), sampler=Own()), source.state_dict())
    assert taken(again, 4) == [[3], [1], [2], [3]]
    (record,) = caplog.records
    assert "repeats some of the 2 that were trained" in record.getMessage()
    assert "Own may draw another order each time" in record.getMessage()


def test_the_place_in_another_loader_is_refused_with_both_named(caplog):
    source = BatchSource(DataLoader(range(10), batch_size=2))
    taken(source, 2)
    assert taken(BatchSource(DataLoader(range(10), batch_size=5), source.state_dict()), 1) == [[0, 1, 2, 3, 4]]
    (record,) = caplog.records
    assert "of 10 samples in 5 batches; here SequentialSampler of 10 samples in 2 batches" in record.getMessage()


class Stateful:
    """A loader as torchdata's StatefulDataLoader is: it says itself where it stands."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        first, self.place = self.place, 0
        for number in range(first, 4):
            self.place = (number + 1) % 4
            yield [number]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def test_a_loader_with_a_state_of_its_own_is_asked_for_it():
    source = BatchSource(Stateful())
    taken(source, 2)
    state = source.state_dict()
    assert taken(BatchSource(Stateful(), state), 3) == taken(source, 3) == [[2], [3], [0]]


def test_a_loader_that_prunes_goes_on_by_the_state_of_its_sampler():
    """What was observed is in it; a batch that was fetched, and not trained, comes again."""

    def loader():
        return DataLoader(Noted(), batch_sampler=InfoBatch(10, batch_size=2, epochs=5, rank=0, world_size=1))

    def train(source, count):
        found = []
        for _ in range(count):
            batch = source.next()
            source.loader.batch_sampler.observe(batch.float())
            source.mark_trained()
            found.append(batch.tolist())
        return found

    source = BatchSource(loader())
    train(source, 3)
    state = saved(source.state_dict())
    assert train(BatchSource(loader(), state), 6) == train(source, 6)
