"""What may be encoded: finite real numbers, of any shape and of any device."""

from __future__ import annotations

import torch


class NotFiniteError(ValueError):
    """A vector with numbers that no codec can carry.

    >>> raise NotFiniteError("the gradient is not finite")
    Traceback (most recent call last):
    paceline.codecs.vectors.NotFiniteError: the gradient is not finite
    """


def flat(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as one float32 vector; its own memory where that is possible.

    >>> flat(torch.ones(2, 3, dtype=torch.float64))
    tensor([1., 1., 1., 1., 1., 1.])
    >>> flat(torch.ones(2, dtype=torch.int64))
    Traceback (most recent call last):
    ValueError: a gradient is made of real floating-point numbers (this one is torch.int64)
    """
    if not isinstance(gradient, torch.Tensor):
        raise ValueError(f"a gradient is a torch tensor (this is {type(gradient).__name__})")
    if not gradient.is_floating_point():
        raise ValueError(f"a gradient is made of real floating-point numbers (this one is {gradient.dtype})")
    return gradient.detach().reshape(-1).to(torch.float32).contiguous()


def refuse_not_finite(vector: torch.Tensor) -> None:
    """Raise if a number of a vector is not finite. A finite sum rules it out in half the time.

    >>> refuse_not_finite(torch.tensor([1.0, float("nan"), 3.0]))
    Traceback (most recent call last):
    paceline.codecs.vectors.NotFiniteError: the gradient is not finite: 1 of 3 elements, the first is number ...
    """
    if bool(torch.isfinite(vector.sum())):
        return
    bad = ~torch.isfinite(vector)
    count = int(bad.sum())
    if count:
        first = int(bad.to(torch.uint8).argmax())
        raise NotFiniteError(
            f"the gradient is not finite: {count:,} of {vector.numel():,} elements, the first is number {first} "
            f"({vector[first].item()}); lower the learning rate or clip, and skip this step"
        )
