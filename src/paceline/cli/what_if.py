"""`paceline what-if`: how long a recorded run would have taken with another rule, other machines, other messages."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cli.options import (
    UsageError,
    argument,
    code_option,
    data_directory_option,
    debug_option,
    json_option,
    option,
)
from paceline.cli.output import existing_folder, new_folder, note
from paceline.cli.progress import step_bar
from paceline.quantities import percent_text, seconds_text

if TYPE_CHECKING:
    from paceline.analysis.what_if import Answer, Wanted

Value = TypeVar("Value")
MOST_LISTED = 100


@dataclass(frozen=True)
class WhatIfOptions:
    """Predict what would have helped a recorded run.

    The run is played again by the simulator with the times that were recorded, and then with one thing changed at a
    time. Without options, with a sensible list of things. Time alone is predicted.
    """

    run: str = argument("RUN", "the run's folder")
    k: str = option("", "other K, such as 2,3,auto", metavar="LIST")
    strategy: str = option("", "other strategies, such as full,lgc,async,hpsgd", metavar="LIST")
    period: str = option("", "other periods of averaging, such as 4,16", metavar="LIST")
    on: str = option("", "ranks: without the server", metavar="ranks")
    without: str = option("", "one worker less: its number, such as 3", metavar="LIST")
    replace: str = option("", "one worker like the median of the others: its number", metavar="LIST")
    add: str = option("", "so many more workers, like the median", metavar="LIST")
    link: str = option("", "links so many times as fast, such as 0.5,2; 3:2 is worker 3's alone", metavar="LIST")
    codec: str = option("", "messages in another code, such as qsgd or 'power-sgd rank=4'", metavar="LIST")
    which: str = option("", "of a folder with several runs, the one of this strategy", metavar="NAME", common=False)
    check: bool = option(False, "run what can be run for real on this machine, and print that beside the prediction")
    most_checks: int = option(
        3, "with --check and no list: how many of the best are run", least=1, most=200, common=False
    )
    out: str = option(
        "", "folder for the runs of --check", metavar="FOLDER", shown="runs/what-if, or the next free", common=False
    )
    model: str = code_option("network", "model.name")
    data: str = code_option("data", "data.name")
    loss: str = code_option("loss", "model.loss")
    data_directory: str = data_directory_option()
    json: bool = json_option()
    debug: bool = debug_option()


def what_if(options: WhatIfOptions, overrides: dict[str, str]) -> None:
    from paceline.analysis.what_if import what_if as predict

    wanted = wanted_of(options)
    folder = existing_folder(options.run)
    notes = Console(stderr=True)
    with notes.status("playing the run again") if notes.is_terminal else _quiet() as status:
        show = (lambda name: status.update(f"playing: {name}")) if status is not None else (lambda name: None)
        answer = predict(folder, wanted, strategy=options.which, on_remedy=show)
    if options.check:
        answer = _checked(answer, options, notes, everything=wanted.anything)
    if options.json:
        print(answer.to_json())
    else:
        show_answer(answer, Console())


class _quiet:  # noqa: N801 - a context, as contextlib's are
    def __enter__(self) -> Any:
        return None

    def __exit__(self, *error: object) -> None:
        """Do nothing."""


def wanted_of(options: WhatIfOptions) -> Wanted:
    """Return the remedies that are asked for; UsageError names the option and the word that is wrong.

    >>> wanted_of(WhatIfOptions(run="runs/train", k="2,auto", link="3:2,0.5")).links
    ((3, 2.0), (None, 0.5))
    >>> wanted_of(WhatIfOptions(run="runs/train", k="many"))
    Traceback (most recent call last):
    paceline.cli.options.UsageError: --k must be a list of whole numbers or auto, such as 2,3,auto (it has 'many')
    """
    from paceline.analysis.what_if import Wanted

    if options.on not in ("", "ranks"):
        raise UsageError(f"--on must be ranks, or left out (it is {options.on!r:.40})")
    return Wanted(
        k=_list("--k", options.k, _k, "whole numbers or auto, such as 2,3,auto"),
        strategies=_list("--strategy", options.strategy, str, "strategies"),
        period=_list("--period", options.period, _positive, "whole numbers of 1 or more, such as 4,16"),
        without=_list("--without", options.without, _number, "workers' numbers, such as 3"),
        replace=_list("--replace", options.replace, _number, "workers' numbers, such as 3"),
        add=_list("--add", options.add, _positive, "whole numbers of 1 or more, such as 2"),
        links=_list("--link", options.link, _link, "factors, such as 0.5,2 or 3:2 for worker 3's link"),
        codecs=_list("--codec", options.codec, _codec, "codecs, such as qsgd or 'power-sgd rank=4'"),
        on_ranks=options.on == "ranks",
    )


def _list(flag: str, text: str, read: Callable[[str], Value], what: str) -> tuple[Value, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if len(words) > MOST_LISTED:
        raise UsageError(f"{flag} takes at most {MOST_LISTED} ({len(words):,} were given)")
    found = []
    for word in words:
        try:
            found.append(read(word))
        except ValueError as error:
            detail = f": {error}" if flag == "--codec" else ""
            raise UsageError(f"{flag} must be a list of {what} (it has {word[:40]!r}){detail}") from None
    return tuple(found)


def _k(word: str) -> int | Literal["auto"]:
    return "auto" if word == "auto" else _positive(word)


def _number(word: str) -> int:
    if not word.isdecimal():
        raise ValueError
    return int(word[:12])


def _positive(word: str) -> int:
    number = _number(word)
    if number < 1:
        raise ValueError
    return number


def _link(word: str) -> tuple[int | None, float]:
    worker, colon, factor = word.rpartition(":")
    value = float(factor)
    if not (math.isfinite(value) and value > 0):
        raise ValueError
    return (_number(worker) if colon else None), value


def _codec(word: str) -> str:
    from paceline.codecs.naming import parse_codec

    parse_codec(word)
    return word


# -- checks ------------------------------------------------------------------------------------------------------------


def _checked(answer: Answer, options: WhatIfOptions, notes: Console, *, everything: bool) -> Answer:
    """Run remedies for real, one after the other; those that cannot be run say why."""
    from paceline.analysis.what_if.checking import check, why_not
    from paceline.runs.cluster import WorkerOptions

    own = WorkerOptions(
        model=options.model, data=options.data, loss=options.loss, data_directory=options.data_directory
    )
    can = [each for each in answer.predictions if not why_not(answer, each) and not each.remedy.bound]
    if not can:
        reasons = {why_not(answer, each) for each in answer.predictions if why_not(answer, each)}
        raise UsageError(f"--check can run none of these: {'; '.join(sorted(reasons)) or 'there is no remedy'}")
    chosen = can if everything else can[: options.most_checks]
    out = new_folder(options.out, "what-if")
    done: list[Any] = []
    for each in answer.predictions:
        if not any(each is one for one in chosen):
            done.append(dataclasses.replace(each, check_note=why_not(answer, each)))
            continue
        with step_bar(notes, f"for real: {each.name}") as update:
            done.append(
                check(
                    answer,
                    each,
                    out / f"check-{len(done)}",
                    own,
                    on_round=lambda at, of, update=update: update(completed=at, total=of),  # type: ignore[misc]
                )
            )
    note(notes, f"the runs are in {out}")
    return dataclasses.replace(answer, predictions=tuple(done))


# -- words -------------------------------------------------------------------------------------------------------------


def show_answer(answer: Answer, console: Console) -> None:
    """Print the answer in at most 80 columns."""
    from paceline.analysis.what_if.answer import LOSSES, best_lines, error_line

    console.width = min(80, console.width) if console.is_terminal else 80
    run = answer.run
    note(console, f"{run.label}, {run.workers} {run.names}s, {run.rounds} rounds")
    note(console, error_line(answer))
    checked = any(each.measured_seconds is not None for each in answer.predictions)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("remedy", max_width=34)
    for heading in ("seconds", "saved", *(("for real", "off") if checked else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("figure", no_wrap=True)
    for each in answer.predictions:
        real = (
            ("-" if each.measured_seconds is None else seconds_text(each.measured_seconds)),
            ("-" if each.off is None else f"{each.off:+.1%}"),
        )
        table.add_row(
            each.name,
            seconds_text(each.seconds),
            _share(each.saved),
            *(real if checked else ()),
            "bound" if each.remedy.bound else each.mark,
        )
    recorded = ("-", "-") if checked else ()
    table.add_row("as it was", seconds_text(run.seconds), "-", *recorded, "measured", style="bold")
    console.print(table)
    for line in best_lines(answer):
        note(console, line)
    checks = [f"{each.name}: {each.check_note}" for each in answer.predictions if each.check_note] if checked else []
    for sentence in (*checks, *answer.notes, LOSSES):
        for line in textwrap.wrap(sentence, 80):
            note(console, line, style="dim")


def _share(saved: float) -> str:
    """Return a share that is saved; what takes longer has a minus.

    >>> _share(0.25), _share(-0.5)
    ('25 %', '-50 %')
    """
    return percent_text(saved) if saved >= 0 else f"-{percent_text(-saved)}"
