"""`python -m experiments`: lists the experiments, or runs those named; `make reproduce` and `make bench` call it."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from experiments.core.pages import Told, markdown, page
from experiments.core.running import fingerprint, run_experiment
from experiments.core.story import EXPERIMENTS, FIRST_SEED, Experiment, Size, Step
from paceline.cli.output import note, write_result
from paceline.cli.progress import step_bar
from paceline.data import load_dataset
from paceline.errors import PacelineError
from paceline.lookup import unknown
from paceline.quantities import duration_text
from paceline.terminal import WIDTH, printable, text_table

ROOMS = ("papers", "questions", "timings")
ALL = "all"
MOST_SEEDS = 100
PAGE, RESULTS, MARKDOWN = "report.html", "results.json", "report.md"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Run experiments by name. Tables and claims go to stdout, progress to stderr, everything to the folder."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Which; 'all' runs all, none lists them."""
    of: str = ""
    """Only those of papers, questions or timings, with commas between."""
    toy: bool = False
    """A tiny version that takes seconds: shows that it runs, its figures mean nothing."""
    full: bool = False
    """A paper's own setting, which takes hours, in place of the laboratory's."""
    seeds: int = 0
    """How many seeds, of which tables show means; as the experiment says if not given."""
    first_seed: int = FIRST_SEED
    """The first of them; the others count up."""
    set: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """Settings of an experiment; lists have commas between. The list with --json shows which there are."""
    data_directory: str = ""
    """Folder with the data sets' files; $PACELINE_DATA or ~/.cache/paceline if not given."""
    out: Path = Path("runs/experiments")
    """Folder for NAME/report.html, NAME/results.json, and for what is gone on with."""
    json: bool = False
    """Print results.json in place of tables."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names.

    0: all ran, whatever came out. 1: one failed; the others ran. 2: asked for wrongly.
    """
    options = parsed(arguments)
    try:
        found = experiments_of(options)
        if not options.names:
            show_list(found, as_json=options.json)
            return 0
        return run_all(options, found)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def parsed(arguments: Sequence[str] | None = None) -> Options:
    """Return what a command line says; SystemExit where it cannot be read."""
    return tyro.cli(Options, prog="python -m experiments", args=arguments, config=(tyro.conf.FlagCreatePairsOff,))


