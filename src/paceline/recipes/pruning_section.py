"""The section of a recipe that says which samples sit out, and when."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from paceline.data.pruning import NONE, PRUNINGS, PruningSettings, make_policy
from paceline.settings import Checked, SettingError, setting

_DEFAULTS = PruningSettings()


@dataclass(frozen=True, kw_only=True)
class PruningSection(Checked):
    """Which samples sit passes out. A policy takes the settings it has; others are refused.

    >>> PruningSection(name="fine-pruning", prune=0.2).prune
    0.2
    >>> PruningSection(name="info-batch", prune=0.2)
    Traceback (most recent call last):
    paceline.settings.SettingError: prune is a setting of fine-pruning, and the pruning is info-batch
    >>> PruningSection(name="fine-pruning", prune=1.0)
    Traceback (most recent call last):
    paceline.settings.SettingError: prune, as a share, must be at least 0 and below 1 (prune=1.0); ...
    """

    name: str = setting(
        NONE, "which samples of its shard a worker leaves out", choices=lambda: (NONE, *PRUNINGS), alias="pruning"
    )
    window: int = setting(_DEFAULTS.window, "fine-pruning: passes after which counts are cleared", least=1, most=65_535)
    starting_point: int = setting(
        _DEFAULTS.starting_point, "fine-pruning: first pass of the first window that may be pruned", least=0
    )
    attenuation: float = setting(
        _DEFAULTS.attenuation, "fine-pruning: starting_point is divided by it with every window", least=1
    )
    block: int = setting(_DEFAULTS.block, "fine-pruning: of each so many passes ...", least=1)
    count: int = setting(_DEFAULTS.count, "fine-pruning: ... so many are pruned", least=0)
    prune: float = setting(
        _DEFAULTS.prune, "fine-pruning: share of the samples that sits a pruned pass out, below 1", least=0
    )
    tolerance: float = setting(
        _DEFAULTS.tolerance, "fine-pruning: counted is who is above (1 + tolerance) x the batch's mean loss", least=0
    )
    ratio: float = setting(
        _DEFAULTS.ratio, "info-batch: share of the samples below the mean loss that sits out, below 1", least=0
    )
    delta: float = setting(_DEFAULTS.delta, "info-batch: share of the run in which samples sit out", least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in dataclasses.fields(self):
            owners = [name for name, entry in PRUNINGS.items() if each.name in entry.settings]
            if owners and self.name not in owners and getattr(self, each.name) != each.default:
                whose = " and ".join(owners)
                raise SettingError((each.name,), f"{each.name} is a setting of {whose}, and the pruning is {self.name}")
        if self.name != NONE:
            self._check()

    def _check(self) -> None:
        """Ask the policy itself: it knows what its settings may be beside each other."""
        try:
            make_policy(self.settings, 1, seed=0)
        except ValueError as error:
            given = [each.name for each in dataclasses.fields(self) if getattr(self, each.name) != each.default]
            told = [name for name in given if f"{name}=" in str(error)]  # which of what was written it names
            raise SettingError((told[0] if told else "name",), str(error)) from None

    @property
    def settings(self) -> PruningSettings:
        """The same, for whoever prunes.

        >>> PruningSection().settings == PruningSettings()
        True
        """
        return PruningSettings(**dataclasses.asdict(self))
