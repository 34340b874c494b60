"""`paceline plan`: where to cut a recipe's model into stages, and what a step will take, before anything is trained."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from paceline.cli.options import RecipeFile, UsageError, given_recipe
from paceline.cli.output import ResultsNotKept, new_folder, note, write_result
from paceline.cli.progress import step_bar
from paceline.files import write_file
from paceline.quantities import rate_in_bytes, size_in_bytes
from paceline.recipes import Recipe, read_recipe
from paceline.terminal import can_print, printable

if TYPE_CHECKING:
    from paceline.pipeline.plan import Plan
    from paceline.pipeline.settings import PipelineSettings

STAGES = "4"  # where neither the recipe nor an option says how many
LEAST_WIDTH, MOST_WIDTH = 40, 80
PAGE, RESULTS, PLAN = "report.html", "results.json", "plan.json"


def _setting(metavar: str, default: object) -> Any:
    """Declare an option that is text, empty unless it is given; the help says what empty stands for."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"[{default}]")


@dataclass(frozen=True)
class PlanOptions:
    """Show where to cut a model into stages, and what a step will take; nothing is trained."""

    recipe_file: RecipeFile = ""
    """A recipe (TOML); without one, the default. Its [pipeline] is planned: --stages, --microbatches and so on."""
    schedule: Annotated[str, _setting("NAME", "the recipe's")] = ""
    """gpipe, 1f1b, interleaved or zero-bubble; the others are predicted as well."""
    chunks: Annotated[str, _setting("INT", "the recipe's")] = ""
    """interleaved: pieces of each stage."""
    memory: Annotated[str, _setting("SIZE", "no limit")] = ""
    """What the model may take of each device: 500MB, 2GB."""
    bandwidth: Annotated[str, _setting("RATE", "not counted")] = ""
    """Of the link between stages: 1Gbit/s, 125MB/s."""
    latency_ms: Annotated[str, _setting("NUMBER", 0)] = ""
    """Of the link between stages, in milliseconds."""
    speeds: Annotated[str, _setting("LIST", "all alike")] = ""
    """Speeds of the devices, such as 1,1,0.5,2: one of 2 takes half the time that is measured here."""
    optimizer_states: Annotated[str, _setting("NUMBER", "those of the recipe's optimiser")] = ""
    """Numbers that the optimiser keeps for each weight."""
    repeats: int = 5
    """How often each layer is measured."""
    threads: int = 1
    """torch's threads while layers are measured: as many as a rank will have."""
    load: str = ""
    """A plan that was saved, instead of a recipe: placed anew for the options, without measuring."""
    save: str = ""
    """File for the plan, which paceline.Plan.load reads [plan.json in the folder]."""
    out: str = ""
    """Folder for report.html, results.json and plan.json [runs/plan, or the next that is free]."""
    json: bool = False
    """Print one JSON document to stdout, and nothing else there."""
    debug: bool = False
    """Show the traceback of an error."""


def plan(options: PlanOptions, overrides: dict[str, str]) -> None:
    from paceline.analysis.pipeline_plan import check_options, plan_conditions, plan_document

    numbers: dict[str, Any] = {"speeds": _speeds(options.speeds), "states": _states(options.optimizer_states)}
    wanted = {**overrides, **_pipeline_overrides(options)}
    saved, settings, recipe = _loaded(options, wanted) if options.load else (None, *_read(options, wanted))
    check_options(settings, **numbers, repeats=options.repeats, threads=options.threads)
    notes, file = Console(stderr=True), _plan_file(options)
    out = new_folder(options.out, "plan")
    file = file or out / PLAN
    with step_bar(notes, "loading torch") as update:
        if saved is not None:
            made = _revised(saved, settings, numbers, given=set(wanted))
        else:
            made = _measured(recipe, options, numbers, update)
        update(description="predicting steps", completed=0, total=None)
        conditions = plan_conditions(made, recipe, threads=options.threads, source=options.load)
        results = plan_document(made, conditions=conditions, recipe=recipe)
    # Files first: whoever reads the output may stop reading.
    written = _write(made, results, out, file)
    if options.json:
        print(_as_json(results))
    else:
        _print(made, conditions)
    if isinstance(written, ResultsNotKept):
        raise written
    note(notes, written)


# -- what is asked for -------------------------------------------------------------------------------------------------


def _pipeline_overrides(options: PlanOptions) -> dict[str, str]:
    """Return the options that are settings of [pipeline] in other units, as texts of those settings."""
    given = {"pipeline.schedule": options.schedule, "pipeline.chunks": options.chunks}
    given["pipeline.latency_ms"] = options.latency_ms
    if options.memory:
        given["pipeline.memory_mb"] = repr(size_in_bytes("--memory", options.memory) / 1e6)
    if options.bandwidth:
        given["pipeline.bandwidth_mbit"] = repr(rate_in_bytes("--bandwidth", options.bandwidth) / 125e3)
    return {name: text for name, text in given.items() if text}


