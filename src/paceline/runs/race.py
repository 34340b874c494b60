"""The same recipe under several strategies, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.drivers.simulated.progress import Progress
from paceline.lookup import unknown
from paceline.recipes.assembly import Given, load_data, sized
from paceline.recipes.recipe import Recipe
from paceline.runs.simulation import Result, give_notices, make_run, result_of
from paceline.strategies import STRATEGIES, bare_name
from paceline.strategies.averaging import AVERAGING
from paceline.user_code import is_code

MOST_SEEDS = 100


class Race:
    """The same run under several strategies and seeds, side by side; NAME@ranks is a strategy on ranks.

    With `shares`, a list of equal and speed, every strategy races with each; NAME+speed is one of them.

    Iterating yields (lane, progress). Whoever is behind on the cluster's clock goes next, so what one sees while it
    runs is the race as the cluster would have run it. `runs` and `recipes` have one entry for each lane.

    `data`, `model` and `loss` are objects of your own in place of those that the recipe names, as for `simulate`.

    >>> race = Race(Recipe(rounds=5), ["full", "lgc"])
    >>> for lane, progress in race:
    ...     pass
    >>> [result.strategy for result in race.results]
    ['full', 'lgc']
    """

    def __init__(
        self,
        recipe: Recipe,
        strategies: Sequence[str] = tuple(STRATEGIES),
        *,
        shares: Sequence[str] | None = None,
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
        asked = with_strategies(recipe, strategies, shares)
        self.recipe, entered = sized(recipe, dataset), [sized(each, dataset) for each in asked]
        _refuse_repeated([each.label for each in entered])  # lgc is lgc@ranks where the recipe says so
        self.recipes = [each.with_seed(recipe.seed + extra) for each in entered for extra in range(seeds)]
        self.lanes = [f"{each.label} {each.seed}" if seeds > 1 else each.label for each in self.recipes]
        # A user's function may make other data of another seed.
        made_by_seed = seeds > 1 and is_code(recipe.data.name) and (given.data is None or callable(given.data))
        shared = None if made_by_seed else dataset
        self.runs = [make_run(each, timing_only=timing_only, dataset=shared, given=given) for each in self.recipes]
        trained = [None if timing_only else each for each in entered]
        give_notices(*zip(asked, trained, strict=True), simulated=True)
        self.rounds = max(getattr(run, "rounds", recipe.rounds) for run in self.runs)
        """The most rounds of any run; not those of the recipe, where that says epochs."""
        self._results: list[Result | None] = [None] * len(self.runs)

    def __iter__(self) -> Iterator[tuple[int, Progress]]:
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
