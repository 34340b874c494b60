"""The two commands on pruning.

paceline plan-pruning       what pruning would save, before anything is trained
paceline inspect-pruning    which samples a run left out again and again, and whether their labels look wrong
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from paceline.cli.options import UsageError
from paceline.cli.output import ResultsNotKept, note
from paceline.cli.progress import step_bar
from paceline.data.pruning import EPOCHS_STARTING_POINT, EPOCHS_WINDOW, PRUNINGS, PruningSettings
from paceline.lookup import unknown
from paceline.terminal import WIDTH, can_print

if TYPE_CHECKING:
    from paceline.data.pruning.plan import PruningPlan
    from paceline.reports.pruning_facts import PruningFacts
    from paceline.traces.pruning_record import PruningRecord

PAGE = "pruning.html"
MOST_CLASSES, MOST_LABEL_ERRORS = 20, 10  # in the terminal; the page and --json have more
WHOLE_NUMBERS = ("window", "starting_point", "block", "count")
DEFAULTS = PruningSettings()  # but for the window, which is of epochs here


def _setting(metavar: str, default: object) -> Any:
    """Return the type of an option that is text, empty unless it is given; the help shows the default it stands for."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"[{default}]")


@dataclass(frozen=True)
class PlanPruningOptions:
    """Show which epochs pruning would shorten, and what that saves; nothing is trained."""

    samples: int = 50_000
    """Samples of the data set."""
    epochs: int = 200
    """Epochs of the run."""
    batch_size: int = 128
    """Samples of a step, of all ranks together."""
    drop_last: bool = False
    """Leave out the last batch of an epoch if it is not full."""
    policy: str = "fine-pruning"
    """fine-pruning or info-batch."""
    window: Annotated[str, _setting("INT", EPOCHS_WINDOW)] = ""
    """fine-pruning: epochs of a window; counts are cleared when one begins."""
    starting_point: Annotated[str, _setting("INT", EPOCHS_STARTING_POINT)] = ""
    """fine-pruning: from which epoch of the first window on it prunes."""
    attenuation: Annotated[str, _setting("NUMBER", f"{DEFAULTS.attenuation:g}")] = ""
    """fine-pruning: what the starting point is divided by from window to window."""
    block: Annotated[str, _setting("INT", DEFAULTS.block)] = ""
    """fine-pruning: epochs of a block, of which some are pruned."""
    count: Annotated[str, _setting("INT", DEFAULTS.count)] = ""
    """fine-pruning: how many epochs of a block are pruned."""
    prune: Annotated[str, _setting("NUMBER", DEFAULTS.prune)] = ""
    """fine-pruning: who sits out in a pruned epoch, a share (0.3) or a number of samples (15000)."""
    overhead_seconds: Annotated[str, _setting("NUMBER", 0)] = ""
    """fine-pruning: what pruning itself costs in a pruned epoch."""
    ratio: Annotated[str, _setting("NUMBER", DEFAULTS.ratio)] = ""
    """info-batch: how likely a sample below the mean loss sits out."""
    delta: Annotated[str, _setting("NUMBER", DEFAULTS.delta)] = ""
    """info-batch: up to which share of the run it prunes."""
    batch_seconds: Annotated[str, _setting("NUMBER", "none")] = ""
    """What a step takes; with it, times are told in seconds."""
    json: bool = False
    """Print one JSON document to stdout, and nothing else there."""
    debug: bool = False
    """Show the traceback of an error."""


def plan_pruning(options: PlanPruningOptions, overrides: dict[str, str]) -> None:
    """`paceline plan-pruning`."""
    if options.policy not in PLANNERS:
        raise UsageError(str(unknown("pruning", options.policy, PLANNERS)))
    settings, planner = PLANNERS[options.policy]
    for other, (others, _) in PLANNERS.items():
        for name in sorted(set(others) - set(settings)):
            if getattr(options, name):
                raise UsageError(f"{_flag(name)} is a setting of {other}; add --policy {other}")
    given = {name: _value(name, text) for name in (*settings, "batch_seconds") if (text := getattr(options, name))}
    plan = planner(options, given)
    if options.json:
        print(json.dumps(plan.document(), indent=2, allow_nan=False))
    else:
        _print_plan(plan)


def _fine(options: PlanPruningOptions, given: dict[str, Any]) -> PruningPlan:
    from paceline.data.pruning.fine_pruning import FineSchedule
    from paceline.data.pruning.plan import plan_fine

    times = {name: given.pop(name, None) for name in ("overhead_seconds", "batch_seconds")}
    return plan_fine(
        FineSchedule(**given),
        options.samples,
        epochs=options.epochs,
        batch_size=options.batch_size,
        drop_last=options.drop_last,
        **times,
    )


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


def _value(name: str, text: str) -> int | float:
    """Return the number that was given; `prune` is a number of samples if it is a whole number, else a share."""
    try:
        if name in WHOLE_NUMBERS or (name == "prune" and text.lstrip("+-").isdecimal()):
            return int(text)
        return float(text)
    except ValueError:
        kind = "a whole number" if name in WHOLE_NUMBERS else "a number"
        raise UsageError(f"{_flag(name)} must be {kind} (found {text!r})") from None


PLANNERS: dict[str, tuple[tuple[str, ...], Callable[[PlanPruningOptions, dict[str, Any]], PruningPlan]]] = {
    "fine-pruning": (
        (*(name for name in PRUNINGS["fine-pruning"].settings if name != "tolerance"), "overhead_seconds"),
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


# -- paceline inspect-pruning ------------------------------------------------------------------------------------------


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
    _check_paths(options, folder, path)
    record = _record(options, folder, notes)
    facts, numbers = PruningFacts(record), shown_samples(record, most=options.most).numbers
    written = _write_page(options, record, numbers, path)  # before anything is printed: a reader may close the pipe
    if options.json:
        print(json.dumps(document(facts), indent=2, allow_nan=False))
    else:
        _print_facts(facts)
    if isinstance(written, ResultsNotKept):
        raise written
    note(notes, written)


def _check_paths(options: InspectPruningOptions, folder: Path, path: Path) -> None:
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
    with step_bar(notes, "replaying", visible=False) as update:
        return record_of_folder(
            folder,
            worker_options,
            on_step=lambda step, steps: update(completed=step, total=steps, visible=True),
        )


def _write_page(
    options: InspectPruningOptions, record: PruningRecord, numbers: list[int], path: Path
) -> str | ResultsNotKept:
    """Write the page; return what is to be printed about it, or why it could not be written."""
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
    except OSError as error:
        return ResultsNotKept(path, error)
    return f"{note}\n{message}" if note else message


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
