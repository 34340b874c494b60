"""What a run in a script shows and leaves: its log on stderr, results.json and report.html.

A plain script has not set up logging, and Python shows such a script warnings alone. So where neither the root logger
nor that of paceline has a handler, the lines go to stderr while the run lasts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.files import write_file
from paceline.recipes.recipe import Recipe
from paceline.reports import write_report
from paceline.runs.simulation import Result, as_document
from paceline.traces.journal import TRACE
from paceline.traces.run_folder import RESULTS
from paceline.traces.trace_files import write_traces

log = logging.getLogger("paceline.served")

REPORT = "report.html"


@contextmanager
def shown_log() -> Iterator[None]:
    """Show what paceline logs on stderr, if nobody has said where logs go.

    A script that wants it elsewhere, or not at all, says so before: `logging.basicConfig(...)`, or for silence
    `logging.getLogger("paceline").addHandler(logging.NullHandler())`.

    >>> with shown_log():
    ...     log.debug("nobody sees this")
    """
    logger = logging.getLogger("paceline")
    if logger.hasHandlers():
        yield
        return
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    if level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def write_pages(result: Result, folder: Path) -> None:
    """Write results.json and report.html; that a disk does not take them is logged, and does not undo the run."""
    recipe = Recipe.from_document(result.trace.recipe) if result.trace.recipe else None
    document = as_document(recipe, [result])
    title = "" if recipe is None else f"paceline: {recipe.data.name}, {recipe.model.name}"
    try:
        write_file(folder / RESULTS, json.dumps(document, indent=2, allow_nan=False) + "\n")
        if not (folder / TRACE).is_file():
            write_traces(folder, [result.trace])
        log.info("report: %s", write_report([result.trace], folder / REPORT, title=title))
    except OSError as error:
        log.error("cannot write the report to %s: %s", folder, error.strerror or error)
