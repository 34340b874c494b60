"""The commands of a simulated cluster: `paceline race` and `paceline simulate`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    recipe_options,
    refuse_strategies,
    trust_option,
)
from paceline.cli.output import ResultsNotKept, new_folder, note, show_results
from paceline.cli.progress import RunBars
from paceline.decoding import describe
from paceline.lookup import unknown
from paceline.quantities import unit_examples, with_unit
from paceline.recipes import Recipe
from paceline.runs import Race, Vary, check_strategies, check_vary, with_strategies
from paceline.runs.race import MOST_VALUES
from paceline.settings import convert
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
    vary: str = option(
        "",
        "a race over values of a setting: each strategy with each of them, as strategy.k=5..10 or lr=0.05,0.1",
        metavar="KEY=VALUES",
        shown="nothing varies",
    )
    seeds: int = option(1, "how many seeds, counting up from the recipe's; the table shows means")
    timing_only: bool = option(
        False, "simulate only the cluster's times: nothing is trained, and there may be any number of workers"
    )
    out: str = out_option("report.html and results.json", "runs/race")
    trust: bool = trust_option()
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
    trust: bool = trust_option()
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
    recipe = given_recipe(options.recipe_file, {**overrides, "strategy.name": with_k}, trust=options.trust)
    shares = [name.strip() for name in options.shares.split(",") if name.strip()] or None
    with_strategies(recipe, names, shares)  # raises for a K, or for shares, that a strategy cannot have
    vary = values_to_vary(options.vary) if options.vary else {}
    check_vary(recipe, names, shares, vary)
    _run(options, recipe, names, shares=shares, vary=vary, seeds=options.seeds, out=new_folder(options.out, "race"))


def values_to_vary(text: str) -> dict[str, list[Any]]:
    """Return a setting and its values: numbers from one to another, or a list.

    >>> values_to_vary("strategy.k=5..7"), values_to_vary("lr=0.1,0.2"), values_to_vary("k=5,auto")
    ({'strategy.k': [5, 6, 7]}, {'optimizer.lr': [0.1, 0.2]}, {'strategy.k': [5, 'auto']})
    >>> values_to_vary("strategy.kk=5")
    Traceback (most recent call last):
    paceline.cli.options.UsageError: --vary: unknown setting 'strategy.kk'; did you mean 'strategy.k'? choose from ...
    >>> values_to_vary("k=some")
    Traceback (most recent call last):
    paceline.cli.options.UsageError: --vary: expected a whole number or 'auto' or 'none' for strategy.k, got 'some'
    """
    key, equals, values = text.partition("=")
    flag = f"--{key.strip().replace('_', '-')}"
    known = {each.name: each for each in recipe_options()}
    setting = next((each for each in known.values() if flag in each.flags), None)
    if setting is None:
        section = f"{key.strip().partition('.')[0]}."
        sections = dict.fromkeys(f"{each.path[0]}.KEY" if len(each.path) > 1 else each.name for each in known.values())
        near = difflib.get_close_matches(key.strip(), known, n=3)
        listed = [name for name in known if name.startswith(section)] or [*near, *sections]
        raise UsageError(f"--vary: {unknown('setting', key.strip(), listed)}")
    words = _numbers_between(values) or [word.strip() for word in values.split(",") if word.strip()]
    if not equals or not words:
        raise UsageError(f"--vary: expected {key}=VALUES, such as {key}=5..10 or {key}=5,7, got {text!r:.60}")
    found = []
    for word in words:
        try:
            found.append(convert(with_unit(setting.path[-1], word), setting.hint))
        except ValueError:
            expected = describe(setting.hint) + unit_examples(setting.path[-1])
            raise UsageError(f"--vary: expected {expected} for {setting.name}, got {word!r:.60}") from None
    return {setting.name: found}


def _numbers_between(text: str) -> list[str]:
    """Return the whole numbers from one to another, both included; none if the text is no such range."""
    between = re.fullmatch(r"\s*(-?\d{1,9})\s*\.\.\s*(-?\d{1,9})\s*", text)
    if between is None:
        return []
    first, last = map(int, between.groups())
    if not first <= last < first + MOST_VALUES:
        raise UsageError(f"--vary: expected at most {MOST_VALUES} numbers, the first below the last, got {text!r:.60}")
    return [str(number) for number in range(first, last + 1)]


def simulate(options: SimulateOptions, overrides: dict[str, str]) -> None:
    recipe = given_recipe(options.recipe_file, overrides, trust=options.trust)
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
    vary: Vary | None = None,
) -> Race:
    notes = Console(stderr=True)
    loading = "making ready" if options.timing_only else f"loading torch, {recipe.data.name} and {recipe.model.name}"
    with notes.status(loading):
        running = Race(recipe, strategies=names, shares=shares, vary=vary, seeds=seeds, timing_only=options.timing_only)
    try:
        with RunBars(notes, running.lanes, rounds=running.rounds) as bars:
            for lane, progress in running:
                bars.show(lane, progress)
    except KeyboardInterrupt:
        notes.print("stopped: what follows is what was done so far")
        show_results(running.recipe, running.results_so_far, out, notes, as_json=options.json, varied=running.varied)
        raise
    show_results(running.recipe, running.results, out, notes, as_json=options.json, varied=running.varied)
    return running
