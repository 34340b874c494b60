"""What the server does with an update: optimisers and learning-rate schedules by name.

An optimiser is any `torch.optim.Optimizer`; a new one is one line in `OPTIMIZERS`. Importing this package does not
import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.lookup import unknown

if TYPE_CHECKING:
    import torch

OPTIMIZERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sgd": ("SGD", ("lr", "momentum", "weight_decay", "nesterov")),
    "adam": ("Adam", ("lr", "weight_decay")),
    "adamw": ("AdamW", ("lr", "weight_decay")),
}
"""Name -> the class in `torch.optim`, and which of our settings it takes."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """An optimiser by name, and a rate that is multiplied by `decay` at each of `decay_at` (shares of the run).

    >>> OptimizerSettings(name="sgd", lr=0.1).momentum
    0.9
    """

    name: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    nesterov: bool = False
    decay: float = 0.1
    decay_at: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise unknown("optimizer", self.name, OPTIMIZERS)
        for share in self.decay_at:
            if not 0 <= share <= 1:
                raise ValueError(f"decay_at must hold shares of the run, between 0 and 1 (decay_at={self.decay_at})")


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
    import torch

    class_name, taken = OPTIMIZERS[settings.name]
    chosen: dict[str, Any] = {name: getattr(settings, name) for name in taken}
    optimizer: torch.optim.Optimizer = getattr(torch.optim, class_name)(parameters, **chosen)
    milestones = sorted(round(share * total_steps) for share in settings.decay_at)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=settings.decay)
    return optimizer, schedule
