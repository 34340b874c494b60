"""Batch orders: every sample equally often, independent of others, and resumed exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import BatchOrder

orders = st.fixed_dictionaries(
    {
        "shard": st.integers(1, 40).map(lambda n: torch.arange(n) * 3 + 100),
        "batch_size": st.integers(1, 60),
        "seed": st.integers(0, 2**40),
        "worker": st.integers(0, 5000),
    }
)


@settings(deadline=None)
@given(orders, st.integers(1, 5))
def test_over_m_passes_every_sample_comes_m_times(settings_, passes):
    order, size = BatchOrder(**settings_), len(settings_["shard"])
    batches: list[int] = []
    while len(batches) < passes * size:
        batch = order.next()
        assert batch.shape == (settings_["batch_size"],)
        batches += batch.tolist()
    for start in range(0, passes * size, size):  # each pass on its own, and so any m of them together
        assert sorted(batches[start : start + size]) == settings_["shard"].tolist()


@settings(deadline=None)
@given(orders, st.integers(0, 12), st.integers(1, 8))
def test_a_resumed_order_goes_on_as_if_nothing_had_happened(settings_, before, after):
    order = BatchOrder(**settings_)
    for _ in range(before):
        order.next()
    resumed = BatchOrder(**settings_)
    resumed.load_state_dict(order.state_dict())
    assert resumed.state_dict() == order.state_dict()
    for _ in range(after):
        assert torch.equal(order.next(), resumed.next())


def test_passes_workers_and_seeds_differ():
    def first(**changes):
        return BatchOrder(torch.arange(50), 50, **{"seed": 0, "worker": 0, **changes})

    order = first()
    passes = [order.next().tolist(), order.next().tolist()]
    orders = [*passes, first(worker=1).next().tolist(), first(seed=1).next().tolist()]
    assert len({tuple(one) for one in orders}) == 4


def test_the_order_does_not_depend_on_the_batch_size():
    small, large = (BatchOrder(torch.arange(12), size, seed=3, worker=1) for size in (2, 6))
    assert torch.cat([small.next() for _ in range(12)]).tolist() == torch.cat([large.next() for _ in range(4)]).tolist()


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = BatchOrder(torch.arange(9), 4, seed=0, worker=0).next()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(BatchOrder(torch.arange(9), 4, seed=0, worker=0).next(), first)


def test_it_is_an_endless_iterator():
    order = BatchOrder(torch.arange(3), 2, seed=0, worker=0)
    assert [len(batch) for batch, _ in zip(order, range(10), strict=False)] == [2] * 10


@pytest.mark.parametrize(
    ("shard", "batch_size", "worker", "says"),
    [
        (torch.arange(0), 1, 0, "at least one sample"),
        (torch.zeros(2, 2, dtype=torch.int64), 1, 0, "shape=\\(2, 2\\)"),
        (torch.zeros(2), 1, 0, "float32"),
        (torch.arange(2), 0, 0, "batch_size=0"),
        (torch.arange(2), 1, -1, "worker=-1"),
    ],
)
def test_bad_settings_are_refused(shard, batch_size, worker, says):
    with pytest.raises(ValueError, match=says):
        BatchOrder(shard, batch_size, seed=0, worker=worker)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, "passes and position"),
        ({"passes": -1, "position": 0}, "passes=-1"),
        ({"passes": 0, "position": 3}, "position=3, samples=3"),
        ({"passes": 0, "position": -1}, "position=-1"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(state, says):
    order = BatchOrder(torch.arange(3), 1, seed=0, worker=0)
    with pytest.raises(ValueError, match=says):
        order.load_state_dict(state)
    assert order.state_dict() == {"passes": 0, "position": 0}
