"""A whole run as one frozen value."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from paceline.data import DATASETS
from paceline.data.pruning import PruningSettings
from paceline.drivers.simulated.cluster import check_late_blocks
from paceline.drivers.simulated.network import Network
from paceline.lookup import unknown
from paceline.optim import OptimizerSettings
from paceline.pipeline.settings import PipelineSettings
from paceline.recipes.sections import (
    ClusterSection,
    CodecSection,
    DataSection,
    DelaySection,
    ModelSection,
    ServerSection,
    StrategySection,
    WorkerSection,
)
from paceline.renaming import RENAMED_SETTINGS
from paceline.settings import Checked, SettingError, setting
from paceline.strategies import STRATEGIES
from paceline.strategies.averaging import AVERAGING
from paceline.traces.records import labelled_with_shares


class RecipeChanges(TypedDict, total=False):
    """The keywords of `Recipe.with_settings`: a recipe's settings, and of a section a dict of those that change."""

    seed: int
    rounds: int
    epochs: int | None
    target_loss: float | None
    target_accuracy: float | None
    evaluate_every: int
    evaluation_samples: int
    data: Mapping[str, Any] | DataSection
    model: Mapping[str, Any] | ModelSection
    worker: Mapping[str, Any] | WorkerSection
    optimizer: Mapping[str, Any] | OptimizerSettings
    cluster: Mapping[str, Any] | ClusterSection
    delay: Mapping[str, Any] | DelaySection
    network: Mapping[str, Any] | Network
    strategy: Mapping[str, Any] | StrategySection
    codec: Mapping[str, Any] | CodecSection
    pruning: Mapping[str, Any] | PruningSettings
    pipeline: Mapping[str, Any] | PipelineSettings
    server: Mapping[str, Any] | ServerSection


