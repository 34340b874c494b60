"""What all our batch samplers have in common: where torch's loaders take them, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import HashStore
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import paceline
from paceline.drivers.rounds.sampler import SampleCounter, TakenBatches

DATA = TensorDataset(torch.arange(20))


def balance():
    return paceline.Balance(torch.nn.Linear(1, 1), batch_size=4)


SAMPLERS = {
    "fine-pruning": lambda data=DATA: paceline.FinePruning(data, batch_size=4),
    "info-batch": lambda data=DATA: paceline.InfoBatch(data, batch_size=4),
    "balance": lambda data=DATA: balance().sampler(data),
    "balanced pruning": lambda data=DATA: balance().sampler(paceline.InfoBatch(data, batch_size=4)),
    "rounds": lambda data=DATA: TakenBatches(data, SampleCounter(HashStore()), lambda: 4, whole=4),
}
every = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from range(20)


class LongStream(Stream):
    def __len__(self):
        return 20


@every
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("settings", [{}, {"batch_size": 4, "drop_last": True}], ids=["alone", "with batch_size"])
def test_a_batch_sampler_in_the_place_of_a_sampler_is_refused_with_the_line_to_write(make, workers, settings):
    loader = DataLoader(DATA, sampler=make(), num_workers=workers, **settings)
    with pytest.raises(TypeError, match=r"makes whole batches.*DataLoader\(dataset, batch_sampler=\.\.\.\)"):
        next(iter(loader))


@every
def test_batches_that_others_ask_for_are_given(make):
    """As batch_sampler, to wrappers of batch samplers (accelerate's), and to loaders that collate nothing."""

    class Wrapper(BatchSampler):
        def __init__(self, sampler):
            self.batch_sampler, self.batch_size = sampler, 4

        def __iter__(self):
            yield from self.batch_sampler

    for loader in (
        DataLoader(DATA, batch_sampler=make()),
        DataLoader(DATA, batch_sampler=Wrapper(make())),
        DataLoader(DATA, sampler=make(), batch_size=None),
    ):
        (numbers,) = next(iter(loader))
        assert len(numbers) == 4


@every
def test_data_without_numbers_of_samples_and_loaders_are_refused(make):
    for stream in (Stream(), LongStream()):
        with pytest.raises(TypeError, match="hands out numbers of samples, and an IterableDataset has none"):
            make(stream)
    with pytest.raises(TypeError, match="the data set, not a loader of it"):
        make(DataLoader(DATA))
    with pytest.raises(TypeError, match=r"a data set with a length, or a number of samples \(this is a object\)"):
        make(object())


@every
def test_the_line_that_the_pages_show_in_place_of_a_distributed_samplers_is_taken(make):
    loader = DataLoader(DATA, batch_sampler=make())
    loader.batch_sampler.set_epoch(0)
    assert sum(len(numbers) for (numbers,) in loader) == 20
