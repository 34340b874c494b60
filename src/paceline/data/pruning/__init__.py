"""Samples that teach nothing sit out: policies that decide who, and the batch sampler that carries it out.

    losses of the last epochs ──> policy ──> who takes part, and what each weighs ──> batches ──> losses ...

A policy is its file and one line in `PRUNINGS`. Importing this package loads neither torch nor a policy.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from paceline.lookup import unknown

if TYPE_CHECKING:
    from paceline.data.pruning.policy import Policy

NONE = "none"


@dataclass(frozen=True, kw_only=True)
class PruningEntry:
    """One line of the table: what a policy does, where it is made from settings, and which settings it has.

    >>> PRUNINGS["info-batch"].settings
    ('ratio', 'delta')
    """

    description: str
    location: str
    settings: tuple[str, ...] = ()


PRUNINGS = MappingProxyType(
    {
        "fine-pruning": PruningEntry(
            description="those often above their batch's mean loss sit some epochs out",
            location="paceline.data.pruning.fine_policy:make",
            settings=("window", "starting_point", "attenuation", "block", "count", "prune", "tolerance"),
        ),
        "info-batch": PruningEntry(
            description="some of those below the mean loss sit out, the others of them weigh more",
            location="paceline.data.pruning.info_policy:make",
            settings=("ratio", "delta"),
        ),
    }
)
"""Every policy by its name in a recipe."""


@dataclass(frozen=True, kw_only=True)
class PruningSettings:
    """What a recipe says of pruning; a policy takes the settings that it has.

    >>> PruningSettings().on, PruningSettings(name="info-batch").on
    (False, True)
    """

    name: str = NONE
    window: int = 20
    starting_point: int = 10
    attenuation: float = 2.0
    block: int = 4
    count: int = 2
    prune: float = 0.3
    tolerance: float = 0.0
    ratio: float = 0.5
    delta: float = 0.875

    @property
    def on(self) -> bool:
        """Whether anything is pruned.

        >>> PruningSettings().on
        False
        """
        return self.name != NONE


def make_policy(settings: PruningSettings, samples: int, *, seed: int) -> Policy:
    """The policy that the settings name, over so many samples.

    >>> make_policy(PruningSettings(name="fine-pruning", prune=0.5), 10, seed=0).prune_num
    5
    >>> make_policy(PruningSettings(name="coarse"), 10, seed=0)
    Traceback (most recent call last):
    ValueError: unknown pruning 'coarse'; choose from fine-pruning, info-batch
    """
    if settings.name not in PRUNINGS:
        raise unknown("pruning", settings.name, PRUNINGS)
    entry = PRUNINGS[settings.name]
    module, _, function = entry.location.partition(":")
    made: Policy = getattr(importlib.import_module(module), function)(
        samples, seed=seed, **{name: getattr(settings, name) for name in entry.settings}
    )
    return made
