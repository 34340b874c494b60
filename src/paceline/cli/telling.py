"""How results are told: a table or one JSON document on stdout, a report page and results.json in a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from paceline.recipes import Recipe, Result, as_document


def tell_results(recipe: Recipe, results: Sequence[Result], out: Path, notes: Console, *, as_json: bool) -> None:
    """Print the results, and write them down."""
    from paceline.reports import results_table, write_report

    document = json.dumps(as_document(recipe, results), indent=2, allow_nan=False)
    traces = [result.trace for result in results]
    (out / "results.json").write_text(document + "\n", encoding="utf-8")
    report = write_report(traces, out / "report.html", title=f"paceline: {recipe.data.name}, {recipe.model.name}")
    if as_json:
        print(document)
    else:
        Console().print(results_table(traces))
    notes.print(f"report: {report}", soft_wrap=True, highlight=False, markup=False)
