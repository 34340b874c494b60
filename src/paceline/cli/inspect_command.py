"""`paceline inspect`: which layer limits a recipe's learning rate."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.cli.options import UsageError
from paceline.files import write_file
from paceline.recipes import Recipe, read_recipe

if TYPE_CHECKING:
    from paceline.analysis.layer_ratios import Inspection

BAR_AFTER_SECONDS = 2.0
MOST_WIDTH = 80


@dataclass(frozen=True)
class InspectOptions:
    """Show which layer limits the learning rate: weights beside gradients, layer by layer."""

    recipe_file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(name="recipe", metavar="[RECIPE]")] = ""
    """A recipe (TOML); without one, the default."""
    steps: int = 0
    """Train so many steps, and show the ratios after them as well."""
    batch: int = 0
    """Samples of a gradient [the recipe's worker.batch_size]."""
    out: str = "runs/inspect"
    """Folder for inspect.html and results.json."""
    json: bool = False
    """Print one JSON document to stdout, and nothing else there."""
    debug: bool = False
    """Show the traceback of an error."""


def inspect(options: InspectOptions, overrides: dict[str, str]) -> None:
    """`paceline inspect`."""
    from paceline.analysis.layer_ratios import check, inspect_recipe

    recipe = read_recipe(Path(options.recipe_file) if options.recipe_file else None, overrides)
    check(recipe, steps=options.steps, batch=options.batch)
    notes, out = Console(stderr=True), Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)  # better refused now than after the run
    except OSError as error:
        raise UsageError(f"cannot write results to {out}: {error.strerror or error}; give another --out") from None
    with notes.status(f"loading torch, {recipe.data.name} and {recipe.model.name}"):
        import paceline.optim.ratios
        import paceline.training  # noqa: F401 - it takes seconds, and somebody is watching
    with _bar(notes, total=options.steps + 1) as told:
        inspection = inspect_recipe(recipe, steps=options.steps, batch=options.batch, on_step=told)
    _tell(recipe, inspection, out, notes, as_json=options.json)


@contextmanager
def _bar(notes: Console, *, total: int) -> Iterator[Callable[[int], None]]:
    """A bar for what takes longer than two seconds."""
    columns = (TextColumn("steps"), BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn())
    progress, begin = Progress(*columns, console=notes, expand=True, transient=True), time.monotonic()
    task = progress.add_task("steps", total=total)

    def told(done: int) -> None:
        progress.update(task, completed=done)
        if not progress.live.is_started and time.monotonic() - begin > BAR_AFTER_SECONDS:
            progress.start()

    try:
        yield told
    finally:
        progress.stop()


def _tell(recipe: Recipe, inspection: Inspection, out: Path, notes: Console, *, as_json: bool) -> None:
    from paceline.cli import inspect_words as words
    from paceline.reports.codec_page import write_page
    from paceline.reports.ratio_page import ratio_page

    document = json.dumps(words.document(recipe, inspection), indent=2, allow_nan=False)
    if as_json:
        print(document)
    else:
        _print(recipe, inspection)
    try:
        write_file(out / "results.json", document + "\n")
        page = ratio_page(
            words.bars(inspection),
            words.table(inspection),
            title=f"paceline inspect: {recipe.data.name}, {recipe.model.name}",
            headline=words.headline(inspection),
            said=words.sentences(recipe, inspection),
            conditions=words.conditions(recipe, inspection),
            rate=words.comparable_rate(recipe, inspection),
        )
        told = f"report: {write_page(page, out / 'inspect.html')}"
    except OSError as error:  # the results are told; that they cannot be kept does not undo them
        told = f"cannot write the report to {out}: {error.strerror or error}"
    notes.print(told, soft_wrap=True, highlight=False, markup=False)


def _print(recipe: Recipe, inspection: Inspection) -> None:
    from paceline.cli import inspect_words as words
    from paceline.optim.ratio_table import writable

    console = Console(highlight=False, markup=False)
    for line in words.lines(inspection):
        style = "bold red" if line.startswith(">") else ""
        console.print(writable(line, console.encoding), style=style, soft_wrap=True)
    console.print()
    width = min(console.width, MOST_WIDTH)
    console.print(f"{words.headline(inspection)}.", style="bold", width=width)
    for sentence in words.sentences(recipe, inspection):
        console.print(sentence, width=width)
