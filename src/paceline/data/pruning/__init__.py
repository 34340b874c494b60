"""Pruning: in some epochs some samples are skipped, chosen by their losses in earlier epochs.

    losses of earlier epochs ──> policy ──> samples that take part, and their loss weights ──> batches ──> losses ...

A sample that is skipped in an epoch "sits out". A policy "judges" losses: it updates what it knows of the samples.
Fine-pruning skips samples with high losses, InfoBatch samples with low ones. A recipe's worker counts passes over its
own shard where a script counts epochs, and a "draw" is one batch of a worker, counted from 0.

    policy          the interface of a policy          sampler    FinePruning and InfoBatch, batch samplers for scripts
    fine_pruning    data fine-pruning                  epoch      one epoch's order, batches, weights and losses
    info_batch      InfoBatch                          passes     which batches were handed out and observed
    plan            what a run will save               ranks      how ranks agree on all of it
    groups          what each class of samples loses   order      the batches of a worker of a recipe
                                                       watched    losses of a few samples over the epochs

A policy is its file and one line in `PRUNINGS`. Importing this package loads neither torch nor a policy.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from paceline.lookup import unknown
from paceline.settings import Checked, SettingError, refuse_settings_of_others, setting

if TYPE_CHECKING:
    from paceline.data.pruning.groups import Groups
    from paceline.data.pruning.policy import Policy

NONE = "none"

# Fine-pruning's window and its first starting point have two defaults, because they count two different things.
#
#              window   starting point   counted in
#   a script       60               30   epochs of the whole data set. The paper sets the window to a stage of the
#                                        learning rate: 60 of its 200 epochs, and InfoBatch's scripts have 200 too.
#   a recipe       20               10   passes of one worker over its own shard. A run's budget is rounds: the default
#                                        recipe's 300 are 64 passes, and a window is a third of them, as in the paper.
#                                        With 60 and 30 half of such a run would be over before anything is pruned.
#
# Journals, checkpoints and sampler states say the values that they were made with, so neither is guessed later.
EPOCHS_WINDOW = 60
EPOCHS_STARTING_POINT = 30
PASSES_WINDOW, PASSES_STARTING_POINT = 20, 10


@dataclass(frozen=True, kw_only=True)
class PruningEntry:
    """One line of the table: what a policy does, the function that makes it, and which settings it has.

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
            location="paceline.data.pruning.fine_pruning:make_fine_policy",
            settings=(
                "window",
                "starting_point",
                "attenuation",
                "block",
                "count",
                "prune",
                "tolerance",
                "window_at",
                "protect",
            ),
        ),
        "info-batch": PruningEntry(
            description="some of those below the mean loss sit out, the others of them weigh more",
            location="paceline.data.pruning.info_batch:InfoPolicy",
            settings=("ratio", "delta"),
        ),
    }
)
"""Every policy by its name in a recipe."""


@dataclass(frozen=True, kw_only=True)
class PruningSettings(Checked):
    """Which samples sit passes out. A policy takes the settings it has; others are refused.

    >>> PruningSettings().on, PruningSettings(name="fine-pruning", prune=0.2).on
    (False, True)
    >>> PruningSettings(name="info-batch", prune=0.2)
    Traceback (most recent call last):
    paceline.settings.SettingError: prune is a setting of fine-pruning, and the pruning is info-batch
    >>> PruningSettings(name="fine-pruning", prune=1.0)
    Traceback (most recent call last):
    paceline.settings.SettingError: prune, as a share, must be at least 0 and below 1 (prune=1.0); ...
    """

    name: str = setting(
        NONE, "which samples of its shard a worker leaves out", choices=lambda: (NONE, *PRUNINGS), alias="pruning"
    )
    window: int = setting(PASSES_WINDOW, "fine-pruning: passes after which counts are cleared", least=1, most=65_535)
    window_at: tuple[int, ...] = setting(
        (),
        "fine-pruning: passes at which windows begin, in place of a window; empty: windows of one length",
        least=1,
        most=10**7,
    )
    starting_point: int = setting(
        PASSES_STARTING_POINT, "fine-pruning: first pass of the first window that may be pruned", least=0, most=10**7
    )
    attenuation: float = setting(
        2.0, "fine-pruning: starting_point is divided by it with every window", least=1, most=1e6
    )
    block: int = setting(
        4, "fine-pruning: passes in a block, of which the first `count` are pruned", least=1, most=10**7
    )
    count: int = setting(2, "fine-pruning: passes of each block that are pruned", least=0, most=10**7)
    prune: float = setting(
        0.3, "fine-pruning: share of the samples that sits a pruned pass out, below 1", least=0, most=1
    )
    tolerance: float = setting(
        0.0,
        "fine-pruning: counted is a sample whose loss is >= (1 + tolerance) x the batch's mean loss",
        least=0,
        most=1e6,
    )
    protect: Literal["classes"] | None = setting(
        None,
        "fine-pruning: the same share of each class of a shard sits out (classes); none: those with the highest counts",
        choices=lambda: ("classes",),
    )
    ratio: float = setting(
        0.5, "info-batch: share of the samples below the mean loss that sits out, below 1", least=0, most=1
    )
    delta: float = setting(0.875, "info-batch: share of the run in which samples sit out", least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        named = {name for entry in PRUNINGS.values() for name in entry.settings}
        owners = {name: [policy for policy, entry in PRUNINGS.items() if name in entry.settings] for name in named}
        refuse_settings_of_others(self, owners, "pruning")
        if self.window_at and self.window != PASSES_WINDOW:
            raise SettingError(("window_at",), window_refusal(self.window, self.window_at), beside=("window",))
        if self.on:
            try:  # the policy itself knows what its settings may be beside each other
                make_policy(self, 1, seed=0)
            except ValueError as error:
                changed = [each.name for each in dataclasses.fields(self) if getattr(self, each.name) != each.default]
                blamed = [name for name in changed if f"{name}=" in str(error)]
                raise SettingError((blamed[0] if blamed else "name",), str(error)) from None

    @property
    def on(self) -> bool:
        """Whether anything is pruned."""
        return self.name != NONE


def window_refusal(window: int, window_at: Sequence[int]) -> str:
    """Return why windows cannot be of one length and begin at given epochs too."""
    return f"give window or window_at, not both (window={window}, window_at={list(window_at)})"


def make_policy(settings: PruningSettings, samples: int, *, seed: int, protected: Groups | None = None) -> Policy:
    """Return the policy that the settings name, over so many samples; `protected` are their classes, for `protect`.

    >>> make_policy(PruningSettings(name="fine-pruning", prune=0.5), 10, seed=0).prune_num
    5
    """
    if settings.name not in PRUNINGS:
        raise unknown("pruning", settings.name, PRUNINGS)
    entry = PRUNINGS[settings.name]
    module, _, function = entry.location.partition(":")
    values = {name: getattr(settings, name) for name in entry.settings if name != "protect"}
    if protected is not None:
        values["protected"] = protected
    made: Policy = getattr(importlib.import_module(module), function)(samples, seed=seed, **values)
    return made
