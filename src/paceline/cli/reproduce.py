"""`paceline reproduce`: every table and figure of the five sources, ours beside theirs.

paceline reproduce          the names, with minutes and the data that they need
paceline reproduce lgc-3    one of them: an estimate, a bar, a table, a line for each claim, a page, results.json
paceline reproduce all      each of them, and one page with everything

What was computed is kept in the folder, so that a reproduction that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import textwrap
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from paceline.cli.options import UsageError, argument, debug_option, json_option, option
from paceline.cli.output import RUNS, ResultsNotKept, note, write_result
from paceline.cli.progress import step_bar
from paceline.quantities import duration_text
from paceline.terminal import WIDTH, printable, text_table

if TYPE_CHECKING:
    from paceline.reproduce.documents import Reproduction
    from paceline.reproduce.experiment import Experiment, ExperimentPlan, Size

ALL = "all"
MOST_SEEDS = 100
PAGE, MARKDOWN = "report.html", "report.md"


@dataclass(frozen=True)
class ReproduceOptions:
    """Run a table or figure of a paper, and show ours beside theirs."""

    name: str = argument("[NAME]", "which one, or all; without a name, they are listed", default="")
    full: bool = option(False, "the paper's own setting, which takes hours, in place of the laboratory's")
    seeds: int = option(0, "how many seeds, counting up from 200; the tables show means", shown="as the list says")
    data_directory: str = option(
        "", "folder with the data sets' files", shown="$PACELINE_DATA or ~/.cache/paceline", metavar="DIR"
    )
    out: str = option(
        "", "folder for NAME/report.html, NAME/results.json, and for what is gone on with", shown="runs/reproduce"
    )
    json: bool = json_option()
    debug: bool = debug_option()


def reproduce(options: ReproduceOptions, overrides: dict[str, str]) -> None:
    from paceline.reproduce import EXPERIMENTS, experiment_named

    if not 0 <= options.seeds <= MOST_SEEDS:
        raise UsageError(f"seeds must be between 1 and {MOST_SEEDS} (seeds={options.seeds})")
    if not options.name:
        _list([experiment_named(name) for name in EXPERIMENTS], as_json=options.json)
        return
    names = list(EXPERIMENTS) if options.name == ALL else [options.name]
    experiments = [experiment_named(name) for name in names]
    run_all(options, experiments)


def _list(experiments: Sequence[Experiment], *, as_json: bool) -> None:
    if as_json:
        listed = [
            {"name": each.name, "source": each.source, "question": each.question, "minutes": each.minutes,
             "full_hours": each.full_hours, "data": list(each.data), "seeds": each.seeds}
            for each in experiments
        ]  # fmt: skip
        print(json.dumps(listed, indent=2))
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
    total = sum(each.minutes for each in experiments)
    console.print(
        f"\n`paceline reproduce NAME` runs one, `paceline reproduce all` each of them (about {total:.0f} minutes on "
        "two cores); --full takes the paper's own setting.",
        width=min(console.width, WIDTH),
    )


def plan_for(experiment: Experiment, options: ReproduceOptions) -> ExperimentPlan:
    """Return the size and the seeds that were asked for."""
    from paceline.reproduce.experiment import FIRST_SEED, ExperimentPlan

    count = options.seeds or experiment.seeds
    return ExperimentPlan(
        size="full" if options.full else "laboratory", seeds=tuple(range(FIRST_SEED, FIRST_SEED + count))
    )


def run_all(options: ReproduceOptions, experiments: Sequence[Experiment]) -> None:
    """Run experiments one after the other; each is shown and written when it is done."""
    from paceline.reproduce.documents import document, markdown, page

    notes, out = Console(stderr=True), Path(options.out or Path(RUNS, "reproduce"))
    done: list[Reproduction] = []
    prints, remarks = _data_facts(experiments, options, notes)
    for experiment in experiments:
        plan = plan_for(experiment, options)
        found = _run(experiment, plan, out, prints, remarks, options, notes)
        done.append(found)
        if not options.json:
            show(found)
        try:
            folder = out / experiment.name
            write_result(folder, "results.json", json.dumps(document(found), indent=2, allow_nan=False) + "\n")
            note(notes, f"report: {write_result(folder, PAGE, page([found]))}")
        except OSError as error:
            raise ResultsNotKept(out, error) from error
    documents = [document(each) for each in done]
    if options.json:
        print(json.dumps(documents if options.name == ALL else documents[0], indent=2, allow_nan=False))
    if options.name == ALL:
        try:
            write_result(out, MARKDOWN, markdown(documents))
            note(notes, f"everything on one page: {write_result(out, PAGE, page(done))}")
        except OSError as error:
            raise ResultsNotKept(out, error) from error


def _data_facts(
    experiments: Sequence[Experiment], options: ReproduceOptions, notes: Console
) -> tuple[dict[str, str], dict[str, str]]:
    """Load each data set once; return its fingerprint and what is to be said of it. A missing one is refused."""
    from paceline.data import load_dataset

    prints, remarks = dict[str, str](), dict[str, str]()
    size: Size = "full" if options.full else "laboratory"
    for name in sorted({name for each in experiments for name in each.data_for(size)}):
        with notes.status(f"loading {name}"):
            data = load_dataset(name, directory=options.data_directory or None)
        sums = [
            zlib.crc32(each.contiguous().numpy().tobytes())
            for part in (data.train, data.test)
            for each in part.first(1000)
        ]
        prints[name] = "-".join([str(len(data.train)), str(len(data.test)), *(f"{each:08x}" for each in sums)])
        if data.remark:
            remarks[name] = data.remark
    return prints, remarks


def _run(
    experiment: Experiment,
    plan: ExperimentPlan,
    out: Path,
    prints: dict[str, str],
    remarks: dict[str, str],
    options: ReproduceOptions,
    notes: Console,
) -> Reproduction:
    from paceline.reproduce.documents import Reproduction
    from paceline.reproduce.running import run_experiment

    minutes = 60 * experiment.full_hours if options.full else experiment.minutes
    minutes *= len(plan.seeds) / experiment.seeds
    note(
        notes, f"{experiment.name}: {experiment.question}; about {duration_text(60 * minutes, trim=True)} on two cores"
    )
    own = {name: prints[name] for name in experiment.data_for(plan.size)}
    with step_bar(notes, experiment.name, total=None) as update:
        findings = run_experiment(
            experiment,
            plan,
            out,
            data=own,
            directory=options.data_directory,
            on_job=lambda name, seconds, total: update(description=name[:30], advance=seconds, total=total),
        )
    of_data = tuple(remarks[name] for name in own if name in remarks)
    return Reproduction(experiment=experiment, plan=plan, findings=findings, data_remarks=of_data)


def show(found: Reproduction) -> None:
    """Print an experiment's tables, a line for each claim, and what is not as in the source."""
    from paceline.reproduce.documents import claim_lines

    console = Console(highlight=False, markup=False)
    width = min(console.width, WIDTH)
    for table in found.findings.tables:
        console.print(table.rich())
    for claim, line in zip([*found.findings.claims, None], claim_lines(found), strict=True):
        style = "" if claim is None or claim.holds or not claim.judged else "bold red"
        console.print(textwrap.fill(printable(line, console.encoding), width, subsequent_indent="  "), style=style)
    for remark in found.remarks:
        console.print(textwrap.fill(printable(remark, console.encoding), width), style="dim")
