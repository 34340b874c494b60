"""`paceline plan`: where to cut a recipe's model into stages, and what a step will take, before anything is trained."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.cli.options import UsageError
from paceline.files import write_file
from paceline.quantities import rate_in_bytes, size_in_bytes
from paceline.recipes import Recipe, read_recipe

if TYPE_CHECKING:
    from paceline.pipeline.plan import Plan
    from paceline.recipes.pipeline_section import PipelineSection
    from paceline.traces.pipeline_record import PipelineRecord

STAGES = "4"  # where neither the recipe nor an option says how many
LEAST_WIDTH, MOST_WIDTH = 40, 80
PAGE, RESULTS, PLAN = "report.html", "results.json", "plan.json"


def _setting(metavar: str, default: object) -> Any:
    """An option that is text, empty unless it is given; what that stands for is told in the help."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"[{default}]")


@dataclass(frozen=True)
class PlanOptions:
    """Show where to cut a model into stages, and what a step will take; nothing is trained."""

    recipe_file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(name="recipe", metavar="[RECIPE]")] = ""
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
    out: str = "runs/plan"
    """Folder for report.html, results.json and plan.json."""
    json: bool = False
    """Print one JSON document to stdout, and nothing else there."""
    debug: bool = False
    """Show the traceback of an error."""


def plan(options: PlanOptions, overrides: dict[str, str]) -> None:
    """`paceline plan`."""
    from paceline.recipes.planning import check

    numbers: dict[str, Any] = {"speeds": _speeds(options.speeds), "states": _states(options.optimizer_states)}
    wanted = {**overrides, **_of_section(options)}
    saved, section, recipe = _loaded(options, wanted) if options.load else (None, *_read(options, wanted))
    check(section, **numbers, repeats=options.repeats, threads=options.threads)
    notes, out, file = Console(stderr=True), Path(options.out), _plan_file(options)
    try:
        out.mkdir(parents=True, exist_ok=True)  # better refused now than after measuring
    except OSError as error:
        raise UsageError(f"cannot write results to {out}: {error.strerror or error}; give another --out") from None
    with _bar(notes) as told:
        if saved is not None:
            made = _revised(saved, section, numbers, given=set(wanted))
        else:
            made = _measured(recipe, options, numbers, told)
        told("predicting steps", None)
        record = _record(made, options, recipe)
    _tell(made, record, out, file, notes, as_json=options.json)


# -- what is asked for -------------------------------------------------------------------------------------------------


def _of_section(options: PlanOptions) -> dict[str, str]:
    """Options that say a setting of [pipeline] in other words, as text of that setting."""
    given = {"pipeline.schedule": options.schedule, "pipeline.chunks": options.chunks}
    given["pipeline.latency_ms"] = options.latency_ms
    if options.memory:
        given["pipeline.memory_mb"] = repr(size_in_bytes("--memory", options.memory) / 1e6)
    if options.bandwidth:
        given["pipeline.bandwidth_mbit"] = repr(rate_in_bytes("--bandwidth", options.bandwidth) / 125e3)
    return {name: text for name, text in given.items() if text}


def _read(options: PlanOptions, wanted: dict[str, str]) -> tuple[PipelineSection, Recipe]:
    """The recipe; one without a pipeline gets one."""
    path = Path(options.recipe_file) if options.recipe_file else None
    if "pipeline.stages" not in wanted:
        alone = {"pipeline.memory_mb", "pipeline.chunks", "pipeline.schedule"}  # what does not say how many
        if read_recipe(path, {name: text for name, text in wanted.items() if name not in alone}).pipeline.stages == 1:
            wanted = {**wanted, "pipeline.stages": str(len(_speeds(options.speeds)) or STAGES)}
    recipe = read_recipe(path, wanted)
    return recipe.pipeline, recipe


def _loaded(options: PlanOptions, wanted: dict[str, str]) -> tuple[Plan, PipelineSection, None]:
    """A saved plan, and the section that says how it is to be placed now: its own where nothing is said."""
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


def _plan_file(options: PlanOptions) -> Path:
    file = Path(options.save) if options.save else Path(options.out, PLAN)
    if options.save and (file.is_dir() or not file.parent.is_dir()):
        raise UsageError(f"cannot write the plan to {file}: give --save a file in a folder that is there")
    return file


# -- planning ----------------------------------------------------------------------------------------------------------


