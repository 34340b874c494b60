"""How results are told: a table or one JSON document on stdout, a report page and results.json in a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from paceline.files import write_file
from paceline.recipes import Recipe
from paceline.runs import Result, as_document


def tell_results(recipe: Recipe, results: Sequence[Result], out: Path, notes: Console, *, as_json: bool) -> None:
    """Print the results, and write them down."""
    from paceline.reports import results_table, write_report

    document = json.dumps(as_document(recipe, results), indent=2, allow_nan=False)
    traces = [result.trace for result in results]
    if as_json:
        print(document)
    else:
        Console().print(results_table(traces))
    try:
        write_file(out / "results.json", document + "\n")
        report = write_report(traces, out / "report.html", title=f"paceline: {recipe.data.name}, {recipe.model.name}")
        said = f"report: {report}"
    except OSError as error:  # the results are told; that they cannot be kept does not undo the run
        said = f"cannot write the report to {out}: {error.strerror or error}"
    notes.print(said, soft_wrap=True, highlight=False, markup=False)
