"""The averaging strategies, as data. A *member* is one of them, with its settings.

    name        average of                    training waits?   outer step on the mean change
    ssgd        gradients, every step         yes               -
    local-sgd   changes, every period steps   yes               plain: the model moves by the mean change
    bmuf        changes, every period steps   yes or no         momentum 1 - 1/N
    diloco      changes, every period steps   yes or no         Nesterov, rate 0.7, momentum 0.9
    hpsgd       changes, one after another    no                plain
    psgd        only when asked (a flush)     no                plain

Local SGD: S. Stich, 2019. BMUF: K. Chen, Q. Huo, 2016. DiLoCo: A. Douillard et al., 2023. HPSGD: Y. Zhou et al., 2021.

Where we differ from HPSGD's paper: no barrier, and `rebase`, which is on unless switched off. Without `rebase` a window
begins at the shared model, which does not have the worker's window before it yet (that is still being averaged). So the
two windows repeat the same move, and with momentum or long windows the model overshoots and oscillates. With the
minimum at 0 and windows that reach it, a window that begins at x changes it by -x, and that change is merged one
average late: x_(j+1) = x_j - x_(j-1), which never converges.

What is averaged is the change of the parameters, not gradients (except for ssgd): the same for plain SGD, and right for
momentum and any other local optimiser. With one worker there is nobody to average with: all members are plain training,
and no outer step is taken.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.lookup import unknown

MOST_PERIOD = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """What is done with a mean change c before the shared model moves: w <- w + step.

        velocity <- momentum * velocity + c
        step      = rate * velocity                        or, Nesterov,
        step      = rate * (c + momentum * velocity)

    A momentum of None is 1 - 1/N (BMUF's rule).

    >>> Outer(momentum=None).momentum_of(workers=4)
    0.75
    """

    rate: float = 1.0
    momentum: float | None = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 100:
            raise ValueError(f"outer_rate must be more than 0 and at most 100 (outer_rate={self.rate})")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(f"outer_momentum must be at least 0 and less than 1 (outer_momentum={self.momentum})")

    def momentum_of(self, workers: int) -> float:
        """Return the momentum for so many workers."""
        return 1.0 - 1.0 / workers if self.momentum is None else self.momentum


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """One averaging strategy: when workers average, whether training waits, and what becomes of the mean.

    `period` is the fewest local steps of a window; with None workers average only when a flush asks for it. With
    `overlap` training goes on while an average is under way. With `rebase` a worker that has begun an average trains on
    from the shared model plus the change that it has just sent; without, from the shared model alone, so that it goes
    back by that change until the average is merged. `normalize` scales every worker's change to the mean number of
    steps.

    >>> make_averaging("hpsgd").rebase, make_averaging("hpsgd", rebase=False).rebase
    (True, False)
    """

    name: str
    period: int | None = 1
    overlap: bool = False
    averages: Literal["changes", "gradients"] = "changes"
    rebase: bool = False
    normalize: bool = False
    outer: Outer = field(default_factory=Outer)

    def __post_init__(self) -> None:
        if self.period is not None and not 1 <= self.period <= MOST_PERIOD:
            raise ValueError(f"period must be between 1 and {MOST_PERIOD:,} (period={self.period})")
        if self.rebase and not self.overlap:
            raise ValueError(f"rebase needs overlap: {self.name} waits, so nothing of a worker's own is ever in flight")

    def alone(self, workers: int) -> bool:
        """Whether so many workers train each for itself until they are asked to meet.

        >>> make_averaging("psgd").alone(4), make_averaging("hpsgd").alone(4), make_averaging("hpsgd").alone(1)
        (True, False, True)
        """
        return workers == 1 or self.period is None

    def counts_own_steps(self, workers: int) -> bool:
        """Whether a run of so many workers ends by each one's own steps; else by the steps that all have merged.

        >>> make_averaging("local-sgd").counts_own_steps(4), make_averaging("hpsgd").counts_own_steps(4)
        (True, False)
        """
        return self.alone(workers) or not self.overlap


AVERAGING: dict[str, Averaging] = {
    "ssgd": Averaging(name="ssgd", averages="gradients"),
    "local-sgd": Averaging(name="local-sgd", period=8),
    "bmuf": Averaging(name="bmuf", period=8, outer=Outer(momentum=None)),
    "diloco": Averaging(name="diloco", period=100, outer=Outer(rate=0.7, momentum=0.9, nesterov=True)),
    "hpsgd": Averaging(name="hpsgd", overlap=True, rebase=True),
    "psgd": Averaging(name="psgd", period=None),
}

_OUTER = {"outer_rate": "rate", "outer_momentum": "momentum"}
SETTINGS: dict[str, tuple[str, ...]] = {
    "ssgd": (),
    "local-sgd": ("period", "normalize"),
    "bmuf": ("period", "normalize", "overlap", "rebase", *_OUTER),
    "diloco": ("period", "normalize", "overlap", "rebase", *_OUTER),
    "hpsgd": ("period", "normalize", "rebase"),
    "psgd": ("normalize",),
}
"""Which settings a member has; the others make it what it is."""


def make_averaging(name: str, **settings: Any) -> Averaging:
    """Return a member by name, with settings of its own changed; `rebase=None` is on where training does not wait.

    >>> make_averaging("local-sgd", period=4).period
    4
    >>> make_averaging("psgd", period=4)
    Traceback (most recent call last):
    ValueError: period is no setting of psgd; it has normalize
    """
    if name not in AVERAGING:
        raise unknown("averaging strategy", name, AVERAGING)
    member = AVERAGING[name]
    for setting in settings:
        if setting not in SETTINGS[name]:
            has = ", ".join(SETTINGS[name]) or "none"
            raise ValueError(f"{setting} is no setting of {name}; it has {has}")
    if "rebase" in SETTINGS[name] and settings.get("rebase") is None:
        settings["rebase"] = settings.get("overlap", member.overlap)
    outer = {_OUTER[setting]: value for setting, value in settings.items() if setting in _OUTER}
    own = {setting: value for setting, value in settings.items() if setting not in _OUTER}
    return dataclasses.replace(member, outer=dataclasses.replace(member.outer, **outer), **own)