def load() -> dict[str, Experiment]:
    """Import every module that has experiments, and return these by name, in the order of the rooms and files."""
    for room in ROOMS:
        package = importlib.import_module(f"experiments.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    return dict(sorted(EXPERIMENTS.items(), key=lambda item: (ROOMS.index(item[1].of), item[1].story.__module__)))


def experiments_of(options: Options) -> list[Experiment]:
    """Return the experiments that were asked for, with which size and seeds is checked."""
    if options.toy and options.full:
        raise ValueError("--toy and --full are two sizes; give one of them")
    if not 0 <= options.seeds <= MOST_SEEDS:
        raise ValueError(f"--seeds must be between 1 and {MOST_SEEDS} (seeds={options.seeds})")
    if options.first_seed < 0:
        raise ValueError(f"--first-seed must be at least 0 (first_seed={options.first_seed})")
    rooms = [room.strip() for room in options.of.split(",") if room.strip()] or list(ROOMS)
    for room in rooms:
        if room not in ROOMS:
            raise unknown("room", room, ROOMS)
    known = {name: each for name, each in load().items() if each.of in rooms}
    for name in options.names:
        if name != ALL and name not in known:
            raise unknown("experiment", name, known)
    names = dict.fromkeys(options.names)
    return list(known.values()) if ALL in names or not names else [known[name] for name in names]


def show_list(experiments: Sequence[Experiment], *, as_json: bool) -> None:
    """Print what there is: names, minutes, data and questions."""
    if as_json:
        fields = ("name", "of", "source", "question", "minutes", "full_hours", "data", "seeds", "settings")
        print(json.dumps([{name: getattr(each, name) for name in fields} for each in experiments], indent=2))
        return
    rows = [("name", "minutes", "data", "what is asked")]
    for each in experiments:
        data = ", ".join(each.data) or "-"
        rows.append((each.name, f"{max(each.minutes, 0.1):.1f}", data, each.question))
    room = WIDTH - sum(max(len(row[column]) for row in rows) + 2 for column in range(3))
    folded = []
    for name, minutes, data, question in rows:
        first, *others = textwrap.wrap(question, room)
        folded += [(name, minutes, data, first), *(("", "", "", line) for line in others)]
    console = Console(highlight=False, markup=False)
    for line in text_table(folded, align="<><<"):
        console.print(printable(line, console.encoding), soft_wrap=True)
    total = duration_text(60 * sum(each.minutes for each in experiments), trim=True)
    console.print(
        f"\n`python -m experiments NAME ...` runs some, `all` each of them (about {total} on two cores); --full takes "
        "a paper's own setting, --toy seconds.",
        width=min(console.width, WIDTH),
    )


def settings_of(experiment: Experiment, options: Options) -> dict[str, Any]:
    """Return the values of `--set` for an experiment."""
    texts = {}
    for given in options.set:
        name, equals, text = given.partition("=")
        if not equals:
            raise ValueError(f"--set takes NAME=VALUE (set={given!r})")
        texts[name.replace("-", "_")] = text
    return experiment.with_settings(texts)


def size_of(experiment: Experiment, options: Options) -> Size:
    """Return the size and the seeds that were asked for."""
    count = options.seeds or experiment.seeds
    if options.seeds > 1 and experiment.of == "timings" and experiment.seeds == 1:
        raise ValueError(f"{experiment.name} measures seconds with one seed (seeds={options.seeds})")
    seeds = tuple(range(options.first_seed, options.first_seed + count))
    return Size("toy" if options.toy else "full" if options.full else "laboratory", seeds)


def run_all(options: Options, experiments: Sequence[Experiment]) -> int:
    """Run experiments one after the other; each is shown and written when it is done, and none ends the others."""
    notes, done, failed = Console(stderr=True), list[Told](), list[str]()
    settings = {each.name: settings_of(each, options) for each in experiments}
    own = {each.name: data_of(each, options, settings[each.name]) for each in experiments}
    prints, remarks = data_facts({name for names in own.values() for name in names}, options, notes)
    for each in experiments:
        try:
            data = {name: prints[name] for name in own[each.name]}
            told = run_one(each, options, settings[each.name], data, remarks, notes)
        except (PacelineError, ValueError, RuntimeError) as error:
            if len(experiments) == 1 and isinstance(error, ValueError):
                raise
            failed.append(each.name)
            note(notes, f"{each.name} failed: {error}", style="bold red")
            continue
        done.append(told)
        if not options.json:
            show(told)
        folder = options.out / each.name
        write_result(folder, RESULTS, json.dumps(told.document, indent=2, allow_nan=False) + "\n")
        note(notes, f"report: {write_result(folder, PAGE, page([told]))}")
    documents = [each.document for each in done]
    if options.json:
        print(json.dumps(documents if len(experiments) > 1 else documents[0], indent=2, allow_nan=False))
    if len(done) > 1:
        write_result(options.out, MARKDOWN, markdown(documents))
        note(notes, f"everything on one page: {write_result(options.out, PAGE, page(done))}")
    if failed:
        note(notes, f"failed: {', '.join(failed)}", style="bold red")
    return 1 if failed else 0


def data_of(experiment: Experiment, options: Options, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the data sets that an experiment needs with these settings."""
    return experiment.data_for(size_of(experiment, options), data=settings.get("data", ()))


def data_facts(names: set[str], options: Options, notes: Console) -> tuple[dict[str, str], dict[str, str]]:
    """Load each data set once; return its fingerprint and what is to be said of it. A missing one is refused."""
    prints, remarks = dict[str, str](), dict[str, str]()
    for name in sorted(names):
        with notes.status(f"loading {name}"):
            data = load_dataset(name, directory=options.data_directory or None)
            prints[name] = fingerprint(data)
        if data.remark:
            remarks[name] = data.remark
    return prints, remarks


def run_one(
    experiment: Experiment,
    options: Options,
    settings: Mapping[str, Any],
    data: Mapping[str, str],
    remarks: Mapping[str, str],
    notes: Console,
) -> Told:
    """Run an experiment, with a bar."""
    size = size_of(experiment, options)
    hours = experiment.full_hours if options.full and experiment.full_hours is not None else experiment.minutes / 60
    seconds = 0.0 if options.toy else 3600 * hours * len(size.seeds) / experiment.seeds
    about = f"; about {duration_text(seconds, trim=True)} on two cores" if seconds else ""
    note(notes, f"{experiment.name}: {experiment.question}{about}")
    with step_bar(notes, experiment.name, total=None) as update:
        steps, seconds_done = 0, 0.0

        def on_step(step: Step) -> None:
            nonlocal steps
            update(description=step.label[:30], completed=steps, total=step.total)
            steps += 1

        def on_job(name: str, seconds: float, total: float) -> None:
            nonlocal seconds_done
            seconds_done += seconds
            update(description=name[:30], completed=min(seconds_done, total), total=total)

        findings = run_experiment(
            experiment,
            size,
            options.out,
            data=data,
            directory=options.data_directory,
            on_job=on_job,
            on_step=on_step,
            settings=settings,
        )
    of_data = tuple(remarks[name] for name in data if name in remarks)
    return Told(experiment=experiment, size=size, findings=findings, data_remarks=of_data)


def show(told: Told) -> None:
    """Print an experiment's tables, a line for each claim, and what is not as in the source."""
    console = Console(highlight=False, markup=False)
    width = min(console.width, WIDTH)
    for table in told.findings.tables:
        console.print(table.rich())
    for claim, line in zip([*told.findings.claims, None], told.lines, strict=True):
        style = "" if claim is None or claim.holds or not claim.judged else "bold red"
        console.print(textwrap.fill(printable(line, console.encoding), width, subsequent_indent="  "), style=style)
    for remark in told.remarks:
        console.print(textwrap.fill(printable(remark, console.encoding), width), style="dim")


if __name__ == "__main__":
    sys.exit(main())