@contextmanager
def _bar(notes: Console) -> Iterator[Callable[[str, tuple[int, int] | None], None]]:
    """A bar that says what is done now; how far it is, where that is known."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TimeElapsedColumn())
    with Progress(*columns, console=notes, expand=True, transient=True, disable=not notes.is_terminal) as progress:
        task = progress.add_task("loading torch", total=None)

        def told(what: str, rounds: tuple[int, int] | None) -> None:
            done, total = rounds or (0, None)
            progress.update(task, description=what, completed=done, total=total)

        yield told


def _measured(recipe: Recipe | None, options: PlanOptions, numbers: dict[str, Any], told: Callable[..., None]) -> Plan:
    import paceline.training  # noqa: F401 - it takes seconds, and somebody is watching
    from paceline.recipes.planning import plan_recipe

    if recipe is None:
        raise UsageError("there is nothing to plan: give a recipe, or --load")
    told(f"tracing {recipe.model.name}", None)
    return plan_recipe(
        recipe,
        **numbers,
        repeats=options.repeats,
        threads=options.threads,
        on_round=lambda done, of: told(f"measuring {recipe.model.name}: round {done} of {of}", (done, of)),
    )


def _revised(saved: Plan, section: PipelineSection, numbers: dict[str, Any], *, given: set[str]) -> Plan:
    from paceline.recipes.planning import revised_plan

    if not given and not numbers["speeds"] and numbers["states"] is None:
        return saved
    return revised_plan(saved, section, **numbers, given={name.partition(".")[2] for name in given})


def _record(made: Plan, options: PlanOptions, recipe: Recipe | None) -> PipelineRecord:
    from paceline.recipes.plan_record import record_of_plan

    if recipe is None:
        return record_of_plan(made, conditions=(f"costs as saved in {options.load}", *_conditions(made, "")))
    threads = f"measured here with {options.threads} thread{'s' * (options.threads > 1)}"
    samples = f"{made.batch.samples} samples of {recipe.data.name}"
    conditions = (samples, threads, *_conditions(made, recipe.optimizer.name))
    return record_of_plan(made, conditions=conditions, source=recipe.to_document())


def _conditions(made: Plan, optimizer: str) -> tuple[str, ...]:
    """What a plan was made for, in a few words each."""
    from paceline.recipes.plan_record import link_words

    keeps = f"{optimizer or 'the optimiser'} keeps {made.states:g} number{'s' * (made.states != 1)} for each weight"
    speeds = {device.speed for device in made.placement.devices}
    differ = ",".join(f"{device.speed:g}" for device in made.placement.devices)
    return (keeps, link_words(made), *((f"speeds {differ}",) if speeds != {1.0} else ()))


# -- telling -----------------------------------------------------------------------------------------------------------


def _tell(made: Plan, record: PipelineRecord, out: Path, file: Path, notes: Console, *, as_json: bool) -> None:
    document = json.dumps(record.document(), indent=2, allow_nan=False)
    written = _written(made, record, document, out, file)  # before anything is told: who reads us may stop reading
    if as_json:
        print(document)
    else:
        _print(made, record)
    notes.print(written, soft_wrap=True, highlight=False, markup=False)


def _written(made: Plan, record: PipelineRecord, document: str, out: Path, file: Path) -> str:
    from paceline.reports.pipeline_page import pipeline_page

    try:
        made.save(file)
        write_file(out / RESULTS, document + "\n")
        page = pipeline_page(record, title=f"paceline plan: {record.model}", plan_file=str(file))
        return f"plan: {file}\nreport: {write_file(out / PAGE, page)}"
    except OSError as error:  # the plan is told; that it cannot be kept does not undo it
        return f"cannot write the plan to {file} and its report to {out}: {error.strerror or error}"


def _print(made: Plan, record: PipelineRecord) -> None:
    """The text, coloured where the terminal has colours, and in ASCII where it knows no blocks."""
    from paceline.pipeline.plan_text import describe

    console = Console(highlight=False, markup=False)
    width = max(LEAST_WIDTH, min(console.width, MOST_WIDTH))
    colour = console.is_terminal and not console.no_color
    text = describe(made, width=width, colour=colour)
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        text = _writable(describe(made, width=width, ascii_only=True, colour=colour), console.encoding)
    headline, _, rest = text.partition("\n\n")
    console.print(headline, style="bold", soft_wrap=True)
    print(f"\n{rest}\n", flush=True)
    said = f"{'; '.join(record.conditions)}."
    print(_writable(textwrap.fill(said[:1].upper() + said[1:], width), console.encoding))


def _writable(text: str, encoding: str) -> str:
    """Names of layers may hold what a terminal cannot show."""
    return text.encode(encoding, "replace").decode(encoding)
