"""Learning rates for large batches, from torch's own schedulers.

    rate
     lr |      .-.                      warm-up: a straight line, lr * (t + 1) / (warmup + 1)
        |    .'   '-.                   then lr * (1 - s) ** power, where s goes from 0 to 1
        |  .'        '--._
        |.'               '----____
        +------|--------------------|-- step
            warmup                total

A batch k times larger means k times fewer steps, so each must go further: k times as far (Krizhevsky, 2014) or, since
the noise of the gradient shrinks with the square root of the batch, sqrt(k) times.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, PolynomialLR, SequentialLR

RULES = ("linear", "sqrt")


def scale_lr(base_lr: float, base_batch: int, batch: int, rule: str = "linear") -> float:
    """The rate for another batch size, from one that is known to work.

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


def warmup_poly(optimizer: Optimizer, warmup_steps: int, total_steps: int, power: float = 2) -> LRScheduler:
    """Linear warm-up to the optimiser's rates, then polynomial decay to zero; call its `step()` after every step.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=8.0)
    >>> schedule = warmup_poly(optimizer, warmup_steps=3, total_steps=7)
    >>> rates = []
    >>> for _ in range(8):
    ...     rates.append(round(optimizer.param_groups[0]["lr"], 6))
    ...     optimizer.step(); schedule.step()
    >>> rates
    [2.0, 4.0, 6.0, 8.0, 4.5, 2.0, 0.5, 0.0]
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
    return warmed_up(optimizer, warmup_steps, lambda: PolynomialLR(optimizer, total_steps - warmup_steps, power))


def warmed_up(optimizer: Optimizer, warmup_steps: int, then: Callable[[], LRScheduler]) -> LRScheduler:
    """A linear warm-up before another schedule, which begins with its first step when the warm-up is over.

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
