"""What each command does with its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from paceline.cli.lanes import Lanes
from paceline.cli.options import UsageError
from paceline.cli.telling import tell_results
from paceline.recipes import Recipe, read_recipe
from paceline.runs import Race, check_strategies

WITH_K = ("fastest-k", "lgc")


@dataclass(frozen=True)
class Common:
    """Options that every command has."""

    recipe_file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(name="recipe", metavar="[RECIPE]")] = ""
    """A recipe (TOML); without one, the default."""
    json: bool = False
    """Print one JSON document to stdout, and nothing else there."""
    timing_only: bool = False
    """Only the cluster's times: no training, any number of workers."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class RaceOptions(Common):
    """Race several strategies on a simulated cluster, side by side."""

    strategies: str = "full,fastest-k,lgc,async"
    """Who races, with commas between."""
    seeds: int = 1
    """How many seeds, counting up from the recipe's; the table shows means."""
    out: str = "runs/race"
    """Folder for report.html and results.json."""


@dataclass(frozen=True)
class SimulateOptions(Common):
    """Run one recipe on a simulated cluster."""

    out: str = "runs/simulate"
    """Folder for report.html and results.json."""


def race(options: RaceOptions, overrides: dict[str, str]) -> None:
    """`paceline race`."""
    if "strategy.name" in overrides:
        raise UsageError(f"race takes --strategies, with commas between (--strategies {overrides['strategy.name']})")
    names = [name.strip() for name in options.strategies.split(",") if name.strip()]
    check_strategies(names)
    # The recipe's own strategy need not race: its K must not stand in the way, and a bad K of one that does is told.
    with_k = next((name for name in names if name in WITH_K), names[0])
    recipe = _read(options, {**overrides, "strategy.name": with_k}, strategies=names)
    _run(options, recipe, names, seeds=options.seeds, out=Path(options.out))


def simulate(options: SimulateOptions, overrides: dict[str, str]) -> None:
    """`paceline simulate`."""
    recipe = _read(options, overrides)
    out = Path(options.out)
    contest = _run(options, recipe, [recipe.strategy.name], seeds=1, out=out)
    if recipe.pruning.on and not options.timing_only:
        _keep_pruning(contest, out)


def _keep_pruning(contest: Race, out: Path) -> None:
    """Write down what was pruned, for `paceline inspect-pruning`."""
    from paceline.analysis.pruning import record_of_run

    try:
        record_of_run(contest.recipes[0], contest.runs[0]).write(out)
        told = f"who was pruned: paceline inspect-pruning {out}"
    except (ValueError, OSError) as error:  # the results are told; that this cannot be kept does not undo the run
        told = f"cannot keep a record of the pruning in {out}: {error}"
    Console(stderr=True).print(told, soft_wrap=True, highlight=False, markup=False)


def _read(options: Common, overrides: dict[str, str], *, strategies: Sequence[str] = ()) -> Recipe:
    recipe = read_recipe(Path(options.recipe_file) if options.recipe_file else None, overrides)
    for name in strategies:
        recipe.with_strategy(name)  # refuses a K that one of them cannot have
    return recipe


def _run(options: Common, recipe: Recipe, names: Sequence[str], *, seeds: int, out: Path) -> Race:
    notes = Console(stderr=True)
    try:
        out.mkdir(parents=True, exist_ok=True)  # better refused now than after the run
    except OSError as error:
        raise UsageError(f"cannot write results to {out}: {error.strerror or error}; give another --out") from None
    what = "making ready" if options.timing_only else f"loading torch, {recipe.data.name} and {recipe.model.name}"
    with notes.status(what):
        contest = Race(recipe, strategies=names, seeds=seeds, timing_only=options.timing_only)
    try:
        with Lanes(notes, contest.lanes, rounds=recipe.rounds) as lanes:
            for lane, standing in contest:
                lanes.show(lane, standing)
    except KeyboardInterrupt:
        notes.print("stopped: what follows is what was done so far")
        tell_results(recipe, contest.results_so_far, out, notes, as_json=options.json)
        raise
    tell_results(recipe, contest.results, out, notes, as_json=options.json)
    return contest
