"""The model on its way to workers: whoever follows the changes, or gets the whole, holds the same, and keeps up."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codecs.naming import decoder_of, parse_codec
from paceline.training.outgoing import FINE, OutgoingModel

CODECS = ["identity", "bfloat16", "one-bit", "qsgd levels=7", "qsgd levels=1", "top-k fraction=0.1", "sparsifier"]
CODECS += ["power-sgd rank=1", "one-bit error-feedback", "qsgd levels=7 lossless=entropy"]
ELEMENTS = 600


class Follower:
    """A worker as far as its model is concerned: it takes the whole, or changes in order."""

    def __init__(self):
        self.held, self.version = None, None

    def catch_up(self, outgoing, version):
        changes = outgoing.changes_since(self.version) if self.version is not None else []
        if changes:
            for number, payload in changes:
                assert number == self.version + 1
                self.held, self.version = self.held + decoder_of(payload).decode(payload), number
        else:
            self.held, self.version = outgoing.whole_codec.decode(outgoing.whole()).clone(), version
        return sum(payload.numel() for _, payload in changes)


def walk(codec, steps, *, seed=0, size=0.1):
    """The parameters of a made-up training, and what goes out of them, version by version."""
    generator = torch.Generator().manual_seed(seed)
    parameters = torch.randn(ELEMENTS, generator=generator)
    outgoing = OutgoingModel(codec, parameters, [torch.Size([20, 25]), torch.Size([100])], seed=seed)
    yield 0, parameters, outgoing
    for version in range(1, steps + 1):
        parameters += size / version * torch.randn(ELEMENTS, generator=generator)
        outgoing.advance(version)
        yield version, parameters, outgoing


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=10)
@given(steps=st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_every_worker_holds_the_same_whichever_way_it_got_there(name, steps, seed):
    codec = parse_codec(name)
    followers = [Follower() for _ in range(4)]
    for (version, _, outgoing), who in zip(walk(codec, len(steps), seed=seed), [{0, 1, 2, 3}, *steps], strict=True):
        for number in who:
            sent = followers[number].catch_up(outgoing, version)
            assert torch.equal(followers[number].held, outgoing.held)
            assert sent < outgoing.whole_bytes


@pytest.mark.parametrize("name", CODECS)
def test_workers_are_never_farther_behind_than_one_change(name):
    """A change brings them nearer by half at the least, so what they lack never adds up to more than the last ones."""
    last = None
    for _, parameters, outgoing in walk(parse_codec(name), 60):
        if last is not None and not outgoing.whole_codec.suits_parameters:
            before, behind = last
            moved = torch.linalg.vector_norm(parameters - before)
            now = torch.linalg.vector_norm(parameters - outgoing.held)
            assert now <= 0.5 * (moved + behind) * (1 + 1e-5)
        last = parameters.clone(), torch.linalg.vector_norm(parameters - outgoing.held)


def test_a_codec_that_is_too_rough_for_the_model_leaves_changes_to_a_finer_one():
    for name, own in (("qsgd levels=7", True), ("sparsifier", False), ("one-bit", False), ("qsgd levels=1", False)):
        codec = parse_codec(name)
        sizes = [outgoing.changes_since(v - 1)[0][1].numel() for v, _, outgoing in walk(codec, 9) if v]
        assert sizes == [(codec if own else FINE).most_bytes(ELEMENTS)] * 9, name


@pytest.mark.parametrize("name", CODECS)
def test_it_goes_on_from_its_state_as_if_nothing_had_happened(name):
    codec = parse_codec(name)
    steps = walk(codec, 6)
    version, parameters, outgoing = next(itertools.islice(steps, 3, None))
    again = OutgoingModel(codec, parameters.clone(), [torch.Size([20, 25]), torch.Size([100])])
    copy = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in outgoing.state_dict().items()}
    again.load_state_dict(copy, version)
    assert not again.changes_since(version - 1), "whoever comes now gets the whole"
    for version, parameters, outgoing in steps:
        again._parameters.copy_(parameters)
        again.advance(version)
        assert torch.equal(again.held, outgoing.held)


def test_a_change_that_is_not_finite_goes_as_the_whole():
    parameters = torch.full((4,), 3e38)
    outgoing = OutgoingModel(parse_codec("qsgd"), parameters, [parameters.shape])
    parameters.neg_()
    outgoing.advance(1)
    assert torch.equal(outgoing.held, parameters)
    assert not outgoing.changes_since(0)
