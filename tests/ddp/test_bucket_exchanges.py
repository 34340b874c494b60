"""What was held back follows its parameter from bucket to bucket, on every rank and by every plan."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.codecs import ErrorFeedback, OneBit, PowerSGD, make_codec
from paceline.drivers.ddp import BucketExchanges
from paceline.exchanges.lockstep import run_in_lockstep

SHAPES = {
    "a": torch.Size([4, 300]),
    "b": torch.Size([3]),
    "c": torch.Size([5, 600]),
    "d": torch.Size([]),
    "e": torch.Size([700]),
}
PLANS = ("gather", "two-step")


def layouts():
    """Parameters in any order, in buckets of any number."""

    def cut(drawn):
        order, edges = drawn
        edges = [0, *sorted(edges), len(order)]
        return [order[a:b] for a, b in itertools.pairwise(edges) if a < b]

    return st.tuples(st.permutations(sorted(SHAPES)), st.sets(st.integers(1, len(SHAPES) - 1))).map(cut)


def ranks_of(codec, plan, world):
    return [BucketExchanges(codec, plan, place, world) for place in range(world)]


def draw(world, seed=0):
    """Every rank's gradient of every parameter."""
    draws = torch.Generator().manual_seed(seed)
    return [{name: torch.randn(shape.numel(), generator=draws) for name, shape in SHAPES.items()} for _ in range(world)]


def step(ranks, layout, gradients):
    """One step of all ranks; the sum of each parameter that all come to."""
    sums = {}
    for names in layout:
        shapes, lengths = [SHAPES[name] for name in names], [SHAPES[name].numel() for name in names]
        vectors = [torch.cat([ours[name] for name in names]) for ours in gradients]
        runs = [rank.exchange_of(names, shapes).run(vector) for rank, vector in zip(ranks, vectors, strict=True)]
        first, *others = run_in_lockstep(runs)
        assert all(torch.equal(first, other) for other in others)
        sums |= dict(zip(names, first.split(lengths), strict=True))
    return sums


def held(ranks, name):
    """What all ranks hold back of a parameter."""
    total = torch.zeros(SHAPES[name].numel())
    for rank in ranks:
        total += rank._carried.get(name, 0)
        for key, exchange in rank._exchanges.items():
            if name in key and exchange.held() is not None:
                total += dict(zip(key, exchange.held().split([rank._sizes[each] for each in key]), strict=True))[name]
    return total


@given(
    st.lists(layouts(), min_size=1, max_size=4), st.integers(0, 2**32 - 1), st.integers(1, 4), st.sampled_from(PLANS)
)
def test_whatever_the_buckets_are_what_was_summed_and_what_is_held_back_are_the_gradients(layouts, seed, world, plan):
    ranks = ranks_of(ErrorFeedback(OneBit()), plan, world)
    total, summed = ({name: torch.zeros(shape.numel()) for name, shape in SHAPES.items()} for _ in range(2))
    for number, layout in enumerate(layouts):
        gradients = draw(world, seed + number)
        for name, part in step(ranks, layout, gradients).items():
            total[name] += sum(ours[name] for ours in gradients)
            summed[name] += part
    for name in SHAPES:
        torch.testing.assert_close(summed[name] + held(ranks, name), total[name], rtol=1e-5, atol=2e-5)


def test_a_bucket_that_stays_keeps_all_it_remembers():
    (rank,) = ranks_of(ErrorFeedback(PowerSGD(rank=1)), "gather", 1)
    first = rank.exchange_of(["a", "b"], [SHAPES["a"], SHAPES["b"]])
    rank.exchange_of(["c"], [SHAPES["c"]])
    assert rank.exchange_of(["a", "b"], [SHAPES["a"], SHAPES["b"]]) is first
    rank.exchange_of(["c", "d"], [SHAPES["c"], SHAPES["d"]])
    assert rank.exchange_of(["a", "b"], [SHAPES["a"], SHAPES["b"]]) is first


@pytest.mark.parametrize(("before", "after"), itertools.product(PLANS, PLANS))
def test_a_state_goes_on_in_other_buckets_and_by_another_plan(before, after):
    """A run that is resumed begins with DDP's first buckets, and the checkpoint has the later ones."""
    codec, gradients = ErrorFeedback(OneBit()), draw(3)
    ranks, resumed = ranks_of(codec, before, 3), ranks_of(codec, after, 3)
    summed = step(ranks, [["a", "b"], ["c", "d", "e"]], gradients)
    for ours, theirs in zip(resumed, ranks, strict=True):
        ours.load_state_dict(theirs.state_dict(), SHAPES)
    for name in SHAPES:
        torch.testing.assert_close(held(resumed, name), held(ranks, name))
    nothing = [{name: torch.zeros_like(part) for name, part in ours.items()} for ours in gradients]
    later = step(resumed, [["e", "c"], ["b", "d", "a"]], nothing)
    for name in SHAPES:
        wanted = sum(ours[name] for ours in gradients)
        torch.testing.assert_close(summed[name] + later[name] + held(resumed, name), wanted, rtol=1e-5, atol=1e-5)


def test_a_state_of_the_last_release_says_no_plan_and_was_gathered():
    ranks, gradients = ranks_of(ErrorFeedback(OneBit()), "gather", 2), draw(2)
    step(ranks, [["a", "b", "c", "d", "e"]], gradients)
    state = ranks[0].state_dict()
    for bucket in state["buckets"]:
        del bucket["plan"]
    (again,) = ranks_of(ErrorFeedback(OneBit()), "two-step", 2)[:1]
    again.load_state_dict(state, SHAPES)
    for name in SHAPES:
        torch.testing.assert_close(held([again], name), held(ranks[:1], name))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["qsgd", "identity"])
def test_codecs_without_a_memory_have_nothing_to_carry(name, plan):
    ranks, gradients = ranks_of(make_codec(name), plan, 2), draw(2)
    step(ranks, [["a", "b"], ["c", "d", "e"]], gradients)
    step(ranks, [["e", "b"], ["c", "d", "a"]], gradients)
    state = ranks[0].state_dict()
    assert [bucket["memory"] for bucket in state["buckets"]] == [{}, {}]
    assert state["carried"] == {}
