"""`paceline diagnose`: who is slow in a recorded run, since when and why, and what it costs."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from paceline.cli.options import UsageError, argument, debug_option, json_option, option
from paceline.cli.output import ResultsNotKept, existing_folder, note
from paceline.decoding import printable_line
from paceline.files import write_file
from paceline.terminal import printable

if TYPE_CHECKING:
    from paceline.diagnosis import Diagnosis, Timings

PAGE = "diagnosis.html"
WIDTH = 80


@dataclass(frozen=True)
class DiagnoseOptions:
    """Say who is slow in a recorded run, since when and why, and what it costs.

    It reads what the run has recorded: a journal, traces, step times. It also says where the time went, and "cannot
    tell" where chance alone could look the same.
    """

    run: str = argument("RUN", "the folder of a run: train, serve, simulate, or a script with paceline.watch")
    strategy: str = option("", "which run of a race", metavar="NAME", shown="the only one")
    skip: int | None = option(
        None, "first steps to leave out as warm-up", metavar="STEPS", shown="3 of a real run", least=0
    )
    out: str = option("", f"folder for {PAGE}", metavar="FOLDER", shown="the run's")
    json: bool = json_option()
    debug: bool = debug_option()


def diagnose(options: DiagnoseOptions, overrides: dict[str, str]) -> None:
    from paceline.diagnosis import diagnose_timings, timings_of
    from paceline.traces.recorded_run import read_run

    folder = existing_folder(options.run)
    try:
        run = read_run(folder, strategy=options.strategy)
        timings = timings_of(run, skip=options.skip)
        found = diagnose_timings(run, timings)
    except ArithmeticError as error:
        raise UsageError(
            f"{folder} holds numbers that cannot be compared ({error}): a file there was altered"
        ) from None
    written = _write_page(found, timings, Path(options.out or folder))
    if options.json:
        print(json.dumps(document(found), indent=2, allow_nan=False))
    else:
        _print(found)
    if isinstance(written, ResultsNotKept):
        raise written
    notes = Console(stderr=True)
    note(notes, f"page: {written}")
    if found.status in ("slow", "once", "link", "small") and not options.json:
        note(notes, f"what would help: paceline what-if {options.run}")


def document(found: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as one JSON document: the sentences first, then all figures."""
    from paceline.diagnosis import evidence, verdict

    return {"verdict": verdict(found), "evidence": evidence(found), **dataclasses.asdict(found)}


def _write_page(found: Diagnosis, timings: Timings, out: Path) -> Path | ResultsNotKept:
    from paceline.reports.diagnosis_page import diagnosis_page

    try:
        out.mkdir(parents=True, exist_ok=True)
        return write_file(out / PAGE, diagnosis_page(found, timings))
    except OSError as error:
        return ResultsNotKept(out, error)


def _print(found: Diagnosis) -> None:
    from paceline.diagnosis import evidence, verdict
    from paceline.reports.diagnosis_page import time_table

    encoding = sys.stdout.encoding or "ascii"
    for sentence in verdict(found):
        print(_shown(textwrap.fill(sentence, WIDTH, break_long_words=False), encoding) + "\n")
    Console(width=WIDTH if not sys.stdout.isatty() else None).print(time_table(found, most_rows=16, narrow=True).rich())
    for sentence in evidence(found):
        print(_shown(textwrap.fill(sentence, WIDTH, break_long_words=False, subsequent_indent="  "), encoding))


def _shown(text: str, encoding: str) -> str:
    """Return a text without what a terminal would obey: names of hosts and strategies come from files."""
    return printable("\n".join(map(printable_line, text.split("\n"))), encoding)
