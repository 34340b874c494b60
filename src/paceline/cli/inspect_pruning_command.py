"""`paceline inspect-pruning`: which samples a run left out again and again, and whether their labels look wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.progress import Progress

from paceline.cli.options import UsageError
from paceline.terminal import WIDTH

if TYPE_CHECKING:
    from paceline.reports.pruning_facts import PruningFacts
    from paceline.traces.pruning_record import PruningRecord

PAGE = "pruning.html"
MOST_CLASSES, MOST_LABEL_ERRORS = 20, 10  # in the terminal; the page and --json have more


@dataclass(frozen=True)
class InspectPruningOptions:
    """Show which samples a run left out again and again, and which labels look wrong."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The run's folder."""
    most: int = 12
    """Images in a row of the page, at most."""
    out: str = ""
    """The page's file [pruning.html in the run's folder]."""
    model: str = ""
    """The network as module:factory, if the run trained one of your own."""
    data_directory: str = ""
    """Folder with the data set's files, if it has moved."""
    json: bool = False
    """Print one JSON document to stdout, and nothing else there."""
    debug: bool = False
    """Show the traceback of an error."""


def inspect_pruning(options: InspectPruningOptions, overrides: dict[str, str]) -> None:
    """`paceline inspect-pruning`."""
    from paceline.reports.pruning_facts import PruningFacts
    from paceline.reports.pruning_page import shown_samples

    notes, folder = Console(stderr=True), Path(options.run)
    path = Path(options.out) if options.out else folder / PAGE
    _check(options, folder, path)
    record = _record(options, folder, notes)
    facts, numbers = PruningFacts(record), shown_samples(record, most=options.most).numbers
    written = _write_page(options, record, numbers, path)  # before anything is printed: a reader may close the pipe
    if options.json:
        print(json.dumps(document(facts), indent=2, allow_nan=False))
    else:
        _print(facts)
    notes.print(written, soft_wrap=True, highlight=False, markup=False)


def _check(options: InspectPruningOptions, folder: Path, path: Path) -> None:
    """Refuse what cannot be, before a run is replayed for it."""
    from paceline.reports.pruning_page import MOST_IMAGES

    if not folder.is_dir():
        problem = "is no folder; give the run's" if folder.exists() else "is not there"
        raise UsageError(f"{folder} {problem}")
    if not 1 <= options.most <= MOST_IMAGES:
        raise UsageError(f"--most must be between 1 and {MOST_IMAGES} images in a row (it is {options.most})")
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"cannot write the page to {path}: give --out a file in a folder that is there")


def _record(options: InspectPruningOptions, folder: Path, notes: Console) -> PruningRecord:
    from paceline.analysis.pruning import record_of_folder
    from paceline.runs.cluster import WorkerOptions

    worker_options = WorkerOptions(model=options.model, data_directory=options.data_directory)
    with Progress(console=notes, transient=True, disable=not notes.is_terminal) as progress:
        task = progress.add_task("replaying", total=None, visible=False)
        return record_of_folder(
            folder,
            worker_options,
            on_step=lambda step, steps: progress.update(task, completed=step, total=steps, visible=True),
        )


def _write_page(options: InspectPruningOptions, record: PruningRecord, numbers: list[int], path: Path) -> str:
    """Write the page; return what is to be printed about it."""
    from paceline.analysis.pruning import images_of
    from paceline.files import write_file
    from paceline.reports.pruning_page import pruning_page

    images, note = images_of(record, numbers, data_directory=options.data_directory)
    page = pruning_page(
        record,
        images,
        title=f"paceline inspect-pruning: {Path(options.run).resolve().name}",
        most=options.most,
        notes=[note] if note else [],
    )
    try:
        message = f"page: {write_file(path, page)}"
    except OSError as error:  # what was found is printed all the same
        message = f"cannot write the page to {path}: {error.strerror or error}"
    return f"{note}\n{message}" if note else message


def _print(facts: PruningFacts) -> None:
    from paceline.reports.pruning_facts import class_table, conditions, headline, label_error_table, sentences

    console = Console(highlight=False, markup=False)
    width = min(console.width, WIDTH)
    console.print(f"{headline(facts)}.", style="bold", width=width)
    for sentence in sentences(facts):
        console.print(sentence, width=width)
    console.print()
    for phrase in conditions(facts):
        console.print(f"  {phrase}", width=width)
    console.print()
    console.print(class_table(facts, most=MOST_CLASSES).rich(), width=width)
    if len(facts.label_errors):
        console.print()
        console.print(label_error_table(facts, most=MOST_LABEL_ERRORS).rich(), width=width)


def document(facts: PruningFacts) -> dict[str, Any]:
    """Return all that was found, as plain values.

    >>> from paceline.reports.pruning_facts import PruningFacts
    >>> from paceline.traces.pruning_record import empty_record
    >>> document(PruningFacts(empty_record()))["suspects"]
    []
    """
    record = facts.record
    return {
        "policy": record.policy,
        "settings": dict(record.settings),
        "epochs": record.epochs,
        "samples": record.samples,
        "prunings": facts.prunings,
        "pruned_are": "hard" if facts.prunes_the_hard else "easy",
        "often": {
            "times": facts.often_times,
            "samples": int(facts.often.sum()),
            "share_of_prunings": facts.often_share,
            "suspects": int((facts.wrong & facts.often).sum()),
        },
        "times_pruned": [{"first": each.first, "last": each.last, "samples": each.samples} for each in facts.bins],
        "classes": [
            {
                "name": each.name,
                "samples": each.samples,
                "prunings": each.prunings,
                "beyond_share": each.beyond,
                "suspects": each.wrong,
            }
            for each in facts.classes
        ],
        "suspects": [
            {
                "sample": number,
                "label": record.classes[record.label[number]],
                "guess": record.classes[record.guess[number]],
                "label_probability": float(record.label_probability[number]),
                "guess_probability": float(record.guess_probability[number]),
                "loss": float(record.loss[number]),
                "times_pruned": int(record.times_pruned[number]),
            }
            for number in facts.label_errors.tolist()
        ],
    }
