"""A worker's batches follow from the seed, the worker and the draw alone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import BatchOrder, split
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data, make_training
from paceline.training import Batches

WORKERS = 4


@pytest.fixture(scope="module")
def training():
    recipe = Recipe().with_settings(cluster={"workers": WORKERS}, strategy={"k": 2}, data={"split": "iid"})
    return make_training(recipe, load_data(recipe))


def test_a_workers_batches_do_not_depend_on_how_many_workers_there_are(training):
    shards = split(training.dataset.train.targets, workers=WORKERS, kind="iid", seed=0)
    alone, among = (Batches(replace(training, shards=shards[: 1 + others])) for others in (0, 3))
    for draw in range(3):
        pair = [batches.assignment(worker=0, draw=draw).inputs for batches in (alone, among)]
        assert torch.equal(*pair)


@given(draws=st.lists(st.integers(0, 40), min_size=1, max_size=8), worker=st.integers(0, WORKERS - 1))
def test_batches_in_any_order_are_those_of_the_plain_order(training, draws, worker):
    order = BatchOrder(training.shards[worker], training.batch_size, seed=training.seed, worker=worker)
    plain = [training.dataset.train.inputs[order.next()] for _ in range(41)]
    batches = Batches(training)
    for draw in draws:
        assert torch.equal(batches.assignment(worker=worker, draw=draw).inputs, plain[draw])


def test_an_extra_worker_draws_from_the_shard_it_is_given_in_an_order_of_its_own(training):
    batches = Batches(training)
    own = batches.assignment(worker=1, draw=0)
    shared = batches.assignment(worker=WORKERS, shard=1, draw=0)
    assert not torch.equal(own.inputs, shared.inputs)
    held = training.dataset.train.inputs[training.shards[1]].flatten(1)
    assert all(bool((held == sample).all(1).any()) for sample in shared.inputs.flatten(1))
