"""The codecs that must keep the laws, and the gradients they must keep them for. A new codec adds its line here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from paceline.codecs import (
    CODECS,
    QSGD,
    BFloat16,
    ErrorFeedback,
    Float16,
    Identity,
    Int8Sum,
    OneBit,
    PowerSGD,
    Sparsifier,
    TopK,
)

VARIANTS: dict[str, list[Any]] = {
    "identity": [Identity()],
    "bfloat16": [BFloat16()],
    "float16": [Float16()],
    "one-bit": [OneBit()],
    "qsgd": [
        QSGD(),
        QSGD(levels=1, bucket=100, norm="l2", lossless="entropy"),
        QSGD(levels=3, bucket=31, lossless="elias"),
        QSGD(levels=127, bucket=5000, norm="l2"),
        QSGD(levels=32_767, bucket=0, lossless="entropy"),
    ],
    "sparsifier": [Sparsifier(), Sparsifier(lossless="packed")],
    "top-k": [TopK(), TopK(fraction=1.0)],
    "power-sgd": [PowerSGD(), PowerSGD(rank=1)],
    "int8-sum": [Int8Sum(), Int8Sum(bucket=0), Int8Sum(bucket=100)],
}

_LISTED = [codec for name in CODECS for codec in VARIANTS.get(name, [])]
EVERY_CODEC = [*_LISTED, *(ErrorFeedback(codec) for codec in _LISTED if codec.biased)]
every_codec = pytest.mark.parametrize("codec", EVERY_CODEC, ids=str)
every_plain_codec = pytest.mark.parametrize("codec", _LISTED, ids=str)

# Lengths about the edges of rows (32), lanes (64), buckets (512) and units (4,096), and far from any.
LENGTHS = (0, 1, 2, 3, 7, 31, 32, 33, 64, 100, 127, 511, 512, 513, 1000, 4095, 4096, 4097, 4128, 5003, 8200)
KINDS = ("normal", "zeros", "negative zeros", "constant", "subnormal", "large", "mixed", "one spike")


def carries(codec: Any, gradient: torch.Tensor) -> bool:
    """Whether a gradient is in the range of a codec: all but float16 carry whatever is finite."""
    return codec.NUMBER != Float16.NUMBER or bool((gradient.abs() <= torch.finfo(torch.float16).max).all())


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vector_of(kind: str, length: int, seed: int) -> torch.Tensor:
    """A float32 vector of a kind that codecs stumble over."""
    normal = torch.randn(length, generator=seeded(seed))
    if kind == "mixed":  # 60 orders of magnitude
        return normal * 10.0 ** (60 * torch.rand(length, generator=seeded(seed + 1)) - 30)
    if kind == "one spike":
        return torch.where(torch.arange(length) == length // 2, 1e30, 1e-30 * normal)
    scales = {"normal": 1.0, "zeros": 0.0, "negative zeros": -0.0, "subnormal": 1e-40, "large": 1e30}
    return torch.full((length,), -0.37) if kind == "constant" else normal.abs().add(0.5) * normal.sign() * scales[kind]


def shaped(vector: torch.Tensor, form: str) -> torch.Tensor:
    """The same elements in the same order, laid out in memory as gradients may be."""
    length = vector.numel()
    if form == "strided":
        return torch.stack([vector, torch.full_like(vector, math.nan)], 1)[:, 0]
    if form == "transposed":
        rows = next((rows for rows in (3, 2, 7) if length % rows == 0), 1)
        return vector.view(rows, length // rows).T.contiguous().T
    if form == "cube" and length % 4 == 0:
        return vector.view(2, 2, length // 4)
    if form == "scalar" and length == 1:
        return vector.view(())
    return vector.clone().requires_grad_() if form == "parameter" else vector


@st.composite
def gradients(draw: st.DrawFn) -> torch.Tensor:
    """Gradients of all kinds, lengths, layouts and precisions."""
    vector = vector_of(draw(st.sampled_from(KINDS)), draw(st.sampled_from(LENGTHS)), draw(st.integers(0, 999)))
    form = draw(st.sampled_from(("flat", "strided", "transposed", "cube", "scalar", "parameter")))
    dtype = draw(st.sampled_from((torch.float32, torch.float32, torch.float64, torch.bfloat16)))
    return shaped(vector.to(dtype), form)
