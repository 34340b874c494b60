"""The same recipe under several strategies, side by side; and with several values of a setting.

    Race(recipe, ["full", "lgc"], vary={"strategy.k": [5, 7]})       lanes full, lgc k=5, lgc k=7

A strategy that a setting means nothing to, as K to `full`, runs once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from paceline.drivers.simulated.progress import Progress
from paceline.errors import PacelineError
from paceline.lookup import unknown
from paceline.recipes.assembly import Given, load_data, sized
from paceline.recipes.recipe import Recipe
from paceline.runs.simulation import Result, give_notices, make_run, result_of
from paceline.strategies import STRATEGIES, bare_name
from paceline.strategies.averaging import AVERAGING
from paceline.strategies.averaging.members import SETTINGS
from paceline.user_code import is_code

MOST_SEEDS = 100
MOST_VALUES = 100
NOT_VARIED = {  # a setting, or a whole section -> why no race is over its values
    "seed": "a race over seeds is seeds=, on the command line --seeds",
    "strategy.name": "a race is over strategies in any case: give their names",
    "strategy.on": "give the strategies as NAME@ranks and NAME@server",
    "data.name": "the lanes of a race share their data: run a race for each data set",
    "data.directory": "the lanes of a race share their data: run a race for each folder",
    "data.download": "it changes nothing that a race shows",
    "delay.inject": "it is of real runs",
    "pipeline": "a pipeline is not simulated",
    "server": "it is of real runs",
}
USED_BY = {  # settings outside [strategy] that only some strategies have a use for
    "cluster.late_work": ("fastest-k", "lgc"),
    "cluster.late_blocks": ("lgc",),
    "worker.shares": ("full", "fastest-k", "lgc"),
}

Vary: TypeAlias = Mapping[str, Sequence[Any]]


class RaceError(PacelineError, RuntimeError):
    """A race that is asked for what it cannot do.

    >>> raise RaceError("this race was run already")
    Traceback (most recent call last):
    paceline.runs.race.RaceError: this race was run already
    """


class Race:
    """The same run under several strategies and seeds, side by side; NAME@ranks is a strategy on ranks.

    With `shares`, a list of equal and speed, every strategy races with each; NAME+speed is one of them. With `vary`,
    which has settings by their dotted names and a list of values for each, every strategy races with each value, or
    once if it has no use for the setting.

    Iterating yields (lane, progress), once. Whoever is behind on the cluster's clock goes next, so what one sees while
    it runs is the race as the cluster would have run it. `runs`, `recipes` and `varied`, the values of what was varied,
    have one entry for each lane.

    `data`, `model` and `loss` are objects of your own in place of those that the recipe names, as for `simulate`.

    >>> race = Race(Recipe(rounds=5), ["full", "lgc"])
    >>> for lane, progress in race:
    ...     pass
    >>> [result.strategy for result in race.results]
    ['full', 'lgc']
    >>> Race(Recipe(rounds=5), ["full", "lgc"], vary={"strategy.k": [5, 7]}, timing_only=True).lanes
    ['full', 'lgc k=5', 'lgc k=7']
    """

    def __init__(
        self,
        recipe: Recipe,
        strategies: Sequence[str] = tuple(STRATEGIES),
        *,
        shares: Sequence[str] | None = None,
        vary: Vary | None = None,
        seeds: int = 1,
        data: Any = None,
        model: Any = None,
        loss: Any = None,
        timing_only: bool = False,
    ) -> None:
        given = Given(data=data, model=model, loss=loss)
        recipe = given.named(recipe)
        strategies = [strategies] if isinstance(strategies, str) else strategies
        check_strategies(strategies)
        if not 1 <= seeds <= MOST_SEEDS:
            raise ValueError(f"seeds must be between 1 and {MOST_SEEDS} (seeds={seeds})")
        dataset = None if timing_only or recipe.data.name == "synthetic" else load_data(recipe, given)
        if model is not None and any(key.startswith("model.") for key in vary or {}):
            raise ValueError("the model is given as an object: run a race for each value of a setting of [model]")
        asked, values = zip(*_with_values(with_strategies(recipe, strategies, shares), vary or {}), strict=True)
        self.recipe, entered = sized(recipe, dataset), [sized(each, dataset) for each in asked]
        names = [" ".join([each.label, *_named(value)]) for each, value in zip(entered, values, strict=True)]
        _refuse_repeated(names)  # lgc is lgc@ranks where the recipe says so
        self.recipes = [each.with_seed(recipe.seed + extra) for each in entered for extra in range(seeds)]
        self.varied = [value for value in values for _ in range(seeds)]
        self.lanes = [
            f"{name} {recipe.seed + extra}" if seeds > 1 else name for name in names for extra in range(seeds)
        ]
        # A user's function may make other data of another seed.
        made_by_seed = seeds > 1 and is_code(recipe.data.name) and (given.data is None or callable(given.data))
        shared = None if made_by_seed else dataset
        self.runs = [make_run(each, timing_only=timing_only, dataset=shared, given=given) for each in self.recipes]
        trained = [None if timing_only else each for each in entered]
        give_notices(*zip(asked, trained, strict=True), simulated=True)
        self.rounds = max(getattr(run, "rounds", recipe.rounds) for run in self.runs)
        """The most rounds of any run; not those of the recipe, where that says epochs."""
        self._results: list[Result | None] = [None] * len(self.runs)
        self._began = False

    def __iter__(self) -> Iterator[tuple[int, Progress]]:
        if self._began:
            raise RaceError("this race was run already, or begun: make another Race to run it again")
        self._began = True
        return self._run()

    def _run(self) -> Iterator[tuple[int, Progress]]:
        under_way = {lane: iter(run) for lane, run in enumerate(self.runs)}
        clocks = dict.fromkeys(under_way, 0.0)
        while under_way:
            lane = min(under_way, key=lambda index: (clocks[index], index))
            progress = next(under_way[lane], None)
            if progress is None:
                del under_way[lane]
                self._results[lane] = result_of(self.runs[lane])
            else:
                clocks[lane] = progress.seconds
                yield lane, progress

    @property
    def results(self) -> list[Result]:
        """The results of the runs that have ended."""
        return [result for result in self._results if result is not None]

    @property
    def results_so_far(self) -> list[Result]:
        """The results of all runs, also of those that have not ended."""
        return [result or result_of(run) for result, run in zip(self._results, self.runs, strict=True)]


def with_strategies(recipe: Recipe, strategies: Sequence[str], shares: Sequence[str] | None = None) -> list[Recipe]:
    """Return the recipe under each strategy, and under each of the shares if they are given.

    >>> recipes = with_strategies(Recipe(), ["full", "lgc"], ["equal", "speed"])
    >>> [each.label for each in recipes]
    ['full', 'full+speed', 'lgc', 'lgc+speed']
    """
    if shares is None:
        return [recipe.with_strategy(name) for name in strategies]
    shares = [shares] if isinstance(shares, str) else shares
    _refuse_repeated(shares, "shares")
    for name in strategies:
        if "+" in name:
            raise ValueError(f"{name!r} names its shares; leave them out there, or leave out shares={','.join(shares)}")
    names = [(*name.partition("@"), each) for name in strategies for each in shares]
    return [recipe.with_strategy(f"{name}+{each}{at}{place}") for name, at, place, each in names]


def check_vary(recipe: Recipe, strategies: Sequence[str], shares: Sequence[str] | None, vary: Vary) -> None:
    """Refuse settings that cannot be varied, and values that a strategy that races cannot have.

    >>> check_vary(Recipe(), ["full", "lgc"], None, {"strategy.kk": [5]})
    Traceback (most recent call last):
    ValueError: unknown setting in strategy 'kk'; did you mean 'k'? choose from name, k, warmup_rounds, ...
    >>> check_vary(Recipe(), ["full"], None, {"strategy.k": [5, 7]})
    Traceback (most recent call last):
    ValueError: strategy.k means nothing to full: give a strategy that has a use for it, or leave vary out
    """
    _with_values(with_strategies(recipe, strategies, shares), vary)


def _with_values(recipes: Sequence[Recipe], vary: Vary) -> list[tuple[Recipe, dict[str, Any]]]:
    """Return each recipe with each value of the settings it has a use for, and those values."""
    for key, values in vary.items():
        section = key.partition(".")[0]
        if why := NOT_VARIED.get(key) or NOT_VARIED.get(section):
            raise ValueError(f"{key} is nothing to vary: {why}")
        if isinstance(values, str) or not values:
            raise ValueError(f"vary needs a list of values for {key} ({values!r:.40})")
        if len(values) > MOST_VALUES:
            raise ValueError(f"vary takes at most {MOST_VALUES} values of a setting ({key} has {len(values):,})")
        _refuse_repeated([str(value) for value in values], f"{key} =")
        _check_key(key)
        if not any(_has_use(each, key) for each in recipes):
            names = ", ".join(dict.fromkeys(each.strategy.name for each in recipes))
            raise ValueError(
                f"{key} means nothing to {names}: give a strategy that has a use for it, or leave vary out"
            )
    found = []
    for recipe in recipes:
        keys = [key for key in vary if _has_use(recipe, key)]
        for values in itertools.product(*(vary[key] for key in keys)):
            changed = recipe
            for key, value in zip(keys, values, strict=True):
                changed = _changed(changed, key, value)
            found.append((changed, dict(zip(keys, values, strict=True))))
    return found


def _check_key(key: str) -> None:
    section, dot, setting = key.partition(".")
    parts = {each.name: getattr(Recipe(), each.name) for each in dataclasses.fields(Recipe)}
    sections = [name for name, part in parts.items() if dataclasses.is_dataclass(part)]
    if section not in parts or (section in sections) != bool(dot):
        raise unknown("setting", key, [f"{name}.KEY" if name in sections else name for name in parts])
    if dot and setting not in (names := [each.name for each in dataclasses.fields(parts[section])]):
        raise unknown(f"setting in {section}", setting, names)


def _has_use(recipe: Recipe, key: str) -> bool:
    """Return whether a setting means anything to the strategy of a recipe."""
    name, (section, _, setting) = recipe.strategy.name, key.partition(".")
    if section != "strategy":
        return name in USED_BY.get(key, (name,))
    if name in AVERAGING:
        return setting in SETTINGS[name]
    return setting in (each.name for each in dataclasses.fields(STRATEGIES[name]))


def _changed(recipe: Recipe, key: str, value: Any) -> Recipe:
    section, dot, setting = key.partition(".")
    changes: Any = {section: {setting: value}} if dot else {section: value}
    return recipe.with_settings(**changes)


def _named(values: Mapping[str, Any]) -> list[str]:
    """Return settings as a report names them: k=5."""
    return [f"{key.rpartition('.')[2]}={value}" for key, value in values.items()]


def check_strategies(names: Sequence[str]) -> None:
    """Refuse unknown and repeated strategies; a name may end in @ranks or @server, and have +speed before that.

    >>> check_strategies(["full", "lgd"])
    Traceback (most recent call last):
    ValueError: unknown strategy 'lgd'; did you mean 'lgc'? choose from full, fastest-k, lgc, async, ssgd, ...
    """
    known = (*STRATEGIES, *AVERAGING)
    if not names:
        raise ValueError(f"no strategy given; choose from {', '.join(known)}")
    for name in map(bare_name, names):
        if name not in known:
            raise unknown("strategy", name, known)
    _refuse_repeated(names)


def _refuse_repeated(names: Sequence[str], what: str = "strategy") -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{what} {name!r} is given twice")