def _read(options: PlanOptions, wanted: dict[str, str]) -> tuple[PipelineSettings, Recipe]:
    """Read the recipe; one without a pipeline gets one."""
    if "pipeline.stages" not in wanted:
        alone = {"pipeline.memory_mb", "pipeline.chunks", "pipeline.schedule"}  # what does not say how many
        if (
            given_recipe(
                options.recipe_file, {name: text for name, text in wanted.items() if name not in alone}
            ).pipeline.stages
            == 1
        ):
            wanted = {**wanted, "pipeline.stages": str(len(_speeds(options.speeds)) or STAGES)}
    recipe = given_recipe(options.recipe_file, wanted)
    return recipe.pipeline, recipe


def _loaded(options: PlanOptions, wanted: dict[str, str]) -> tuple[Plan, PipelineSettings, None]:
    """Read a saved plan, and the settings by which it is to be placed now: its own where none are given."""
    others = [name for name in wanted if not name.startswith("pipeline.")]
    if options.recipe_file or others:
        what = options.recipe_file or f"--{others[0].replace('_', '-')}"
        raise UsageError(f"--load is instead of a recipe: leave out {what}, or --load")
    from paceline.pipeline.plan import Plan

    saved = Plan.load(options.load)
    same = wanted.get("pipeline.schedule", saved.schedule) == saved.schedule
    own = {
        "pipeline.stages": str(len(_speeds(options.speeds)) or saved.stages),
        "pipeline.microbatches": str(saved.microbatches),
        "pipeline.schedule": saved.schedule,
        "pipeline.chunks": str(saved.chunks if same else 0),
        "worker.batch_size": str(saved.batch.samples),
        "worker.blocks": "1",
    }
    return saved, read_recipe(None, {**own, **wanted}).pipeline, None


def _speeds(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UsageError(
            f"--speeds must be numbers above 0 with commas between, such as 1,1,0.5 (found {text!r})"
        ) from None


def _states(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        raise UsageError(f"--optimizer-states must be a number of at least 0 (found {text!r})") from None


def _plan_file(options: PlanOptions) -> Path | None:
    """Return the file that was named for the plan; one that is there is not overwritten."""
    if not options.save:
        return None
    file = Path(options.save)
    if file.exists() and not file.is_dir():
        raise UsageError(f"{file} is there already: give --save another file, or move it away")
    if file.is_dir() or not file.parent.is_dir():
        raise UsageError(f"cannot write the plan to {file}: give --save a file in a folder that is there")
    return file


# -- planning ----------------------------------------------------------------------------------------------------------


def _measured(
    recipe: Recipe | None, options: PlanOptions, numbers: dict[str, Any], update: Callable[..., None]
) -> Plan:
    import paceline.training  # noqa: F401 - it takes seconds, and somebody is watching
    from paceline.analysis.pipeline_plan import plan_recipe

    if recipe is None:
        raise UsageError("there is nothing to plan: give a recipe, or --load")
    update(description=f"tracing {recipe.model.name}")
    return plan_recipe(
        recipe,
        **numbers,
        repeats=options.repeats,
        threads=options.threads,
        on_round=lambda done, of: update(
            description=f"measuring {recipe.model.name}: round {done} of {of}", completed=done, total=of
        ),
    )


def _revised(saved: Plan, settings: PipelineSettings, numbers: dict[str, Any], *, given: set[str]) -> Plan:
    from paceline.analysis.pipeline_plan import revised_plan

    if not given and not numbers["speeds"] and numbers["states"] is None:
        return saved
    return revised_plan(saved, settings, **numbers, given={name.partition(".")[2] for name in given})


# -- results -----------------------------------------------------------------------------------------------------------


def _as_json(results: dict[str, Any]) -> str:
    return json.dumps(results, indent=2, allow_nan=False)


def _write(made: Plan, results: dict[str, Any], out: Path, file: Path) -> str | ResultsNotKept:
    """Write the plan, its results and its page; return where they are, or why they could not be written."""
    from paceline.reports.pipeline_page import pipeline_page

    try:
        write_result(out, RESULTS, _as_json(results) + "\n")
        made.save(file)
        page = pipeline_page(
            made,
            title=f"paceline plan: {made.model}",
            plan_file=str(file),
            conditions=results["conditions"],
            recipe=results["recipe"],
        )
        return f"plan: {file}\nreport: {write_file(out / PAGE, page)}"
    except OSError as error:
        return ResultsNotKept(out, error)


def _print(made: Plan, conditions: Sequence[str]) -> None:
    """Print the text, coloured where the terminal has colours, and in ASCII where it knows no blocks."""
    from paceline.pipeline.text import describe

    console = Console(highlight=False, markup=False)
    width = max(LEAST_WIDTH, min(console.width, MOST_WIDTH))
    colour = console.is_terminal and not console.no_color
    text = describe(made, width=width, colour=colour)
    if not can_print(text, console.encoding):
        text = printable(describe(made, width=width, ascii_only=True, colour=colour), console.encoding)
    headline, _, rest = text.partition("\n\n")
    console.print(headline, style="bold", soft_wrap=True)
    print(f"\n{rest}\n", flush=True)
    sentence = f"{'; '.join(conditions)}."
    print(printable(textwrap.fill(sentence[:1].upper() + sentence[1:], width), console.encoding))
