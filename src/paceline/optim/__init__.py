"""What the server does with an update: optimisers and learning-rate schedules by name.

An optimiser is any `torch.optim.Optimizer`; a new one is one line in `OPTIMIZERS`. Importing this package does not
import torch.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.lazy import lazy_names
from paceline.settings import Checked, SettingError, setting

if TYPE_CHECKING:
    import torch

    from paceline.optim.accumulate import Accumulate
    from paceline.optim.lars import LARS
    from paceline.optim.ratios import layer_ratios
    from paceline.optim.schedules import scale_lr, warmup_poly

_HOMES = {
    "Accumulate": "accumulate",
    "LARS": "lars",
    "layer_ratios": "ratios",
    "scale_lr": "schedules",
    "warmup_poly": "schedules",
}

__all__ = [
    "LARS",
    "OPTIMIZERS",
    "Accumulate",
    "OptimizerSettings",
    "layer_ratios",
    "make_optimizer",
    "scale_lr",
    "warmup_poly",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__


OPTIMIZERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sgd": ("torch.optim.SGD", ("lr", "momentum", "weight_decay", "nesterov")),
    "lars": (
        "paceline.optim.lars.LARS",
        ("lr", "momentum", "weight_decay", "nesterov", "trust_coefficient", "exclude_bias_and_norm", "clip"),
    ),
    "adam": ("torch.optim.Adam", ("lr", "weight_decay")),
    "adamw": ("torch.optim.AdamW", ("lr", "weight_decay")),
}
"""Name -> where its class is, and which of our settings it takes."""

SCHEDULES = ("steps", "poly")
DECAY_FROM = ("warmup", "start")
"""Where the polynomial is counted from; `schedules.py` draws both."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Checked):
    """An optimiser by name, and how its rate goes over the run.

    The rate rises over the share `warmup` of the run. Then, with the schedule "steps", it is multiplied by `decay` at
    each of `decay_at` (shares of the run); with "poly" it falls to zero as (1 - s) ** power, where s is counted from
    the end of the warm-up or from the start of the run (`decay_from`).

    >>> OptimizerSettings(name="sgd", lr=0.1).momentum
    0.9
    """

    name: str = setting("sgd", "optimiser", choices=lambda: OPTIMIZERS, alias="optimizer")
    lr: float = setting(0.05, "learning rate", above=0, most=1e6, alias="lr")
    momentum: float = setting(0.9, "sgd, lars: momentum", least=0, most=1)
    weight_decay: float = setting(5e-4, "weight decay", least=0, most=1e38)
    nesterov: bool = setting(False, "sgd, lars: Nesterov momentum")
    trust_coefficient: float = setting(
        0.001, "lars: share of its length a layer moves per unit of lr", above=0, most=1e6
    )
    exclude_bias_and_norm: bool = setting(True, "lars: biases and normalisation take the rate as it is")
    clip: bool = setting(False, "lars: lr is a limit for each layer's rate, not a factor (LARC)")
    schedule: str = setting("steps", "how the rate falls: at decay_at, or as a polynomial", choices=lambda: SCHEDULES)
    warmup: float = setting(0.0, "share of the run in which the rate rises to lr", least=0, most=0.99)
    power: float = setting(2.0, "poly: the rate falls as (1 - share of the run) to this power", above=0, most=100)
    decay_from: str = setting(
        "warmup",
        "poly: the fall is counted from the end of the warm-up, or from the start of the run (LARS's Algorithm 1)",
        choices=lambda: DECAY_FROM,
    )
    decay: float = setting(0.1, "steps: factor on the learning rate at each of decay_at", above=0, most=1)
    decay_at: tuple[float, ...] = setting((), "steps: shares of the run, such as 0.5,0.75", least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise SettingError(("nesterov",), "nesterov needs momentum above 0 (momentum=0)")
        if self.decay_from != DECAY_FROM[0] and self.schedule != "poly":
            raise SettingError(("decay_from",), f"decay_from goes with schedule = poly (schedule={self.schedule})")
        if self.decay_at and self.schedule != "steps":
            raise SettingError(("decay_at",), f"decay_at goes with schedule = steps (schedule={self.schedule})")
        if self.decay_at and min(self.decay_at) < self.warmup:
            raise SettingError(
                ("decay_at",), f"decay_at must come after the warm-up (decay_at={self.decay_at}, warmup={self.warmup})"
            )


def make_optimizer(
    settings: OptimizerSettings, parameters: Iterable[torch.nn.Parameter], *, total_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return the optimiser and its schedule for a run of so many steps.

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


def make_schedule(
    settings: OptimizerSettings, optimizer: torch.optim.Optimizer, *, total_steps: int, steps_done: int = 0
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule for an optimiser that has one already, as if it had followed this one for `steps_done` steps.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer, _ = make_optimizer(OptimizerSettings(lr=1.0), [weight], total_steps=4)
    >>> _ = make_schedule(OptimizerSettings(lr=1.0, schedule="poly"), optimizer, total_steps=8, steps_done=4)
    >>> round(optimizer.param_groups[0]["lr"], 6)
    0.25
    """
    for group in optimizer.param_groups:
        group["lr"] = settings.lr
        group.pop("initial_lr", None)
    schedule = _make_schedule(settings, optimizer, total_steps)
    catch_up(schedule, steps_done)
    return schedule


def catch_up(schedule: Any, steps_done: int) -> None:
    """Take so many steps of a schedule at once: its optimiser took them under another one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the optimiser has not stepped
        for _ in range(steps_done):
            schedule.step()


def _make_schedule(
    settings: OptimizerSettings, optimizer: torch.optim.Optimizer, total_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    from torch.optim.lr_scheduler import MultiStepLR

    from paceline.optim.schedules import warmed_up, warmup_poly

    warmup_steps = max(0, min(round(settings.warmup * total_steps), total_steps - 1))
    if settings.schedule == "poly":
        return warmup_poly(optimizer, warmup_steps, total_steps, settings.power, decay_from=settings.decay_from)
    milestones = sorted(round(share * total_steps) - warmup_steps for share in settings.decay_at)
    return warmed_up(optimizer, warmup_steps, lambda: MultiStepLR(optimizer, milestones, gamma=settings.decay))
