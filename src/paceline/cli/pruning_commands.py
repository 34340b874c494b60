"""The two commands on pruning.

paceline plan pruning       what pruning would save, before anything is trained
paceline inspect pruning    which samples a run left out again and again, and whether their labels look wrong;
                            of two runs, whether they left out the same samples
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from paceline.cli.options import (
    UsageError,
    argument,
    code_option,
    data_directory_option,
    debug_option,
    json_option,
    option,
)
from paceline.cli.output import ResultsNotKept, existing_folder, note
from paceline.cli.progress import step_bar
from paceline.data.pruning import EPOCHS_STARTING_POINT, EPOCHS_WINDOW, PRUNINGS, PruningSettings, window_refusal
from paceline.errors import warn
from paceline.settings import convert
from paceline.terminal import WIDTH, can_print
from paceline.traces.run_folder import make_folder

if TYPE_CHECKING:
    from paceline.data.pruning.plan import PruningPlan
    from paceline.reports.pruning_facts import PruningFacts
    from paceline.traces.pruning_record import PruningRecord

PAGE, OVERLAP_PAGE = "pruning.html", "overlap.html"
MOST_IN_A_ROW = 12  # images of the page
MOST_CLASSES, MOST_LABEL_ERRORS = 20, 10  # in the terminal; the page and --json have more
DEFAULTS = PruningSettings()  # but for the window, which is of epochs here


@dataclass(frozen=True)
class PlanPruningOptions:
    """Show what pruning would save, epoch by epoch.

    Nothing is trained.
    """

    samples: int = option(50_000, "samples of the data set")
    epochs: int = option(200, "epochs of the run")
    batch_size: int = option(128, "samples of a step, of all ranks together")
    drop_last: bool = option(False, "leave out the last batch of an epoch if it is not full")
    policy: str = option("fine-pruning", "which samples sit out", choices=lambda: PLANNERS)
    window: int | None = option(
        None, "fine-pruning: epochs of a window; counts are cleared when one begins", shown=f"{EPOCHS_WINDOW}"
    )
    window_at: str | None = option(
        None,
        "fine-pruning: epochs at which windows begin, where the learning rate changes, in place of a window",
        metavar="EPOCH,EPOCH,...",
        shown="none",
        common=False,
    )
    starting_point: int | None = option(
        None,
        "fine-pruning: from which epoch of the first window on it prunes",
        shown=f"{EPOCHS_STARTING_POINT}",
        common=False,
    )
    attenuation: float | None = option(
        None,
        "fine-pruning: what the starting point is divided by from window to window",
        shown=f"{DEFAULTS.attenuation:g}",
        common=False,
    )
    block: int | None = option(
        None, "fine-pruning: epochs of a block, of which some are pruned", shown=f"{DEFAULTS.block}", common=False
    )
    count: int | None = option(
        None, "fine-pruning: how many epochs of a block are pruned", shown=f"{DEFAULTS.count}", common=False
    )
    prune: int | float | None = option(
        None,
        "fine-pruning: who sits out in a pruned epoch, a share (0.3) or a number of samples (15000)",
        shown=f"{DEFAULTS.prune}",
    )
    overhead_seconds: float | None = option(
        None, "fine-pruning: what pruning itself costs in a pruned epoch", shown="0", common=False
    )
    ratio: float | None = option(
        None, "info-batch: how likely a sample below the mean loss sits out", shown=f"{DEFAULTS.ratio}"
    )
    delta: float | None = option(
        None, "info-batch: up to which share of the run it prunes", shown=f"{DEFAULTS.delta}", common=False
    )
    batch_seconds: float | None = option(None, "what a step takes; with it, times are told in seconds", shown="none")
    json: bool = json_option()
    debug: bool = debug_option()


def plan_pruning(options: PlanPruningOptions, overrides: dict[str, str]) -> None:
    settings, planner = PLANNERS[options.policy]
    for other, (others, _) in PLANNERS.items():
        for name in sorted(set(others) - set(settings)):
            if getattr(options, name) is not None:
                raise UsageError(f"{_flag(name)} is a setting of {other}; add --policy {other}")
    given = {name: value for name in (*settings, "batch_seconds") if (value := getattr(options, name)) is not None}
    plan = planner(options, given)
    if options.json:
        print(json.dumps(plan.document(), indent=2, allow_nan=False))
    else:
        _print_plan(plan)


def _fine(options: PlanPruningOptions, given: dict[str, Any]) -> PruningPlan:
    from paceline.data.pruning.fine_pruning import FineSchedule
    from paceline.data.pruning.plan import plan_fine

    times = {name: given.pop(name, None) for name in ("overhead_seconds", "batch_seconds")}
    if "window_at" in given:
        given["window_at"] = _window_starts(given["window_at"])
        if "window" in given:
            raise UsageError(window_refusal(given["window"], given["window_at"]))
    return plan_fine(
        FineSchedule(**given),
        options.samples,
        epochs=options.epochs,
        batch_size=options.batch_size,
        drop_last=options.drop_last,
        **times,
    )


def _window_starts(text: str) -> tuple[int, ...]:
    try:
        return convert(text, tuple[int, ...])  # type: ignore[no-any-return]
    except ValueError:
        raise UsageError(f"--window-at: expected epochs such as 60,120,160, got {text!r}") from None


def _info(options: PlanPruningOptions, given: dict[str, Any]) -> PruningPlan:
    from paceline.data.pruning.plan import plan_info

    return plan_info(
        options.samples,
        epochs=options.epochs,
        ratio=given.get("ratio", DEFAULTS.ratio),
        delta=given.get("delta", DEFAULTS.delta),
        batch_size=options.batch_size,
        drop_last=options.drop_last,
        batch_seconds=given.get("batch_seconds"),
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


PLANNERS: dict[str, tuple[tuple[str, ...], Callable[[PlanPruningOptions, dict[str, Any]], PruningPlan]]] = {
    "fine-pruning": (
        (
            *(name for name in PRUNINGS["fine-pruning"].settings if name not in ("tolerance", "protect")),
            "overhead_seconds",
        ),
        _fine,
    ),
    "info-batch": (PRUNINGS["info-batch"].settings, _info),
}
"""Every policy that can be planned: its options, and the function that plans it."""


def _print_plan(plan: PruningPlan) -> None:
    """Print the text, coloured where the terminal has colours, and in ASCII where it knows no blocks."""
    console = Console(highlight=False, markup=False)
    text = plan.text()
    if not can_print(text, console.encoding):
        text = plan.text(ascii_only=True)
    headline, _, rest = text.partition("\n\n")
    console.print(headline, style="bold", soft_wrap=True)
    console.print()
    coloured = Text(rest)
    coloured.highlight_regex("█+", "cyan")
    coloured.highlight_regex("[░·]+", "dim")
    console.print(coloured, soft_wrap=True)


# -- paceline inspect pruning ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InspectPruningOptions:
    """Show whom a run left out, and doubtful labels; of two runs, whom both left out."""

    run: str = argument("RUN", "the run's folder")
    other: str = argument("[RUN2]", "the folder of a second run on the same data: what both prune most", default="")
    most: int = option(MOST_IN_A_ROW, "images in a row of the page, at most")
    out: str = option("", f"folder for {PAGE}; of two runs, {OVERLAP_PAGE}", metavar="FOLDER", shown="the run's folder")
    model: str = code_option("network", "model.name")
    data: str = code_option("data", "data.name")
    loss: str = code_option("loss", "model.loss")
    data_directory: str = data_directory_option()
    json: bool = json_option()
    debug: bool = debug_option()


def inspect_pruning(options: InspectPruningOptions, overrides: dict[str, str]) -> None:
    from paceline.reports.pruning_facts import PruningFacts

    if options.other:
        _compare_pruning(options)
        return
    notes, folder = Console(stderr=True), existing_folder(options.run)
    path = _page_path(options, folder)
    record = _record(options, folder, notes)
    facts = PruningFacts(record)
    written = _write_page(options, record, path)  # before anything is printed: a reader may close the pipe
    if options.json:
        print(json.dumps(document(facts), indent=2, allow_nan=False))
    else:
        _print_facts(facts)
    if isinstance(written, ResultsNotKept):
        raise written
    note(notes, written)


def _compare_pruning(options: InspectPruningOptions) -> None:
    """Show what two runs prune in common."""
    from paceline.files import write_file
    from paceline.reports.pruning_overlap import OverlapFacts, class_table, overlap_page, overlap_table

    notes = Console(stderr=True)
    folders = existing_folder(options.run), existing_folder(options.other)
    path = _page_path(options, folders[0], OVERLAP_PAGE)
    names = options.run.rstrip("/\\"), options.other.rstrip("/\\")
    first, second = (_record(options, folder, notes) for folder in folders)
    facts = OverlapFacts(first, second, names)
    written = None
    try:
        write_file(path, overlap_page(facts, title=f"paceline inspect pruning: {names[0]} and {names[1]}"))
    except OSError as error:
        written = ResultsNotKept(path, error)
    if options.json:
        print(json.dumps(facts.document(), indent=2, allow_nan=False))
    else:
        console = Console(highlight=False, markup=False)
        width = min(console.width, WIDTH)
        console.print(f"{facts.headline}.", style="bold", width=width)
        for sentence in facts.sentences:
            console.print(sentence, width=width)
        console.print()
        for phrase in facts.conditions:
            console.print(f"  {phrase}", width=width)
        console.print()
        console.print(overlap_table(facts).rich(), width=width)
        console.print()
        console.print(class_table(facts, most=MOST_CLASSES).rich(), width=width)
    if written is not None:
        raise written
    note(notes, f"page: {path}")


def _page_path(options: InspectPruningOptions, folder: Path, page: str = PAGE) -> Path:
    """Return the page's file; refuse what cannot be, before a run is replayed for it."""
    from paceline.reports.pruning_page import MOST_IMAGES

    if not 1 <= options.most <= MOST_IMAGES:
        raise UsageError(f"--most must be between 1 and {MOST_IMAGES} images in a row (it is {options.most})")
    out = Path(options.out or folder)
    if out.suffix == ".html" and not out.is_dir() and page == PAGE:
        if not out.parent.is_dir():
            raise UsageError(f"cannot write the page to {out}: give --out a folder")
        warn(f"--out is now a folder, for {PAGE}; a file goes with the next release (--out {options.out})")
        return out
    try:
        make_folder(out)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror or error}; give another --out") from None
    return out / page


