"""Nothing is lost for ever: what was sent and what is left add up to what was given."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.codecs import CODECS, QSGD, ErrorFeedback, Identity, NotFiniteError, OneBit, PowerSGD, TopK, make_codec

BIASED = [name for name in CODECS if make_codec(name).biased]
SHAPES = [torch.Size([10, 12]), torch.Size([10])]
ELEMENTS = 130


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def wrapped(name):
    return ErrorFeedback(make_codec(name)).fresh(SHAPES)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e20]))
def test_sent_and_residual_add_up_to_gradient_and_old_residual(name, seed, scale):
    codec, generator = wrapped(name), seeded(seed)
    assume(name != "float16" or scale <= 1)  # beyond its range
    old = torch.zeros(ELEMENTS)
    for _ in range(4):
        gradient = torch.randn(ELEMENTS, generator=generator) * scale
        sent = codec.decode(codec.encode(gradient, generator))
        size = torch.stack([part.abs().max() for part in (gradient, old, sent)]).max()
        assert (sent + codec.residual - gradient - old).abs().max() <= 4e-7 * size
        old = codec.residual


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_identity_leaves_nothing(seed):
    codec = ErrorFeedback(Identity())
    for _ in range(3):
        gradient = torch.randn(5, generator=seeded(seed))
        assert torch.equal(codec.decode(codec.encode(gradient)), gradient)
        assert not codec.residual.any()


@pytest.mark.parametrize("name", BIASED)
def test_the_mean_of_a_biased_codec_nears_a_constant_gradient_as_one_over_t(name):
    gradient, codec, bare = torch.randn(ELEMENTS, generator=seeded(1)), wrapped(name), make_codec(name).fresh(SHAPES)
    total, total_bare, generator = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS), seeded(2)
    off = {}
    for step in range(1, 401):
        total += codec.decode(codec.encode(gradient, generator))
        if step in (100, 400):
            off[step] = (total / step - gradient).norm().item()
    for _ in range(10):
        total_bare += bare.decode(bare.encode(gradient, generator))
    never = (total_bare / 10 - gradient).norm().item()
    assert off[400] < 0.5 * off[100]  # a quarter, and some room: the residual is bounded, but not constant
    assert off[400] < 0.5 * never


@pytest.mark.parametrize("name", CODECS)
def test_a_memory_that_was_saved_goes_on_as_if_nothing_had_happened(name):
    gradients = torch.randn(4, ELEMENTS, generator=seeded())
    undisturbed, resumed = wrapped(name), wrapped(name)
    for gradient in gradients[:2]:
        undisturbed.encode(gradient, seeded(1))
    state = undisturbed.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    expected = [undisturbed.encode(gradient, seeded(2)) for gradient in gradients[2:]]
    resumed.load_state_dict(state)
    assert all(
        torch.equal(resumed.encode(gradient, seeded(2)), payload)
        for gradient, payload in zip(gradients[2:], expected, strict=True)
    )
    assert torch.equal(resumed.residual, undisturbed.residual)


@pytest.mark.parametrize("name", CODECS)
def test_payloads_are_the_inner_codecs_own(name):
    gradient, codec, inner = torch.randn(ELEMENTS, generator=seeded()), wrapped(name), make_codec(name).fresh(SHAPES)
    payload = codec.encode(gradient, seeded(3))
    assert torch.equal(payload, inner.encode(gradient, seeded(3)))  # the first residual is zero
    assert torch.equal(codec.decode(payload), make_codec(name).decode(payload))
    assert codec.NUMBER == inner.NUMBER
    assert codec.most_bytes(ELEMENTS) == inner.most_bytes(ELEMENTS)
    assert not codec.biased
    assert not codec.suits_parameters


@pytest.mark.parametrize("name", CODECS)
def test_an_encode_that_raises_changes_nothing(name):
    codec = wrapped(name)
    gradient = torch.randn(ELEMENTS, generator=seeded())
    with pytest.raises(NotFiniteError):
        codec.encode(gradient * math.inf)
    assert codec.residual is None
    codec.encode(gradient, seeded())
    before = codec.state_dict()
    gradient[7] = math.nan
    with pytest.raises(NotFiniteError):
        codec.encode(gradient)
    after = codec.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_a_sum_beyond_float32_is_refused_and_the_next_gradient_goes_through():
    codec, gradient = ErrorFeedback(TopK(fraction=0.5)), torch.tensor([3e38, 2e38])
    codec.encode(gradient)
    assert codec.residual.tolist() == gradient.new_tensor([0, 2e38]).tolist()
    with pytest.raises(NotFiniteError):
        codec.encode(gradient)
    assert codec.decode(codec.encode(torch.zeros(2))).tolist() == gradient.new_tensor([0, 2e38]).tolist()


def test_the_gradient_and_earlier_residuals_stay_as_they_are():
    codec, gradient = ErrorFeedback(OneBit()), torch.tensor([[1.0, 2.0], [-4.0, 0.5]])
    first = (codec.encode(gradient), codec.residual)[1]
    copies = gradient.clone(), first.clone()
    codec.residual.zero_()  # a copy: nothing is lost by it
    for _ in range(3):
        codec.encode(gradient)
    assert torch.equal(gradient, copies[0])
    assert torch.equal(first, copies[1])
    assert not torch.equal(codec.residual, first)


def test_fresh_ones_share_neither_residual_nor_the_inner_memory():
    codec = ErrorFeedback(PowerSGD(rank=1)).fresh(SHAPES)
    codec.encode(torch.randn(ELEMENTS, generator=seeded()), seeded())
    assert codec.state_dict().keys() == {"residual", "inner.q0"}
    other = codec.fresh(SHAPES)
    assert other.residual is None
    assert other.state_dict() == {}
    assert repr(other) == "ErrorFeedback(PowerSGD(rank=1))"


def test_refusals_say_what_is_wrong():
    with pytest.raises(ValueError, match="one error feedback is enough"):
        ErrorFeedback(ErrorFeedback(OneBit()))
    codec = ErrorFeedback(QSGD())
    codec.encode(torch.ones(3))
    with pytest.raises(ValueError, match="the residual has 3 elements and the gradient 4"):
        codec.encode(torch.ones(4))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"residual": torch.ones(2, 2)}, "2-dimensional"),
        ({"residual": torch.ones(2, dtype=torch.float64)}, "torch.float64"),
        ({"residual": [1.0]}, "list"),
        ({"residual": torch.tensor([math.nan])}, "finite"),
        ({"q0": torch.ones(2)}, "not q0"),
        ({"residual": torch.ones(3), "inner.q0": torch.ones(2)}, "has no memory"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(state, message):
    codec = ErrorFeedback(OneBit())
    codec.encode(torch.tensor([1.0, 2.0, 3.0]))
    before = codec.residual
    with pytest.raises(ValueError, match=message):
        codec.load_state_dict(state)
    assert torch.equal(codec.residual, before)


def test_an_empty_state_empties_the_memory():
    codec = ErrorFeedback(OneBit())
    codec.encode(torch.ones(3))
    codec.load_state_dict({})
    assert codec.residual is None


def test_what_is_taken_back_is_sent_later():
    codec, generator = ErrorFeedback(TopK(fraction=0.1)), torch.Generator().manual_seed(0)
    first, second = (torch.randn(100, generator=generator) for _ in range(2))
    sent = codec.decode(codec.encode(first))
    codec.encode(second)
    codec.take_back()
    torch.testing.assert_close(sent + codec.residual, first + second)
    sent += codec.decode(codec.encode(torch.zeros(100)))
    torch.testing.assert_close(sent + codec.residual, first + second)
