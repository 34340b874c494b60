"""What was held back follows its parameter from bucket to bucket."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.codecs import ErrorFeedback, OneBit, PowerSGD, make_codec
from paceline.drivers.ddp import BucketCodecs

SHAPES = {
    "a": torch.Size([4, 3]),
    "b": torch.Size([3]),
    "c": torch.Size([5, 6]),
    "d": torch.Size([]),
    "e": torch.Size([7]),
}


def layouts():
    """Parameters in any order, in buckets of any number."""

    def cut(drawn):
        order, edges = drawn
        edges = [0, *sorted(edges), len(order)]
        return [order[a:b] for a, b in itertools.pairwise(edges) if a < b]

    return st.tuples(st.permutations(sorted(SHAPES)), st.sets(st.integers(1, len(SHAPES) - 1))).map(cut)


def encode(memories, layout, gradients):
    """One step; what was sent of each parameter."""
    sent = {}
    for names in layout:
        codec = memories.codec_of(names, [SHAPES[name] for name in names])
        payload = codec.encode(torch.cat([gradients[name] for name in names]))
        sent |= dict(zip(names, codec.decode(payload).split([SHAPES[name].numel() for name in names]), strict=True))
    return sent


def residuals(memories):
    held = {}
    for bucket in memories.state_dict()["buckets"]:
        sizes = [SHAPES[name].numel() for name in bucket["parameters"]]
        held |= dict(zip(bucket["parameters"], bucket["memory"]["residual"].split(sizes), strict=True))
    return held


@given(st.lists(layouts(), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_whatever_the_buckets_are_what_was_sent_and_what_is_held_back_are_the_gradients(steps, seed):
    memories, draws = BucketCodecs(ErrorFeedback(OneBit())), torch.Generator().manual_seed(seed)
    total, sent = ({name: torch.zeros(shape.numel()) for name, shape in SHAPES.items()} for _ in range(2))
    for layout in steps:
        gradients = {name: torch.randn(shape.numel(), generator=draws) for name, shape in SHAPES.items()}
        for name, part in encode(memories, layout, gradients).items():
            total[name] += gradients[name]
            sent[name] += part
    for name, residual in residuals(memories).items():
        torch.testing.assert_close(sent[name] + residual, total[name])


def test_a_bucket_that_stays_keeps_all_it_remembers():
    memories = BucketCodecs(ErrorFeedback(PowerSGD(rank=1)))
    first = memories.codec_of(["a", "b"], [SHAPES["a"], SHAPES["b"]])
    memories.codec_of(["c"], [SHAPES["c"]])
    assert memories.codec_of(["a", "b"], [SHAPES["a"], SHAPES["b"]]) is first
    memories.codec_of(["c", "d"], [SHAPES["c"], SHAPES["d"]])
    assert memories.codec_of(["a", "b"], [SHAPES["a"], SHAPES["b"]]) is first


def test_a_state_goes_on_in_other_buckets():
    """A run that is resumed begins with DDP's first buckets, and the checkpoint has the later ones."""
    memories = BucketCodecs(ErrorFeedback(OneBit()))
    gradients = {name: torch.randn(shape.numel()) for name, shape in SHAPES.items()}
    sent = encode(memories, [["a", "b"], ["c", "d", "e"]], gradients)
    resumed = BucketCodecs(ErrorFeedback(OneBit()))
    resumed.load_state_dict(memories.state_dict(), SHAPES)
    assert residuals(resumed).keys() == SHAPES.keys()
    nothing = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    sent_later = encode(resumed, [["e", "c"], ["b", "d", "a"]], nothing)
    for name, residual in residuals(resumed).items():
        torch.testing.assert_close(sent[name] + sent_later[name] + residual, gradients[name])


@pytest.mark.parametrize("name", ["qsgd", "identity"])
def test_codecs_without_a_memory_have_nothing_to_carry(name):
    memories = BucketCodecs(make_codec(name))
    gradients = {name: torch.randn(shape.numel()) for name, shape in SHAPES.items()}
    encode(memories, [["a", "b"], ["c", "d", "e"]], gradients)
    encode(memories, [["e", "b"], ["c", "d", "a"]], gradients)
    state = memories.state_dict()
    assert [bucket["memory"] for bucket in state["buckets"]] == [{}, {}]
    assert state["carried"] == {}
