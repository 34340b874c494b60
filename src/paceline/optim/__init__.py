"""What the server does with an update: optimisers and learning-rate schedules by name.

An optimiser is any `torch.optim.Optimizer`; a new one is one line in `OPTIMIZERS`. Importing this package does not
import torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.lookup import unknown

if TYPE_CHECKING:
    import torch

OPTIMIZERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sgd": ("torch.optim.SGD", ("lr", "momentum", "weight_decay", "nesterov")),
    "lars": (
        "paceline.optim.lars.LARS",
        ("lr", "momentum", "weight_decay", "nesterov", "trust", "exclude_bias_and_norm", "clip"),
    ),
    "adam": ("torch.optim.Adam", ("lr", "weight_decay")),
    "adamw": ("torch.optim.AdamW", ("lr", "weight_decay")),
}
"""Name -> where its class is, and which of our settings it takes."""

SCHEDULES = ("steps", "poly")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """An optimiser by name, and how its rate goes over the run.

    The rate rises over the share `warmup` of the run. Then, with the schedule "steps", it is multiplied by `decay` at
    each of `decay_at` (shares of the run); with "poly" it falls to zero as (1 - s) ** power.

    >>> OptimizerSettings(name="sgd", lr=0.1).momentum
    0.9
    """

    name: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    nesterov: bool = False
    trust: float = 0.001
    exclude_bias_and_norm: bool = True
    clip: bool = False
    schedule: str = "steps"
    warmup: float = 0.0
    power: float = 2.0
    decay: float = 0.1
    decay_at: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise unknown("optimizer", self.name, OPTIMIZERS)
        if self.schedule not in SCHEDULES:
            raise unknown("schedule", self.schedule, SCHEDULES)
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be a share of the run, at least 0 and below 1 (warmup={self.warmup})")
        for share in self.decay_at:
            if not self.warmup <= share <= 1:
                raise ValueError(
                    f"decay_at must hold shares of the run, between warmup and 1 "
                    f"(decay_at={self.decay_at}, warmup={self.warmup})"
                )
        if self.decay_at and self.schedule != "steps":
            raise ValueError(f"decay_at goes with schedule='steps' (schedule={self.schedule!r})")


def make_optimizer(
    settings: OptimizerSettings, parameters: Iterable[torch.nn.Parameter], *, total_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The optimiser and its schedule for a run of so many steps.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer, schedule = make_optimizer(OptimizerSettings(lr=0.5, decay_at=(0.5,)), [weight], total_steps=4)
    >>> for _ in range(2):
    ...     optimizer.step(); schedule.step()
    >>> round(optimizer.param_groups[0]["lr"], 3)
    0.05
    """
    place, taken = OPTIMIZERS[settings.name]
    module, _, class_name = place.rpartition(".")
    make = getattr(importlib.import_module(module), class_name)
    optimizer: torch.optim.Optimizer = make(parameters, **{name: getattr(settings, name) for name in taken})
    return optimizer, _make_schedule(settings, optimizer, total_steps)


def _make_schedule(
    settings: OptimizerSettings, optimizer: torch.optim.Optimizer, total_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    from torch.optim.lr_scheduler import MultiStepLR

    from paceline.optim.schedules import warmed_up, warmup_poly

    warmup_steps = max(0, min(round(settings.warmup * total_steps), total_steps - 1))
    if settings.schedule == "poly":
        return warmup_poly(optimizer, warmup_steps, total_steps, settings.power)
    milestones = sorted(round(share * total_steps) - warmup_steps for share in settings.decay_at)
    return warmed_up(optimizer, warmup_steps, lambda: MultiStepLR(optimizer, milestones, gamma=settings.decay))
