"""Learning rates for large batches, from torch's own schedulers.

    rate
     lr |      .-.                      steps 0 to w - 1, the warm-up: a straight line, lr (t + 1) / (w + 1)
        |    .'   '-.                   then, with decay_from="warmup":  lr (1 - (t - w) / (T - w)) ^ power
        |  .'        '--._                     with decay_from="start":   lr (1 - t / T) ^ power
        |.'               '----____
        +------|--------------------|-- step
               w                    T

"start" is the rate of Algorithm 1 of LARS's paper (You, Gitman, Ginsburg 2017), which has no warm-up in it: after the
warm-up it is as if there had been none, so that the rate drops from nearly lr to lr (1 - w/T)^2 there. The authors'
solver (NVIDIA's Caffe) does the same. "warmup", our default, reaches lr once and falls from there: with power 2 it is
1 / (1 - w/T)^2 times the paper's at every step after the warm-up, for (1 - (t - w) / (T - w)) = (1 - t/T) / (1 - w/T).

A batch k times larger means k times fewer steps, so each must go further: k times as far (Krizhevsky, 2014) or, since
the noise of the gradient shrinks with the square root of the batch, sqrt(k) times.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, PolynomialLR, SequentialLR

from paceline.lookup import unknown
from paceline.optim import DECAY_FROM

RULES = ("linear", "sqrt")


def scale_lr(base_lr: float, base_batch: int, batch: int, rule: str = "linear") -> float:
    """Return the rate for another batch size, from one that is known to work.

    >>> scale_lr(0.1, base_batch=256, batch=8192)
    3.2
    >>> scale_lr(0.1, base_batch=256, batch=1024, rule="sqrt")
    0.2
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)} (rule={rule!r})")
    for name, value in (("base_batch", base_batch), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1 ({name}={value})")
    if not 0 <= base_lr < math.inf:
        raise ValueError(f"base_lr must be at least 0 and finite (base_lr={base_lr})")
    times = batch / base_batch
    return base_lr * (times if rule == "linear" else math.sqrt(times))


def warmup_poly(
    optimizer: Optimizer, warmup_steps: int, total_steps: int, power: float = 2, *, decay_from: str = "warmup"
) -> LRScheduler:
    """Return a linear warm-up to the optimiser's rates, then polynomial decay to zero; `step()` it after every step.

    The decay is counted from the end of the warm-up, or with `decay_from="start"` from the first step, as the LARS
    paper's Algorithm 1 has it.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=8.0)
    >>> schedule = warmup_poly(optimizer, warmup_steps=3, total_steps=7)
    >>> rates = []
    >>> for _ in range(8):
    ...     rates.append(round(optimizer.param_groups[0]["lr"], 6))
    ...     optimizer.step(); schedule.step()
    >>> rates
    [2.0, 4.0, 6.0, 8.0, 4.5, 2.0, 0.5, 0.0]
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=8.0)
    >>> schedule = warmup_poly(optimizer, warmup_steps=1, total_steps=4, decay_from="start")
    >>> rates = []
    >>> for _ in range(5):
    ...     rates.append(optimizer.param_groups[0]["lr"])
    ...     optimizer.step(); schedule.step()
    >>> rates
    [4.0, 4.5, 2.0, 0.5, 0.0]
    """
    for name, value in (("warmup_steps", warmup_steps), ("total_steps", total_steps)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be a whole number ({name}={value!r})")
    if total_steps < 1:
        raise ValueError(f"total_steps must be at least 1 (total_steps={total_steps})")
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"warmup_steps must be at least 0 and below total_steps "
            f"(warmup_steps={warmup_steps}, total_steps={total_steps})"
        )
    if not 0 < power < math.inf:
        raise ValueError(f"power must be above 0 and finite (power={power})")
    if decay_from not in DECAY_FROM:
        raise unknown("decay_from", decay_from, DECAY_FROM)
    if decay_from == "warmup":
        return warmed_up(optimizer, warmup_steps, lambda: PolynomialLR(optimizer, total_steps - warmup_steps, power))

    def share_of_rate(steps_after_warmup: int) -> float:
        return math.pow(max(0.0, 1 - (warmup_steps + steps_after_warmup) / total_steps), power)

    return warmed_up(optimizer, warmup_steps, lambda: LambdaLR(optimizer, share_of_rate))


def warmed_up(optimizer: Optimizer, warmup_steps: int, then: Callable[[], LRScheduler]) -> LRScheduler:
    """Return a linear warm-up before another schedule, which begins with its first step when the warm-up is over.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=8.0)
    >>> schedule = warmed_up(optimizer, 1, lambda: PolynomialLR(optimizer, 10))
    >>> optimizer.param_groups[0]["lr"]
    4.0
    """
    if not warmup_steps:
        return then()
    line = LinearLR(optimizer, start_factor=1 / (warmup_steps + 1), end_factor=1, total_iters=warmup_steps)
    return SequentialLR(optimizer, [line, then()], [warmup_steps])
