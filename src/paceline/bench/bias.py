"""How far the mean of what is decoded is from what was encoded.

The plain way, the length of (mean of R decodings - g), has a floor: it never comes out below error / sqrt(R), so an
unbiased codec with a large error looks biased. With d_r = decoding r - g, and decodings that are independent,

    the mean of <d_r, d_s> over all pairs r != s   has the expectation   ||bias||^2

without any floor. Where there is no bias its deviation is sqrt(2 tr(C^2) / (R (R - 1))), C the covariance of a
decoding, and the mean of <d_r, d_s>^2 over the pairs estimates tr(C^2). A bias is called seen if its square is above
three deviations; otherwise it is known only to be smaller than what would have been seen. (An unbiased estimate of the
square of a mean by pairs is a U-statistic: Hoeffding, 1948.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.bench.gradients import Gradient
from paceline.bench.variants import Variant

SEEDS = 64
DEVIATIONS = 3.0


@dataclass(frozen=True, kw_only=True)
class Bias:
    """The bias as a share of the gradient's length, where it is seen; else what it is smaller than.

    >>> str(Bias(seen=0.831)), str(Bias(below=0.0021)), str(Bias(seen=0.0))
    ('0.83', '<0.003', '0')
    """

    seen: float | None = None
    below: float = 0.0

    def __str__(self) -> str:
        if self.seen is not None:
            return f"{self.seen:.2g}"
        digit = f"{self.below:.0e}"  # rounded upwards: a limit must not be understated
        step = float(f"1e{digit[2:]}")
        return f"<{float(digit) if float(digit) >= self.below else float(digit) + step:.1g}"


def measure_bias(variant: Variant, gradient: Gradient, *, seeds: int = SEEDS) -> Bias | None:
    """The bias over so many seeds, each with a fresh codec; None where there is no chance in it (all error is bias).

    >>> vector = torch.arange(1.0, 2049.0)
    >>> measure_bias(Variant("one-bit"), Gradient(vector=vector, shapes=(vector.shape,), words="")) is None
    True
    >>> measure_bias(Variant("qsgd"), Gradient(vector=vector, shapes=(vector.shape,), words="")).seen is None
    True
    """
    first, second = (_off_by(variant, gradient, seed) for seed in range(2))
    if torch.equal(first, second):
        return None
    off = torch.stack([first, second, *(_off_by(variant, gradient, seed) for seed in range(2, seeds))])
    products = off @ off.T / gradient.vector.double().square().sum()
    pairs = products[~torch.eye(seeds, dtype=torch.bool)]
    squared, deviation = float(pairs.mean()), float((2 * pairs.square().mean() / pairs.numel()).sqrt())
    if squared > DEVIATIONS * deviation:
        return Bias(seen=squared**0.5)
    return Bias(below=(max(squared, 0.0) + DEVIATIONS * deviation) ** 0.5)


def _off_by(variant: Variant, gradient: Gradient, seed: int) -> torch.Tensor:
    codec = variant.make(gradient.shapes)
    payload = codec.encode(gradient.vector, torch.Generator().manual_seed(seed))
    return codec.decode(payload, expected_length=gradient.vector.numel()).double() - gradient.vector.double()
