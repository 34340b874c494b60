"""`paceline report`: the pages of a run, made again from what its folder holds.

    the folder holds                     pages                        written by
    trace.jsonl                          report.html                  train, serve; paceline.serve in a script
    traces.json.gz                       report.html                  race, simulate; train with ranks that average
    times                                diagnosis.html               a script with paceline.watch
    results.json with layers, moments    inspect.html                 inspect rates
    results.json with codecs             report.html                  bench codecs
    results.json and plan.json           report.html                  plan pipeline
    pruning.safetensors                  pruning.html, beside others  simulate and inspect pruning

Nothing is trained, replayed or measured; no code is imported and no path read that a folder names.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from paceline.cli.options import UsageError, argument, debug_option, json_option, option
from paceline.cli.output import ResultsNotKept, existing_folder, is_ranks_run, note
from paceline.decoding import parse_object
from paceline.files import read_plain, write_file
from paceline.recipes import Recipe
from paceline.renaming import as_recorded
from paceline.traces.journal import TRACE
from paceline.traces.pruning_record import PRUNING
from paceline.traces.run_folder import MOST_RESULTS_BYTES, RESULTS
from paceline.traces.step_times import TIMES
from paceline.traces.trace_files import TRACES, read_traces

if TYPE_CHECKING:
    from paceline.traces import Trace

REPORT = "report.html"
PLAN = "plan.json"


@dataclass(frozen=True)
class ReportOptions:
    """Make a run's page again from its folder."""

    run: str = argument("RUN", "the folder of a run, a race, a plan, ...")
    out: str = option("", "folder for the pages", metavar="FOLDER", shown="the run's")
    data_directory: str = option(
        "",
        "folder with the data set's files, for the images of samples that were pruned",
        metavar="FOLDER",
        also=("data.directory",),
    )
    json: bool = json_option()
    debug: bool = debug_option()


def report(options: ReportOptions, overrides: dict[str, str]) -> None:
    folder = existing_folder(options.run)
    out = Path(options.out or folder)
    try:
        pages = dict(pages_of(folder, data_directory=options.data_directory))
    except ArithmeticError as error:
        raise UsageError(f"{folder} holds numbers that no page can show ({error}): a file there was altered") from None
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = [write_file(out / name, page) for name, page in pages.items()]
    except OSError as error:
        raise ResultsNotKept(out, error) from error
    if options.json:
        print(json.dumps({"pages": [str(path) for path in written]}, indent=2))
    for path in written:
        note(Console(stderr=True), f"report: {path}")


def pages_of(folder: Path, *, data_directory: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and texts of all pages that a folder has enough for; UsageError says what is missing."""
    with_pruning = (folder / PRUNING).is_file()
    if _is_watched(folder):
        yield _page_of_watched(folder)
    elif (folder / TRACE).is_file() or (folder / TRACES).is_file():
        from paceline.reports import report_html

        traces = _traces(folder)
        yield REPORT, report_html(traces, title=run_title(traces[0].recipe))
    elif (page := _page_of_results(folder)) is not None:
        yield page
    elif not with_pruning:
        raise UsageError(f"{folder} holds nothing that a page is made from: {_missing(folder)}")
    if with_pruning:
        from paceline.cli.pruning_commands import PAGE, pruning_page_of

        yield PAGE, pruning_page_of(folder, data_directory=data_directory)


def run_title(recipe: Mapping[str, Any]) -> str:
    """Return the title of a run's page; empty where a script has not said what it trains.

    >>> run_title({"data": {"name": "digits"}, "model": {"name": "mlp"}}), run_title({})
    ('paceline: digits, mlp', '')
    """
    parts = [recipe.get(section, {}) for section in ("data", "model")]
    names = [part.get("name") for part in parts if isinstance(part, Mapping)]
    return f"paceline: {', '.join(map(str, names))}" if len(names) == 2 and all(names) else ""


def _traces(folder: Path) -> list[Trace]:
    if (folder / TRACE).is_file():
        from paceline.traces.history import trace_of
        from paceline.traces.journal_files import read_journal

        return [trace_of(read_journal(folder / TRACE))]
    traces = read_traces(folder)
    if not traces:
        raise UsageError(f"{folder / TRACES} holds no run")
    return [_as_simulated(trace, folder / TRACES) if trace.clock == "virtual" else trace for trace in traces]


def _is_watched(folder: Path) -> bool:
    """Tell whether a folder holds the step times of ranks and no other record of a run."""
    others = any((folder / name).is_file() for name in (TRACE, TRACES, RESULTS, PRUNING))
    return not others and any((folder / TIMES).glob("rank-*.jsonl"))


def _page_of_watched(folder: Path) -> tuple[str, str]:
    """Return the page of a watched script: it has no strategy, loss or round, and where its time went is all of it."""
    from paceline.cli.diagnose import PAGE
    from paceline.diagnosis import diagnose_timings, timings_of
    from paceline.reports.diagnosis_page import diagnosis_page
    from paceline.traces.recorded_run import read_run

    run = read_run(folder)
    timings = timings_of(run)
    return PAGE, diagnosis_page(diagnose_timings(run, timings), timings)


def _as_simulated(trace: Trace, path: Path) -> Trace:
    """Return the trace with its recipe as a simulated run has it, with infinite numbers where a file has null."""
    try:
        return dataclasses.replace(trace, recipe=Recipe.from_document(as_recorded(trace.recipe)).to_dict())
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None


def _page_of_results(folder: Path) -> tuple[str, str] | None:
    """Return the page of what a command found that is no run, by the fields of results.json."""
    path = folder / RESULTS
    if not path.is_file():
        return None
    try:
        values = parse_object(read_plain(path, most_bytes=MOST_RESULTS_BYTES))
        if "moments" in values:
            from paceline.cli import inspect

            return inspect.PAGE, inspect.page(*inspect.from_document(values))
        if "codecs" in values:
            from paceline.bench import tables

            return REPORT, tables.page(tables.CodecResults.from_document(values))
    except ValueError as error:  # a DecodingError, or the recipe's
        raise UsageError(f"{path}: {error}") from None
    if "cuts" in values and (folder / PLAN).is_file():
        from paceline.cli.plan import page_of_folder

        return REPORT, page_of_folder(folder, values)
    return None


def _missing(folder: Path) -> str:
    """Say in a few words what a page would need."""
    found, planned = (folder / RESULTS).is_file(), (folder / PLAN).is_file()
    if is_ranks_run(str(folder)) and not found:
        return f"it has no {TRACES}, which is written when a run of ranks ends: paceline train --resume {folder}"
    if planned:
        return f"it has {PLAN}, but {f'a {RESULTS} that is of no plan' if found else f'no {RESULTS}'}: plan again"
    if found:
        return f"it has {RESULTS}, but no {TRACES} ({TRACE}, {PLAN}), as of a release before: run the command again"
    return f"it has none of {TRACE}, {TRACES}, {RESULTS} and {PRUNING}"
