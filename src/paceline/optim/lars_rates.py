"""The rate of one layer: how far LARS lets it move, compared with its size.

    local = trust * |w| / (|g| + weight_decay * |w|)        rate = lr * local

so that the update is at most `lr * trust` of the layer's own length, however large or small its gradient is. Where
a norm is 0 the formula says nothing (0 / 0, or a layer that could never leave zero), and `local` is 1. With `clip`
the global rate is a limit instead of a factor: rate = min(local, lr), as LARC has it.

The same arithmetic twice: on tensors, for a device that must not be waited for, and on numbers, for the CPU. A NaN
in a norm comes out as a NaN in the rate.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor


def is_bias_or_norm(parameter: Tensor) -> bool:
    """What is commonly left out of the scaling: biases and the scales of normalisation have at most one dimension.

    >>> is_bias_or_norm(torch.zeros(8)), is_bias_or_norm(torch.zeros(8, 4))
    (True, False)
    """
    return parameter.dim() <= 1


def local_rate(weight_norm: float, gradient_norm: float, *, trust: float, weight_decay: float) -> float:
    """The layer's own factor, where neither norm is 0.

    >>> local_rate(3.0, 0.5, trust=0.001, weight_decay=0.0)
    0.006
    """
    return trust * weight_norm / (gradient_norm + weight_decay * weight_norm)


@dataclass(frozen=True, kw_only=True)
class Trust:
    """What the rate of a layer depends on besides its norms.

    >>> Trust(lr=2.0, trust=0.001, weight_decay=0.0, clip=False).rate(weight_norm=3.0, gradient_norm=0.5)
    0.012
    >>> Trust(lr=2.0, trust=0.001, weight_decay=0.0, clip=False).rate(weight_norm=0.0, gradient_norm=0.5)
    2.0
    """

    lr: float | Tensor
    trust: float
    weight_decay: float
    clip: bool

    def rate(self, *, weight_norm: float, gradient_norm: float) -> float:
        """The rate from norms that are plain numbers."""
        lr = float(self.lr)
        if weight_norm == 0 or gradient_norm == 0:
            return lr
        local = local_rate(weight_norm, gradient_norm, trust=self.trust, weight_decay=self.weight_decay)
        if not self.clip:
            return lr * local
        return lr if local > lr else local  # in this order a NaN stays one

    def rates(self, *, weight_norms: Tensor, gradient_norms: Tensor) -> Tensor:
        """The rates from norms that are on a device; nothing is read back from it."""
        still = (weight_norms == 0) | (gradient_norms == 0)
        # the denominator is kept from 0, for a 0 / 0 that is not chosen still makes the gradient of `where` a NaN
        below = torch.where(still, 1.0, gradient_norms + self.weight_decay * weight_norms)
        local = self.trust * weight_norms / below
        # `lr` may be a scalar on the CPU: `mul` and `minimum` take it as a number, `where` would copy it and wait
        if not self.clip:
            return self.lr * torch.where(still, 1.0, local)
        limited = torch.where(still, math.inf, local)
        return torch.minimum(limited, self.lr) if isinstance(self.lr, Tensor) else limited.clamp(max=self.lr)

    def on(self, device: torch.device) -> Trust:
        """The same, with a rate that can be used beside tensors on a device."""
        if not isinstance(self.lr, Tensor) or self.lr.is_cpu or self.lr.device == device:
            return self
        return dataclasses.replace(self, lr=self.lr.to(device, non_blocking=True))
