"""Recipes carried out under the simulator: one run, or the same run under several strategies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.drivers.simulated.async_timing import AsyncTimes
from paceline.drivers.simulated.progress import Progress
from paceline.drivers.simulated.timing import RoundTimes
from paceline.lookup import unknown
from paceline.recipes.assembly import load_data, make_model, make_setup, make_simulation
from paceline.recipes.recipe import Recipe
from paceline.strategies import STRATEGIES, Async
from paceline.traces import Summary, Trace, summarise

if TYPE_CHECKING:
    import torch

    from paceline.data import Dataset

MOST_GRADIENTS_BY_EVENT = 5_000_000
MOST_SEEDS = 100


class Run(Protocol):
    """A run that is watched by iterating over it."""

    def __iter__(self) -> Iterator[Progress]:
        """Where it stands, round by round."""

    @property
    def trace(self) -> Trace:
        """What happened so far."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to, and all that happened in it.

    >>> result = simulate(Recipe(rounds=5))
    >>> result.rounds, result.loss == result.trace.evaluations[-1].loss
    (5, True)
    """

    summary: Summary
    trace: Trace
    parameters: torch.Tensor | None = None

    @property
    def strategy(self) -> str:
        """The strategy's name."""
        return self.summary.strategy

    @property
    def rounds(self) -> int:
        """Rounds run."""
        return self.summary.rounds

    @property
    def seconds(self) -> float:
        """The cluster's time."""
        return self.summary.seconds

    @property
    def loss(self) -> float | None:
        """Mean loss on the training data at the end; None if nothing was trained or training diverged."""
        return self.summary.loss

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the test data at the end; None if nothing was trained or training diverged."""
        return self.summary.accuracy

    @property
    def seconds_to_target(self) -> float | None:
        """When the target loss was reached; None if it was not."""
        return self.summary.seconds_to_target


def simulate(
    recipe: Recipe, *, timing_only: bool = False, on_progress: Callable[[Progress], None] | None = None
) -> Result:
    """Carry out a recipe on a simulated cluster. The same recipe gives the same result, bit for bit.

    >>> simulate(Recipe(rounds=3), timing_only=True).loss is None
    True
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"simulate takes a Recipe, not a {type(recipe).__name__}; Recipe.load reads one from a file")
    run = make_run(recipe, timing_only=timing_only)
    for progress in run:
        if on_progress is not None:
            on_progress(progress)
    return result_of(run)


def result_of(run: Run) -> Result:
    """What a run that has been iterated over came to."""
    trace = run.trace
    learner = getattr(run, "learner", None)
    parameters = learner.parameters.clone() if learner is not None else None
    return Result(summary=summarise(trace), trace=trace, parameters=parameters)


def make_run(recipe: Recipe, *, timing_only: bool = False, dataset: Dataset | None = None) -> Run:
    """A run of a recipe that has not begun.

    >>> [progress.round for progress in make_run(Recipe(rounds=2), timing_only=True)]
    [1, 2]
    """
    if timing_only:
        return _make_timing(recipe)
    return make_simulation(recipe, load_data(recipe) if dataset is None else dataset)


def _make_timing(recipe: Recipe) -> Run:
    setup = make_setup(recipe)
    if not setup.network.free:
        return _make_timing_by_event(recipe)
    return AsyncTimes(setup) if isinstance(setup.strategy, Async) else RoundTimes(setup)


def _make_timing_by_event(recipe: Recipe) -> Run:
    """With limited bandwidth workers wait for each other's messages, and only the event queue knows for how long."""
    from paceline.drivers.simulated.simulation import Simulation
    from paceline.workers.flat import FlatModel

    gradients = recipe.cluster.workers * recipe.rounds
    if gradients > MOST_GRADIENTS_BY_EVENT:
        raise ValueError(
            f"timing with limited bandwidth plays every gradient: workers x rounds must be at most "
            f"{MOST_GRADIENTS_BY_EVENT:,} (it is {gradients:,}); lower one, or leave the bandwidth unlimited"
        )
    model = FlatModel(make_model(recipe, load_data(recipe)))
    return Simulation(make_setup(recipe), message_bytes=model.message_bytes)


class Race:
    """The same run under several strategies and seeds, side by side.

    Whoever is behind on the cluster's clock goes next, so what one sees while it runs is the race as the cluster
    would have run it.

    >>> race = Race(Recipe(rounds=5), strategies=["full", "lgc"])
    >>> for lane, progress in race:
    ...     pass
    >>> [result.strategy for result in race.results]
    ['full', 'lgc']
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        strategies: Sequence[str] = tuple(STRATEGIES),
        seeds: int = 1,
        timing_only: bool = False,
    ) -> None:
        strategies = [strategies] if isinstance(strategies, str) else strategies
        check_strategies(strategies)
        if not 1 <= seeds <= MOST_SEEDS:
            raise ValueError(f"seeds must be between 1 and {MOST_SEEDS} (seeds={seeds})")
        entries = [(name, recipe.seed + extra) for name in strategies for extra in range(seeds)]
        self.recipes = [recipe.with_strategy(name).with_seed(seed) for name, seed in entries]
        dataset = None if timing_only or recipe.data.name == "synthetic" else load_data(recipe)
        self.lanes = [f"{name} {seed}" if seeds > 1 else name for name, seed in entries]
        self._runs = [make_run(each, timing_only=timing_only, dataset=dataset) for each in self.recipes]
        self._results: list[Result | None] = [None] * len(self._runs)

    def __iter__(self) -> Iterator[tuple[int, Progress]]:
        under_way = {lane: iter(run) for lane, run in enumerate(self._runs)}
        clocks = dict.fromkeys(under_way, 0.0)
        while under_way:
            lane = min(under_way, key=lambda index: (clocks[index], index))
            progress = next(under_way[lane], None)
            if progress is None:
                del under_way[lane]
                self._results[lane] = result_of(self._runs[lane])
            else:
                clocks[lane] = progress.seconds
                yield lane, progress

    @property
    def results(self) -> list[Result]:
        """The results of the runs that have ended."""
        return [result for result in self._results if result is not None]

    @property
    def results_so_far(self) -> list[Result]:
        """What all runs have come to, also those that have not ended."""
        return [result or result_of(run) for result, run in zip(self._results, self._runs, strict=True)]


def check_strategies(names: Sequence[str]) -> None:
    """Refuse unknown and repeated strategies.

    >>> check_strategies(["full", "lgd"])
    Traceback (most recent call last):
    ValueError: unknown strategy 'lgd'; did you mean 'lgc'? choose from full, fastest-k, lgc, async
    """
    if not names:
        raise ValueError(f"no strategy given; choose from {', '.join(STRATEGIES)}")
    for name in names:
        if name not in STRATEGIES:
            raise unknown("strategy", name, STRATEGIES)
        if list(names).count(name) > 1:
            raise ValueError(f"strategy {name!r} is given twice")


def as_document(recipe: Recipe, results: Sequence[Result]) -> dict[str, object]:
    """The machine-readable form of results; what cannot be written in JSON (infinite bandwidth) becomes null.

    >>> sorted(as_document(Recipe(), []))
    ['recipe', 'results']
    """
    return {
        "recipe": _finite(recipe.to_dict()),
        "results": [
            dataclasses.asdict(result.summary)
            | {"late_work": result.trace.late_work, "clock": result.trace.clock, "diverged": result.trace.diverged}
            for result in results
        ],
    }


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return None
    return value
