"""Where a command's results go: a table or one JSON document on stdout, notes on stderr, files in a folder."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.cli.options import UsageError
from paceline.errors import PacelineError, warn
from paceline.files import write_file
from paceline.recipes import Recipe
from paceline.runs import Result, as_document
from paceline.runs.ranks import RECIPE
from paceline.traces.journal import TRACE
from paceline.traces.run_folder import RESULTS, next_free_folder, take_folder
from paceline.traces.trace_files import TRACES, write_traces

RUNS = "runs"


class ResultsNotKept(PacelineError, OSError):  # noqa: N818 - what happened, in the past tense
    """Results that were printed, and that no disk has taken: the command did not do all that it was asked to do.

    >>> raise ResultsNotKept("runs/race", OSError(28, "No space left on device"))
    Traceback (most recent call last):
    paceline.cli.output.ResultsNotKept: cannot write to runs/race: No space left on device; what ...
    """

    def __init__(self, place: str | Path, cause: OSError) -> None:
        why = cause.strerror or cause
        super().__init__(f"cannot write to {place}: {why}; what was found is printed, and is in no file")


def note(console: Console, text: str, *, style: str | None = None) -> None:
    """Print a line as it is: paths and names are neither wrapped nor read as markup."""
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)


def new_folder(named: str, command: str) -> Path:
    """Return the folder for a command's results: the one that was named, if it is free, or else the next that is.

    >>> new_folder("/dev/null/results", "race")
    Traceback (most recent call last):
    paceline.cli.options.UsageError: cannot write to /dev/null/results: Not a directory; give another --out
    """
    folder = Path(named or Path(RUNS, command))
    try:
        if not named:
            return next_free_folder(folder)
        others = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        taken = take_folder(folder)
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            warn(f"{folder} holds other files ({others[0]}{more}), which stay; give --out a new folder to be apart")
        return taken
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror or error}; give another --out") from None


def is_ranks_run(folder: str) -> bool:
    """Tell whether a folder holds a run of ranks."""
    return Path(folder, RECIPE).is_file()


def existing_folder(text: str) -> Path:
    """Return the folder of this name, and refuse one that is not there.

    >>> existing_folder("no/where")
    Traceback (most recent call last):
    paceline.cli.options.UsageError: no/where is not there; give the folder of a run
    """
    folder = Path(text)
    if not folder.is_dir():
        raise UsageError(f"{folder} {'is no folder' if folder.exists() else 'is not there'}; give the folder of a run")
    return folder


def run_folder(text: str) -> Path:
    """Return the folder of a real run, and refuse any other."""
    folder = existing_folder(text)
    if not Path(text, TRACE).is_file() and not is_ranks_run(text):
        if Path(text, TRACES).is_file():
            raise UsageError(
                f"{text} is simulated and needs no replay: the same recipe gives the same result, bit for bit"
            )
        raise UsageError(f"{text} is not a run: it has no {TRACE}")
    return folder


def write_result(out: Path, name: str, text: str) -> Path:
    """Write a file of the results; if somebody has deleted the folder meanwhile, it is made anew."""
    out.mkdir(parents=True, exist_ok=True)
    return write_file(out / name, text)


def show_results(
    recipe: Recipe,
    results: Sequence[Result],
    out: Path,
    notes: Console,
    *,
    as_json: bool,
    varied: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Print the results, and write results.json and report.html; ResultsNotKept if the disk does not take them."""
    from paceline.reports import results_table, write_report
    from paceline.reports.results import group_traces
    from paceline.reports.shares import share_table

    document = json.dumps(as_document(recipe, results, varied), indent=2, allow_nan=False)
    traces = [result.trace for result in results]
    if as_json:
        print(document)
    else:
        console = Console()
        console.print(results_table(traces))
        if (shares := share_table(group_traces(traces))) is not None:
            console.print(replace(shares, caption="").rich())
            note(console, textwrap.fill(shares.caption, min(80, console.width)))
    try:
        write_result(out, RESULTS, document + "\n")
        if not (out / TRACE).is_file():
            write_traces(out, traces)
        report = write_report(traces, out / "report.html", title=f"paceline: {recipe.data.name}, {recipe.model.name}")
        message = f"report: {report}"
    except OSError as error:
        raise ResultsNotKept(out, error) from error
    note(notes, message)
