"""The commands of a simulated cluster: `paceline race` and `paceline simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from paceline.cli.options import (
    RECIPE_FILE,
    UsageError,
    argument,
    debug_option,
    given_recipe,
    json_option,
    option,
    out_option,
    refuse_strategies,
)
from paceline.cli.output import ResultsNotKept, new_folder, note, show_results
from paceline.cli.progress import RunBars
from paceline.recipes import Recipe
from paceline.runs import Race, check_strategies, with_strategies
from paceline.strategies import bare_name

WITH_K = ("fastest-k", "lgc")


@dataclass(frozen=True)
class RaceOptions:
    """Race strategies on a simulated cluster."""

    recipe_file: str = argument("[RECIPE]", RECIPE_FILE, default="")
    strategies: str = option(
        "full,fastest-k,lgc,async",
        "the strategies that race, with commas between; NAME@ranks: the ranks of a launch add up, without a server",
        metavar="LIST",
    )
    shares: str = option(
        "",
        "equal,speed: each strategy with the same batch for every worker, and with shares by speed",
        metavar="LIST",
        shown="as the recipe says",
    )
    seeds: int = option(1, "how many seeds, counting up from the recipe's; the table shows means")
    timing_only: bool = option(
        False, "simulate only the cluster's times: nothing is trained, and there may be any number of workers"
    )
    out: str = out_option("report.html and results.json", "runs/race")
    json: bool = json_option()
    debug: bool = debug_option()


@dataclass(frozen=True)
class SimulateOptions:
    """Run one recipe on a simulated cluster."""

    recipe_file: str = argument("[RECIPE]", RECIPE_FILE, default="")
    timing_only: bool = option(
        False, "simulate only the cluster's times: nothing is trained, and there may be any number of workers"
    )
    out: str = out_option("report.html and results.json", "runs/simulate")
    json: bool = json_option()
    debug: bool = debug_option()


def race(options: RaceOptions, overrides: dict[str, str]) -> None:
    if "strategy.name" in overrides:
        raise UsageError(f"race takes --strategies, with commas between (--strategies {overrides['strategy.name']})")
    refuse_strategies(options.recipe_file, "--strategies")
    names = [name.strip() for name in options.strategies.split(",") if name.strip()]
    check_strategies(names)
    # The recipe's own strategy need not race, so its K must not stand in the way; a bad K of one that races is refused.
    bare = [bare_name(name) for name in names]
    with_k = next((name for name in bare if name in WITH_K), bare[0])
    recipe = given_recipe(options.recipe_file, {**overrides, "strategy.name": with_k})
    shares = [name.strip() for name in options.shares.split(",") if name.strip()] or None
    with_strategies(recipe, names, shares)  # raises for a K, or for shares, that a strategy cannot have
    _run(options, recipe, names, shares=shares, seeds=options.seeds, out=new_folder(options.out, "race"))


def simulate(options: SimulateOptions, overrides: dict[str, str]) -> None:
    recipe = given_recipe(options.recipe_file, overrides)
    out = new_folder(options.out, "simulate")
    finished = _run(options, recipe, [recipe.strategy.name], seeds=1, out=out)
    if recipe.pruning.on and not options.timing_only:
        _write_pruning_record(finished, out)


def _write_pruning_record(finished: Race, out: Path) -> None:
    """Write the samples that were pruned, for `paceline inspect pruning`."""
    from paceline.analysis.pruning import record_of_run

    try:
        record_of_run(finished.recipes[0], finished.runs[0]).write(out)
        message = f"who was pruned: paceline inspect pruning {out}"
    except OSError as error:
        raise ResultsNotKept(out, error) from error
    except ValueError as error:  # the results are printed; that there is no such record does not undo the run
        message = f"cannot keep a record of the pruning in {out}: {error}"
    note(Console(stderr=True), message)


def _run(
    options: RaceOptions | SimulateOptions,
    recipe: Recipe,
    names: Sequence[str],
    *,
    seeds: int,
    out: Path,
    shares: Sequence[str] | None = None,
) -> Race:
    notes = Console(stderr=True)
    loading = "making ready" if options.timing_only else f"loading torch, {recipe.data.name} and {recipe.model.name}"
    with notes.status(loading):
        running = Race(recipe, strategies=names, shares=shares, seeds=seeds, timing_only=options.timing_only)
    try:
        with RunBars(notes, running.lanes, rounds=running.rounds) as bars:
            for lane, progress in running:
                bars.show(lane, progress)
    except KeyboardInterrupt:
        notes.print("stopped: what follows is what was done so far")
        show_results(running.recipe, running.results_so_far, out, notes, as_json=options.json)
        raise
    show_results(running.recipe, running.results, out, notes, as_json=options.json)
    return running
