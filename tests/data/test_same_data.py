"""Processes that load a data set by its name have the same: what factories draw is seeded, and what differs is told."""

from __future__ import annotations

import json
import random
import threading

import numpy as np
import pytest
import sklearn.model_selection
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.own import dataset_of
from paceline.data.reading import DatasetError
from paceline.data.samples import Dataset, Samples
from paceline.data.sketch import data_difference, refusal, sketch_of
from paceline.decoding import parse_object
from paceline.distributed.stores import StoreGather
from paceline.models import seeded
from paceline.runs.ranks import agree_on_data

X, Y = np.random.default_rng(5).normal(size=(60, 4)).astype(np.float32), np.arange(60) % 5


def by_sklearn():
    x, tx, y, ty = sklearn.model_selection.train_test_split(X, Y, test_size=20)
    return (x, y), (tx, ty)


def by_random():
    order = list(range(60))
    random.shuffle(order)
    return (X[order[:40]], Y[order[:40]]), (X[order[40:]], Y[order[40:]])


def by_numpy():
    order = np.random.permutation(60)
    return (X[order[:40]], Y[order[:40]]), (X[order[40:]], Y[order[40:]])


def by_torch():
    order = torch.randperm(60)
    return (X[order[:40]], Y[order[:40]]), (X[order[40:]], Y[order[40:]])


SPLITS = (by_sklearn, by_random, by_numpy, by_torch)


def state_of_generators():
    kind, words, *place = np.random.get_state()
    return random.getstate(), kind, words.tolist(), place, torch.random.get_rng_state().tolist()


@pytest.mark.parametrize("factory", SPLITS)
def test_a_split_is_that_of_the_seed_whatever_was_drawn_before(factory):
    found = []
    for drawn in (3, 8):
        np.random.seed(drawn)
        random.seed(drawn)
        torch.manual_seed(drawn)
        before = state_of_generators()
        found.append([dataset_of(factory, "script:split", seed=seed).test.targets for seed in (0, 1)])
        assert state_of_generators() == before
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][0], found[0][1])


@pytest.mark.parametrize("draw", [np.random.rand, random.random, lambda: float(torch.rand(()))])
def test_what_a_transform_or_a_model_draws_is_that_of_the_seed(draw):
    class Drawing(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return torch.tensor([draw()]), index % 2

    samples = dataset_of((Drawing(), Drawing()), "script:Drawing").train
    first, again, other = (samples.take(torch.tensor([1, 2]), seed=seed)[0] for seed in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    drawn = []
    for _ in range(2):
        with seeded(3):
            drawn.append(draw())
    assert drawn[0] == drawn[1]


def test_generators_are_as_they_were_also_after_an_error():
    before = state_of_generators()

    def failing():
        by_sklearn()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        dataset_of(failing, "script:failing")
    assert state_of_generators() == before


# -- sketches ----------------------------------------------------------------------------------------------------------


def data(train, test, dtype=None):
    parts = (torch.tensor(part, dtype=dtype) for part in (train, test))
    parts = [Samples(inputs=torch.zeros(len(part), 2), targets=part) for part in parts]
    return Dataset(name="ours", train=parts[0], test=parts[1], classes=5)


def sent(dataset):
    """A sketch as another process receives it."""
    return parse_object(json.dumps(sketch_of(dataset), allow_nan=False).encode())


@given(st.lists(st.integers(0, 4), min_size=2, max_size=200), st.data())
def test_another_number_or_another_target_among_a_few_hundred_is_told(targets, picked):
    ours = data(targets, targets)
    assert data_difference(sketch_of(ours), sent(data(targets, targets)), there="on the server") == ""
    place = picked.draw(st.integers(0, len(targets) - 1))
    changed = [*targets[:place], targets[place] + 1, *targets[place + 1 :]]
    for other in (
        data(changed, targets),
        data(targets, changed),
        data(targets, targets[1:]),
        data(targets * 2, targets),
    ):
        assert "on the server" in data_difference(sketch_of(ours), sent(other), there="on the server")


def test_numbers_may_differ_as_machines_do_and_not_as_data_do():
    values = np.random.default_rng(0).normal(size=500)
    ours = data(values, values, torch.float32)
    nearly = data(values * (1 + 1e-7), values * (1 - 1e-7), torch.float32)
    assert data_difference(sketch_of(ours), sent(nearly), there="there") == ""
    assert data_difference(sketch_of(ours), sent(data(values, np.roll(values, 1), torch.float32)), there="there")
    holes = np.where(values > 1, np.nan, values)
    assert data_difference(sketch_of(data(holes, holes)), sent(data(holes, holes)), there="there") == ""
    assert "not finite" in data_difference(sketch_of(data(holes, holes)), sent(data(values, values)), there="there")


def test_sequences_that_begin_alike_differ_further_on():
    ours, theirs = torch.zeros(40, 8, dtype=torch.int64), torch.zeros(40, 8, dtype=torch.int64)
    ours[:, 1:], theirs[:, 1:] = 3, 4
    assert data_difference(
        sketch_of(data(ours.tolist(), ours.tolist())), sent(data(theirs.tolist(), theirs.tolist())), there="there"
    )


class Counting(torch.utils.data.Dataset):
    """A billion samples, each of which is made when it is read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 10**9

    def __getitem__(self, index):
        self.read.append(index)
        return torch.zeros(1), index % 10


def test_a_sketch_costs_the_same_for_a_billion_samples():
    billion = torch.zeros(1, dtype=torch.int64).expand(10**9)
    held = Samples(inputs=billion, targets=billion)
    assert sketch_of(Dataset(name="held", train=held, test=held, classes=2))["test"]["samples"] == 10**9
    train, test = Counting(), Counting()
    loaded = dataset_of((train, test), "script:Counting")
    train.read.clear(), test.read.clear()
    assert len(sketch_of(loaded)["test"]["targets"]) == len(test.read) == 16
    assert train.read == []


def test_a_difference_is_one_sentence_with_what_to_do():
    ours, theirs = data([0, 1, 2], [0, 1, 1, 0]), data([0, 1, 2], [0, 2, 1, 0])
    said = refusal("my_data:load", data_difference(sketch_of(ours), sent(theirs), there="on the server"))
    beginning = "data set 'my_data:load' has other targets in 1 of 4 test samples that were compared, "
    assert said.startswith(beginning + "such as 1 here, and 2 on the server: every process must load the same; ")
    assert "random_state=seed" in said
    assert len(said.splitlines()) == 1


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("differing", [None, 0, 1, 2])
def test_ranks_with_other_data_all_raise_one_error(differing):
    store, said = dist.HashStore(), {}

    def be(rank):
        theirs = [0, 1, 2, 3] if rank != differing else [3, 2, 1, 0]
        gather = StoreGather(store, rank, 3, timeout_seconds=20.0)
        try:
            agree_on_data(data(theirs, theirs), gather)
            said[rank] = ""
        except DatasetError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(said) == 3
    assert len(set(said.values())) == 1
    if differing is None:
        assert said[0] == ""
    else:
        assert f"on rank {differing or 1}, and" in said[0]


def test_a_hostile_sketch_is_refused():
    part = {"samples": 3, "targets": [1.0]}
    for bad in (
        {},
        {"train": part},
        {"train": part, "test": {**part, "samples": -1}},
        {"train": part, "test": {**part, "targets": ["x"]}},
    ):
        with pytest.raises(ValueError):
            data_difference(sketch_of(data([1], [1])), bad, there="there")