@dataclass(frozen=True, kw_only=True)
class Recipe(Checked):
    """A whole run: what is trained, on which cluster, under which strategy.

    >>> recipe = Recipe(rounds=100)
    >>> recipe.strategy.name, recipe.cluster.workers
    ('lgc', 10)
    >>> Recipe(strategy=StrategySection(k=12))
    Traceback (most recent call last):
    paceline.settings.SettingError: k must be between 1 and workers (k=12, workers=10); give k = 10 or less, ...
    """

    seed: int = setting(0, "everything random follows from it", least=0, most=2**53, alias="seed")
    rounds: int = setting(
        300,
        "rounds to run; where workers do not keep step, one round is as many gradients as workers",
        least=1,
        most=10**7,
    )
    epochs: int | None = setting(
        None,
        "in place of rounds: passes of every worker over its shard; pruned ones, in simulated runs, take fewer rounds",
        least=1,
        most=10**6,
    )
    target_loss: float | None = setting(
        0.05, "training loss whose arrival is reported; none: no target", above=0, most=1e6
    )
    target_accuracy: float | None = setting(
        None, "test accuracy whose arrival is reported, from 0 to 1; none: no target", above=0, most=1
    )
    evaluate_every: int = setting(10, "rounds between two measurements of losses and accuracy", least=1, most=10**7)
    evaluation_samples: int = setting(
        5000, "samples measured at most, of training and of test data", least=1, most=10**9
    )
    data: DataSection = field(default_factory=DataSection)
    model: ModelSection = field(default_factory=ModelSection)
    worker: WorkerSection = field(default_factory=WorkerSection)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    delay: DelaySection = field(default_factory=DelaySection)
    network: Network = field(default_factory=Network)
    strategy: StrategySection = field(default_factory=StrategySection)
    codec: CodecSection = field(default_factory=CodecSection)
    pruning: PruningSettings = field(default_factory=PruningSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    server: ServerSection = field(default_factory=ServerSection)

    def __post_init__(self) -> None:
        super().__post_init__()
        k, workers = self.strategy.k, self.cluster.workers
        if isinstance(k, int) and self.strategy.name in ("fastest-k", "lgc") and k > workers:
            raise SettingError(
                ("strategy", "k"),
                f"k must be between 1 and workers (k={k}, workers={workers}); give k = {workers} or less, or auto",
                beside=("cluster", "workers"),
            )
        if self.pipeline.on and self.codec.plan != "auto":
            raise SettingError(
                ("codec", "plan"),
                f"the replicas of a pipeline take the quickest plan (plan={self.codec.plan}); leave plan out",
                beside=("pipeline", "on"),
            )
        if self.strategy.rebase is True and self.strategy.name in ("bmuf", "diloco") and not self.strategy.overlap:
            raise SettingError(
                ("strategy", "rebase"),
                f"rebase needs overlap: {self.strategy.name} waits for its averages, so nothing is ever in flight",
                beside=("strategy", "overlap"),
            )
        slow = self.delay.slow_workers
        if self.delay.name == "slow-worker" and slow > workers:
            raise SettingError(
                ("delay", "slow_workers"),
                f"slow_workers must be between 0 and workers (slow_workers={slow}, workers={workers})",
                beside=("cluster", "workers"),
            )
        most = self.server.most_workers
        if 0 < most < workers:
            raise SettingError(
                ("server", "most_workers"),
                f"most_workers must be at least workers (most_workers={most}, workers={workers}), or 0",
                beside=("cluster", "workers"),
            )
        batch, parts = self.worker.batch_size, self.pipeline.microbatches
        if self.pipeline.on and batch % parts:
            raise SettingError(
                ("pipeline", "microbatches"),
                f"microbatches must divide the batch evenly (microbatches={parts}, batch_size={batch})",
                beside=("worker", "batch_size"),
            )
        try:
            check_late_blocks(self.cluster.late_blocks, late_work=self.cluster.late_work, blocks=self.worker.blocks)
        except ValueError as error:
            beside = ("cluster", "late_work") if self.cluster.late_work == "partial" else ("worker", "blocks")
            raise SettingError(("cluster", "late_blocks"), str(error), beside=beside) from None
        if self.epochs is not None and self.pipeline.on:
            raise SettingError(
                ("epochs",),
                f"the budget of a pipeline is rounds (epochs={self.epochs}); give rounds",
                beside=("pipeline", "stages"),
            )
        self._refuse_shares()
        held, classes = self.data.classes_per_worker, self.classes
        if held is not None and classes is not None and self.data.split in ("auto", "non-iid") and held > classes:
            raise SettingError(
                ("data", "classes_per_worker"),
                f"classes_per_worker must be between 1 and classes (classes_per_worker={held}, classes={classes})",
            )

    def _refuse_shares(self) -> None:
        """Refuse shares by speed where they cannot be right, or where there is nothing that they could help."""
        name = self.strategy.name
        if self.worker.shares == "equal":
            return
        if self.pipeline.on:
            why, beside = (
                "ranks of a pipeline are stages, not workers with batches of their own",
                ("pipeline", "stages"),
            )
        elif name in AVERAGING:
            beside = ("strategy", "name")
            why = f"{name} averages steps on batches of one size; full with on = ranks is ssgd with shares by speed"
        elif name == "async":
            why, beside = "async waits for nobody, so a slow worker holds up nobody", ("strategy", "name")
        elif name in STRATEGIES and "shares" not in (each.name for each in dataclasses.fields(STRATEGIES[name])):
            why, beside = f"{name} has no shares", ("strategy", "name")
        elif self.pruning.on:
            why, beside = "the batches of a pruned shard are of one size", ("pruning", "name")
        else:
            return
        raise SettingError(
            ("worker", "shares"), f"{why} (shares={self.worker.shares}); give shares = equal", beside=beside
        )

    @property
    def label(self) -> str:
        """The strategy with its shares and its place, as tables and charts name it.

        >>> Recipe().label, Recipe().with_strategy("lgc+speed@ranks").label
        ('lgc', 'lgc+speed@ranks')
        """
        return labelled_with_shares(self.strategy.label, {"worker": {"shares": self.worker.shares}})

    @property
    def k(self) -> int | Literal["auto"]:
        """The gradients that close a round of fastest-k and lgc: as given, or seven tenths of the workers.

        >>> Recipe().k, Recipe().with_settings(cluster={"workers": 4}).k
        (7, 3)
        """
        return -(-7 * self.cluster.workers // 10) if self.strategy.k is None else self.strategy.k

    @property
    def classes(self) -> int | None:
        """The classes of a data set that is known by name; None for a user's own, which must be loaded first.

        >>> Recipe().classes
        10
        """
        entry = DATASETS.get(self.data.name)
        return None if entry is None else entry.classes or self.data.classes

    @classmethod
    def load(cls, path: str | Path, *, trust: bool = False) -> Recipe:
        """Read a recipe from a TOML file; what it does not name keeps its default.

        Args:
            path: the file.
            trust: take it though it names code (`module:name`), which runs as soon as the recipe is used.

        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "my.toml")
        >>> _ = file.write_text('rounds = 20\\n[strategy]\\nk = 3\\n')
        >>> Recipe.load(file).strategy.k
        3
        """
        from paceline.recipes.reading import read_recipe

        return read_recipe(Path(path), trust=trust)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Recipe:
        """Return the recipe in plain values of a trace, a checkpoint or a message; what they lack is the default.

        >>> Recipe.from_document({"rounds": 20, "strategy": {"k": 3}}).strategy.k
        3
        """
        from paceline.recipes.reading import recipe_from_document

        return recipe_from_document(document)

    def to_document(self) -> dict[str, Any]:
        """Return the recipe as nested plain values that JSON can hold: an infinite number is null.

        >>> Recipe.from_document(Recipe(rounds=3).to_document()) == Recipe(rounds=3)
        True
        """
        return {
            name: {inner: _plain(entry) for inner, entry in value.items()} if isinstance(value, dict) else _plain(value)
            for name, value in self.to_dict().items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as nested plain values.

        >>> Recipe().to_dict()["strategy"]["name"]
        'lgc'
        """
        return dataclasses.asdict(self)

    def with_settings(self, **changes: Unpack[RecipeChanges]) -> Recipe:
        """Return the same run with other settings; those of a section are given as a dict.

        >>> Recipe().with_settings(rounds=60, strategy={"k": "auto"}).strategy
        StrategySection(name='lgc', k='auto', warmup_rounds=0, ...)
        """
        known = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        for name, value in changes.items():
            if name not in known:
                raise _belongs(name, value) or unknown("setting", name, known)
            known[name] = value if not isinstance(value, Mapping) else _changed(known[name], value, section=name)
        return Recipe(**known)

    def with_strategy(self, name: str) -> Recipe:
        """Return the same run under another strategy; NAME@ranks is one on ranks, NAME+speed one with such shares.

        >>> Recipe().with_strategy("full").strategy.name, Recipe().with_strategy("full@ranks").strategy.on
        ('full', 'ranks')
        >>> Recipe().with_strategy("full+speed").worker.shares
        'speed'
        """
        name, at, place = name.partition("@")
        name, plus, shares = name.partition("+")
        if not at:  # async has a server, whatever the recipe says of the others
            place = "server" if name == "async" else self.strategy.on
        worker = {"shares": shares} if plus else {}
        return self.with_settings(strategy={"name": name, "on": place}, worker=worker)

    def with_seed(self, seed: int) -> Recipe:
        """Return the same run with another seed.

        >>> Recipe().with_seed(3).seed
        3
        """
        return dataclasses.replace(self, seed=seed)


def section_with(name: str) -> str | None:
    """Return the one section that has a setting of this name, "" for a recipe's own; None for none or several.

    >>> section_with("workers"), section_with("rounds"), section_with("name")
    ('cluster', '', None)
    """
    fields: dict[str, Any] = {field.name: field.default_factory for field in dataclasses.fields(Recipe)}
    sections = {key: kind for key, kind in fields.items() if dataclasses.is_dataclass(kind)}
    if name in fields:
        return None if name in sections else ""
    found = [key for key, kind in sections.items() if name in {field.name for field in dataclasses.fields(kind)}]
    return found[0] if len(found) == 1 else None


def _belongs(name: str, value: object) -> ValueError | None:
    """Return the error for a setting that was given without its section, if exactly one has it."""
    section = section_with(name)
    if not section:
        return None
    return ValueError(f"{name!r} is a setting of {section}: use with_settings({section}={{{name!r}: {value!r:.40}}})")


def _names_sections(kind: type[Recipe]) -> type[Recipe]:
    """Let a recipe that is made with a section's setting say where that setting belongs."""
    init = kind.__init__

    @functools.wraps(init)
    def checked(self: Recipe, *places: Any, **settings: Any) -> None:
        for name, value in settings.items():
            if name not in kind.__dataclass_fields__ and (error := _belongs(name, value)) is not None:
                raise TypeError(str(error).replace("use ", "use Recipe()."))
        init(self, *places, **settings)

    kind.__init__ = checked  # type: ignore[method-assign]
    return kind


_names_sections(Recipe)


def _changed(before: Any, changes: Mapping[str, Any], *, section: str) -> Any:
    """Return a section with other settings; one by its old name is warned of."""
    names = [each.name for each in dataclasses.fields(before)] if dataclasses.is_dataclass(before) else []
    for name in changes:
        if (section, name) in RENAMED_SETTINGS:
            new = RENAMED_SETTINGS[section, name][1]
            changes = {new if each == name else each: value for each, value in changes.items()}
            warnings.warn(
                f"{section}.{name} is called {new} now; the old name goes with the next release",
                FutureWarning,
                stacklevel=3,
            )
        elif name not in names:
            raise unknown(f"setting in {section}", name, names)
    return dataclasses.replace(before, **changes)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return None if isinstance(value, float) and math.isinf(value) else value
