"""The length of a tensor on the CPU against one in double precision, block by block and layout by layout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.optim import norms
from paceline.optim.norms import cpu_norm
from tests.optim.lars_cases import seeded

BLOCK = 8
LAYOUTS = {
    "plain": lambda t: t,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "turned": lambda t: t.transpose(1, 3),
    "every other": lambda t: t.repeat_interleave(2, dim=2)[:, :, ::2],
    "one number": lambda t: t[..., :1].expand(t.shape),
}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(norms, "BLOCK", BLOCK)


def exact(tensor):
    return math.hypot(*tensor.double().flatten().tolist())


@pytest.mark.usefixtures("small_blocks")
@given(
    elements=st.integers(0, 4 * BLOCK + 1),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    exponent=st.integers(-4, 4),
)
def test_blocks_add_up_to_the_length(elements, dtype, exponent):
    tensor = (torch.randn(elements, generator=seeded(elements)) * 10.0**exponent).to(dtype)
    found = cpu_norm(tensor)
    assert isinstance(found, float)
    assert found == pytest.approx(exact(tensor), rel=1e-13 if dtype is torch.float64 else 1e-6)


@pytest.mark.usefixtures("small_blocks")
@given(shape=st.tuples(*[st.integers(1, 4)] * 4), layout=st.sampled_from([*LAYOUTS]), double=st.booleans())
def test_every_layout_has_its_length(shape, layout, double):
    dtype = torch.float64 if double else torch.float32
    tensor = LAYOUTS[layout](torch.randn(shape, generator=seeded(), dtype=dtype))
    assert cpu_norm(tensor) == pytest.approx(exact(tensor), rel=1e-13 if double else 1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_order_is_that_of_the_memory_itself(layout):
    tensor = LAYOUTS[layout](torch.randn(2, 3, 4, 5))
    fitting = [fits(tensor) for fits in norms.MEMORY_ORDERS]
    assert fitting == [layout == "plain", layout == "channels last"]
    flat = norms._flat(tensor)
    assert (flat is not None) == any(fitting)
    if flat is not None:
        assert flat.data_ptr() == tensor.data_ptr()
        assert flat.is_contiguous()
        assert flat.shape == (tensor.numel(),)


def test_a_large_layer_is_exact_to_float32():
    """Where torch's own norm of float32 is 3e-5 off, for it adds up in one chain."""
    tensor = torch.rand(3 * norms.BLOCK + 5, generator=seeded())
    assert cpu_norm(tensor) == pytest.approx(float(tensor.double().norm()), rel=5e-7)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-20, 1e-16, 1e15, 1e19, 1e25, 1e37])
def test_squares_that_float32_cannot_hold_are_taken_in_double(scale):
    tensor = torch.randn(20, generator=seeded()) * scale
    assert cpu_norm(tensor) == pytest.approx(exact(tensor), rel=1e-6)


@pytest.mark.usefixtures("small_blocks")
def test_what_is_too_long_for_double_is_infinite():
    """Every block's sum is finite, theirs is not."""
    assert cpu_norm(torch.full((8 * BLOCK,), 4.5e153, dtype=torch.float64)) == math.inf


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("place", [0, BLOCK, 3 * BLOCK])
def test_a_nan_is_seen_and_an_infinity_is_infinite(dtype, place):
    tensor = torch.ones(3 * BLOCK + 1, dtype=dtype)
    tensor[place] = -math.inf
    assert cpu_norm(tensor) == math.inf
    tensor[-1 - place] = math.nan
    assert math.isnan(cpu_norm(tensor))
    tensor[place] = 1.0
    tensor[0 if place else -1] = math.nan
    assert math.isnan(cpu_norm(tensor))
