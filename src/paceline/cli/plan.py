"""`paceline plan pipeline`: where to cut a recipe's model into stages, and what a step will take."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    trust_option,
)
from paceline.cli.output import ResultsNotKept, new_folder, note, write_result
from paceline.cli.progress import step_bar
from paceline.decoding import decode
from paceline.files import write_file
from paceline.pipeline.schedules import SCHEDULES
from paceline.quantities import rate_in_bytes, size_in_bytes, with_unit
from paceline.recipes import Recipe, read_recipe
from paceline.terminal import can_print, printable

if TYPE_CHECKING:
    from paceline.pipeline.plan import Plan
    from paceline.pipeline.settings import PipelineSettings

STAGES = "4"  # where neither the recipe nor an option says how many
LEAST_WIDTH, MOST_WIDTH = 40, 80
PAGE, RESULTS, PLAN = "report.html", "results.json", "plan.json"


@dataclass(frozen=True)
class PlanPipelineOptions:
    """Show where to cut a model into stages.

    It also says what a step will take. Nothing is trained. The recipe's [pipeline] is planned: --stages,
    --microbatches and so on.
    """

    recipe_file: str = argument("[RECIPE]", RECIPE_FILE, default="")
    schedule: str = option("", "the others are predicted as well", shown="the recipe's", choices=lambda: SCHEDULES)
    chunks: str = option("", "interleaved: pieces of each stage", metavar="INT", shown="the recipe's", common=False)
    memory: str = option("", "what the model may take of each device: 500MB, 2GB", metavar="SIZE", shown="no limit")
    bandwidth: str = option("", "of the link between stages: 1Gbit/s, 125MB/s", metavar="RATE", shown="not counted")
    latency: str = option(
        "", "of the link between stages: 5ms, 200us", metavar="TIME", shown="0", old={"--latency-ms": "ms"}
    )
    speeds: str = option(
        "",
        "speeds of the devices, such as 1,1,0.5,2: one of 2 takes half the time that is measured here",
        metavar="LIST",
        shown="all alike",
    )
    optimizer_states: float | None = option(
        None,
        "numbers that the optimiser keeps for each weight",
        shown="those of the recipe's optimiser",
        common=False,
    )
    repeats: int = option(5, "how often each layer is measured, at least", common=False)
    threads: int = option(1, "torch's threads while layers are measured: as many as a rank will have", common=False)
    load: str = option(
        "",
        "a plan that was saved, instead of a recipe: placed anew for the options, without measuring",
        metavar="FILE",
    )
    save: str = option(
        "", "file for the plan, which paceline.Plan.load reads", metavar="FILE", shown="plan.json in the folder"
    )
    out: str = out_option("report.html, results.json and plan.json", "runs/plan")
    trust: bool = trust_option()
    json: bool = json_option()
    debug: bool = debug_option()


def plan_pipeline(options: PlanPipelineOptions, overrides: dict[str, str]) -> None:
    from paceline.analysis.pipeline_plan import check_options, plan_conditions, plan_document

    numbers: dict[str, Any] = {"speeds": _speeds(options.speeds), "states": options.optimizer_states}
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


def _pipeline_overrides(options: PlanPipelineOptions) -> dict[str, str]:
    """Return the options that are settings of [pipeline] in other units, as texts of those settings."""
    given = {"pipeline.schedule": options.schedule, "pipeline.chunks": options.chunks}
    given["pipeline.latency_ms"] = _latency_ms(options.latency)
    if options.memory:
        given["pipeline.memory_mb"] = repr(size_in_bytes("--memory", options.memory) / 1e6)
    if options.bandwidth:
        given["pipeline.bandwidth_mbit"] = repr(rate_in_bytes("--bandwidth", options.bandwidth) / 125e3)
    return {name: text for name, text in given.items() if text}


def _latency_ms(text: str) -> str:
    if not text:
        return ""
    milliseconds = with_unit("latency_ms", text)
    if isinstance(milliseconds, str):
        raise UsageError(f"--latency must be a time such as 5ms or 200us (found {text!r})")
    return repr(milliseconds)


def _read(options: PlanPipelineOptions, wanted: dict[str, str]) -> tuple[PipelineSettings, Recipe]:
    """Read the recipe; one without a pipeline gets one."""
    if "pipeline.stages" not in wanted:
        alone = {"pipeline.memory_mb", "pipeline.chunks", "pipeline.schedule"}  # what does not say how many
        if (
            given_recipe(
                options.recipe_file,
                {name: text for name, text in wanted.items() if name not in alone},
                trust=options.trust,
            ).pipeline.stages
            == 1
        ):
            wanted = {**wanted, "pipeline.stages": str(len(_speeds(options.speeds)) or STAGES)}
    recipe = given_recipe(options.recipe_file, wanted, trust=options.trust)
    return recipe.pipeline, recipe


def _loaded(options: PlanPipelineOptions, wanted: dict[str, str]) -> tuple[Plan, PipelineSettings, None]:
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


def _plan_file(options: PlanPipelineOptions) -> Path | None:
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
    recipe: Recipe | None, options: PlanPipelineOptions, numbers: dict[str, Any], update: Callable[..., None]
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
        on_round=lambda done, of: update(description=f"measuring {recipe.model.name}", completed=done, total=of),
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
    try:
        write_result(out, RESULTS, _as_json(results) + "\n")
        for copy in dict.fromkeys((file, out / PLAN)):  # the folder has one in any case: `paceline report` reads it
            made.save(copy)
        return f"plan: {file}\nreport: {write_file(out / PAGE, _page(made, results, file))}"
    except OSError as error:
        return ResultsNotKept(out, error)


def _page(made: Plan, results: Mapping[str, Any], file: Path) -> str:
    from paceline.reports.pipeline_page import pipeline_page

    return pipeline_page(
        made,
        title=f"paceline plan pipeline: {made.model}",
        plan_file=str(file),
        conditions=results["conditions"],
        recipe=results["recipe"],
    )


def page_of_folder(folder: Path, results: Mapping[str, Any]) -> str:
    """Return the page of the plan that a folder holds, beside its results."""
    from paceline.pipeline.plan import Plan

    known = {name: results.get(name) for name in STORED}
    return _page(Plan.load(folder / PLAN), decode(STORED, known, str(folder / RESULTS)), folder / PLAN)


STORED = {"conditions": tuple[str, ...], "recipe": dict[str, Any]}
"""What the page takes from results.json."""


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
