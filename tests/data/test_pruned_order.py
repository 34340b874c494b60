"""A pruned order is the plain order without those who sit out, and depends on one worker's draws and losses alone."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from paceline.data import BatchOrder
from paceline.data.pruning import PRUNINGS, PruningSettings
from paceline.data.pruning.order import PrunedOrder
from paceline.training.plain import with_tensors, without_tensors

BUSY = {"window": 50, "starting_point": 0, "block": 1, "count": 1}  # prunes in every pass but the first
NOTHING = [
    PruningSettings(name="fine-pruning", prune=0.0, **BUSY),
    PruningSettings(name="info-batch", ratio=0.0),
]
SOME = [
    PruningSettings(name="fine-pruning", prune=0.4, **BUSY),
    PruningSettings(name="info-batch"),
]
samples = st.integers(1, 20)
batch_sizes = st.integers(1, 24)
every = pytest.mark.parametrize("settings", SOME, ids=[settings.name for settings in SOME])


def order_of(settings, samples, batch_size, *, worker=2, draws=1000, first_draw=0):
    shard = torch.arange(100, 100 + samples)
    return PrunedOrder(shard, batch_size, settings, seed=7, worker=worker, draws=draws, first_draw=first_draw)


def losses_of(indices, draw=0):
    """Losses that follow from the sample, and move a little."""
    return ((indices.numpy() * 37 + draw * 11) % 97).astype(np.float32)


def play(order, batches):
    """Draw and judge; what came."""
    found = []
    for _ in range(batches):
        batch = order.next()
        order.judge(losses_of(batch.indices, order.draw))
        found.append(batch)
    return found


def test_every_policy_is_tried_here():
    assert {settings.name for settings in SOME} == {settings.name for settings in NOTHING} == set(PRUNINGS)


@pytest.mark.parametrize("settings", NOTHING, ids=[settings.name for settings in NOTHING])
@examples(max_examples=20)
@given(samples=samples, batch_size=batch_sizes)
def test_where_nobody_sits_out_it_is_the_plain_order(settings, samples, batch_size):
    plain = BatchOrder(torch.arange(100, 100 + samples), batch_size, seed=7, worker=2)
    for batch in play(order_of(settings, samples, batch_size), 12):
        assert batch.weights is None
        assert torch.equal(batch.indices, plain.next())


@every
@examples(max_examples=20)
@given(samples=samples, batch_size=batch_sizes, batches=st.integers(1, 20))
def test_nobody_is_lost_in_whole_passes_everybody_came_or_sat_out(settings, samples, batch_size, batches):
    order = order_of(settings, samples, batch_size)
    found = play(order, batches)
    assert all(len(batch.indices) == batch_size for batch in found)
    came = Counter(torch.cat([batch.indices for batch in found]).tolist())
    open_pass = Counter() if order._pass is None else Counter((100 + order._pass[: order._position]).tolist())
    for position, sat_out in enumerate(order.policy.times_pruned.tolist()):
        assert came[100 + position] - open_pass[100 + position] + sat_out == order.whole_passes
    assert order.sat_out == int(order.policy.times_pruned.sum())


@every
def test_somebody_sits_out_and_runs_are_the_same_again(settings):
    first, second = order_of(settings, 30, 7), order_of(settings, 30, 7)
    for one, other in zip(play(first, 40), play(second, 40), strict=True):
        assert torch.equal(one.indices, other.indices)
    assert first.sat_out > 0.1 * 30 * first.whole_passes


@every
@examples(max_examples=20)
@given(before=st.integers(0, 15), batch_size=batch_sizes, between=st.booleans())
def test_a_state_that_was_written_down_goes_on_exactly(settings, before, batch_size, between):
    """Also one that was taken between a batch and its losses."""
    order, again = order_of(settings, 20, batch_size), order_of(settings, 20, batch_size)
    play(order, before)
    drawn = order.next() if between else None
    tensors = {}
    plain = json.loads(json.dumps(without_tensors(order.state_dict(), "order", tensors)))
    again.load_state_dict(with_tensors(plain, {name: tensor.clone() for name, tensor in tensors.items()}))
    for each in (order, again):
        if drawn is not None:
            each.judge(losses_of(drawn.indices))
    for one, other in zip(play(order, 8), play(again, 8), strict=True):
        assert torch.equal(one.indices, other.indices)
        assert (one.weights is None) == (other.weights is None)
        assert one.weights is None or torch.equal(one.weights, other.weights)
    assert np.array_equal(order.policy.times_pruned, again.policy.times_pruned)


@every
def test_a_state_of_another_shard_or_a_damaged_one_is_refused(settings):
    order = order_of(settings, 20, 8)
    play(order, 9)
    with pytest.raises(ValueError, match="21"):
        order_of(settings, 21, 8).load_state_dict(order.state_dict())
    with pytest.raises(ValueError, match="position=99"):
        order_of(settings, 20, 8).load_state_dict(order.state_dict() | {"position": 99})


@every
@pytest.mark.parametrize(
    "damage",
    [
        {"position": 99},
        {"weight": -1.0},
        {"open": torch.tensor([20])},
        {"draw": -1},
        {"sat_out": 0.5},
        {"keep": torch.ones(19, dtype=torch.bool)},
        {"heavier": torch.ones(19, dtype=torch.bool)},
        {"policy": {"samples": 20, "times_pruned": torch.zeros(19)}},
    ],
    ids=lambda damage: next(iter(damage)),
)
def test_a_state_that_is_refused_changes_nothing(settings, damage):
    order, calm, other = (order_of(settings, 20, 8) for _ in range(3))
    play(other, 12)
    play(order, 5), play(calm, 5)
    with pytest.raises((ValueError, KeyError)):
        order.load_state_dict(other.state_dict() | damage)
    for one, same in zip(play(order, 8), play(calm, 8), strict=True):
        assert torch.equal(one.indices, same.indices)
    assert all(
        np.array_equal(value, calm.policy.state_dict()[name]) for name, value in order.policy.state_dict().items()
    )


class Spy:
    """A policy that keeps everybody and writes down what it is told."""

    def __init__(self, policy):
        self._policy, self.asked, self.told = policy, [], []

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def decide(self, epoch, progress=0.0):
        self.asked.append((epoch, progress))
        return self._policy.decide(epoch, progress)

    def judge(self, epoch, samples, losses, ends):
        self.told.append((epoch, samples.tolist(), losses.tolist(), ends.tolist()))


def test_a_batch_is_judged_as_one_of_the_epoch_in_which_it_began_by_the_losses_that_are_there():
    order = order_of(NOTHING[0], 5, 3, draws=4)
    spy = order.policy = Spy(order.policy)
    seen = []
    for losses in ([1, 2, 3], [4, 5, 6], [7], [8, np.nan, np.inf], [np.nan] * 3, [9, 9, 9]):
        seen.append((order.next().indices - 100).tolist())
        order.judge(np.array(losses, np.float32))
    assert [(epoch, numbers, ends) for epoch, _, numbers, ends in spy.told] == [
        (1, [1, 2, 3], [3]),
        (1, [4, 5, 6], [3]),  # its last sample is of epoch 2
        (2, [7], [1]),  # of three samples one was done
        (2, [8], [1]),
        (4, [9, 9, 9], [3]),  # nothing is known of the batch before
    ]
    assert [who for _, who, _, _ in spy.told] == [seen[0], seen[1], seen[2][:1], seen[3][:1], seen[5]]
    assert spy.asked == [(1, 0.0), (2, 0.25), (3, 0.75), (4, 1.0)]  # of 4 draws; then it stays at 1


def test_whoever_begins_later_begins_at_a_fresh_pass_that_follows_from_the_draw():
    late = order_of(SOME[0], 10, 4, first_draw=8)  # 32 samples before: in the fourth pass
    plain = BatchOrder(torch.arange(100, 110), 4, seed=7, worker=2)
    plain.load_state_dict({"passes": 3, "position": 0})
    spy = late.policy = Spy(late.policy)
    assert torch.equal(late.next().indices, plain.next())
    assert spy.asked == [(4, 8 / 1000)]


def test_losses_that_nobody_waits_for_are_refused():
    order = order_of(SOME[0], 10, 4)
    with pytest.raises(ValueError, match="4 losses, and 0 samples"):
        order.judge(np.ones(4, np.float32))
    order.next()
    with pytest.raises(ValueError, match="5 losses, and 4 samples"):
        order.judge(np.ones(5, np.float32))


@pytest.mark.parametrize(("name", "value"), [("draws", 0), ("worker", -1), ("first_draw", -1)])
def test_numbers_that_cannot_be_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name} must be at least .* \({name}={value}\)"):
        order_of(SOME[0], 10, 4, **{name: value})