def _record(options: InspectPruningOptions, folder: Path, notes: Console) -> PruningRecord:
    from paceline.analysis.pruning import record_of_folder
    from paceline.runs.cluster import WorkerOptions

    worker_options = WorkerOptions(
        model=options.model, data=options.data, loss=options.loss, data_directory=options.data_directory
    )
    with step_bar(notes, "replaying", visible=False) as update:
        return record_of_folder(
            folder,
            worker_options,
            on_step=lambda step, steps: update(completed=step, total=steps, visible=True),
        )


def _write_page(options: InspectPruningOptions, record: PruningRecord, path: Path) -> str | ResultsNotKept:
    """Write the page; return what is to be printed about it, or why it could not be written."""
    from paceline.files import write_file

    page, note = _page(record, Path(options.run), options.data_directory, data=options.data, most=options.most)
    try:
        message = f"page: {write_file(path, page)}"
    except OSError as error:
        return ResultsNotKept(path, error)
    return f"{note}\n{message}" if note else message


def _page(
    record: PruningRecord, folder: Path, data_directory: str, *, data: str = "", most: int = MOST_IN_A_ROW
) -> tuple[str, str]:
    """Return the page, and a note on why it has no images; empty if it has."""
    from paceline.analysis.pruning import images_of
    from paceline.reports.pruning_page import pruning_page, shown_samples

    numbers = shown_samples(record, most=most).numbers
    images, note = images_of(record, numbers, data_directory=data_directory, data=data)
    title = f"paceline inspect pruning: {folder.resolve().name}"
    return pruning_page(record, images, title=title, most=most, notes=[note] if note else []), note


def pruning_page_of(folder: Path, *, data_directory: str = "") -> str:
    """Return the page of the record that a folder holds."""
    from paceline.traces.pruning_record import read_pruning

    return _page(read_pruning(folder), folder, data_directory)[0]


def _print_facts(facts: PruningFacts) -> None:
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
        "labels_judged": not facts.why_not_judged,
        "why_labels_are_not_judged": facts.why_not_judged or None,
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
