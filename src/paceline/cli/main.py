"""The entry point: which command runs, and how its errors are printed.

    paceline COMMAND ...            race, simulate, train, ...
    paceline plan pipeline ...      the commands of a group are named by two words
    paceline COMMAND --help         its common options; --help-all: all of them

A name of before stands for its command with a line of warning, for one release.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.cli.bench import BenchCodecsOptions, bench_codecs
from paceline.cli.cluster import ELSEWHERE, ServeOptions, TrainOptions, serve, train
from paceline.cli.completion import completion_script
from paceline.cli.diagnose import DiagnoseOptions, diagnose
from paceline.cli.export import ExportOptions, export
from paceline.cli.help_text import command_help, commands_help, summary
from paceline.cli.inspect import InspectRatesOptions, inspect_rates
from paceline.cli.live import LiveOptions, live
from paceline.cli.options import Option, UsageError, naming_typed_flags, options_of, parse
from paceline.cli.plan import PlanPipelineOptions, plan_pipeline
from paceline.cli.pruning_commands import InspectPruningOptions, PlanPruningOptions, inspect_pruning, plan_pruning
from paceline.cli.replay import ReplayOptions, replay
from paceline.cli.report import ReportOptions, report
from paceline.cli.simulate import RaceOptions, SimulateOptions, race, simulate
from paceline.cli.what_if import WhatIfOptions, what_if
from paceline.cli.work import KeysOptions, WorkOptions, keys, work
from paceline.errors import in_a_line, is_plain, raised_in, show_warning, warn
from paceline.loggers import TENSORBOARD
from paceline.lookup import unknown
from paceline.traces.run_folder import removing_unused


@dataclass(frozen=True)
class Command:
    """A command: its options, what it calls, and the settings of a recipe that its help shows (None: it has none)."""

    options: type[Any]
    call: Callable[[Any, dict[str, str]], None]
    common: tuple[str, ...] | None = None

    @property
    def table(self) -> tuple[Option, ...]:
        """All options, the command's own first."""
        return options_of(self.options, with_recipe=self.common is not None)

    def parse(self, arguments: Sequence[str]) -> tuple[Any, dict[str, str]]:
        """Return the command's own options and the recipe's settings that were typed."""
        return parse(self.options, arguments, with_recipe=self.common is not None)

    def help(self, name: str, *, everything: bool) -> str:
        """Return the help of the command."""
        about = str(self.options.__doc__)
        return command_help(name, about, self.table, common=self.common or (), everything=everything)


TRAINED = ("data.name", "data.directory", "model.name", "model.loss", "worker.batch_size", "optimizer.lr", "rounds")
CLUSTER = ("cluster.workers", "strategy.k", *TRAINED)
REAL = ("strategy.name", "strategy.on", *CLUSTER, "delay.inject")

COMMANDS: dict[str, Command] = {
    "race": Command(RaceOptions, race, CLUSTER),
    "simulate": Command(SimulateOptions, simulate, ("strategy.name", *CLUSTER, "seed")),
    "train": Command(TrainOptions, train, REAL),
    "serve": Command(ServeOptions, serve, ("strategy.name", *CLUSTER)),
    "work": Command(WorkOptions, work),
    "keys": Command(KeysOptions, keys),
    "replay": Command(ReplayOptions, replay),
    "report": Command(ReportOptions, report),
    "diagnose": Command(DiagnoseOptions, diagnose),
    "export": Command(ExportOptions, export),
    "live": Command(LiveOptions, live),
    "what-if": Command(WhatIfOptions, what_if),
    "plan pipeline": Command(
        PlanPipelineOptions, plan_pipeline, ("pipeline.stages", "pipeline.microbatches", "model.name", "data.name")
    ),
    "plan pruning": Command(PlanPruningOptions, plan_pruning),
    "inspect rates": Command(InspectRatesOptions, inspect_rates, ("optimizer.name", *TRAINED)),
    "inspect pruning": Command(InspectPruningOptions, inspect_pruning),
    "bench codecs": Command(BenchCodecsOptions, bench_codecs),
}
GROUPS = {name.split()[0] for name in COMMANDS if " " in name}
OLD_NAMES = {
    "plan": "plan pipeline",
    "inspect": "inspect rates",
    "plan-pruning": "plan pruning",
    "inspect-pruning": "inspect pruning",
}
"""A name of before -> the command that it stands for."""
HELP = ("-h", "--help", "--help-all")

USER_ERROR, OTHER_ERROR, INTERRUPTED = 2, 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    >>> main(["--version"])
    paceline 0.2.0
    0
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        return exit_code(lambda: _dispatch(given, may_import=arguments is None), debug="--debug" in given)


def _may_import_from_here() -> None:
    """Let code of a user's own import its neighbours, as `python -m paceline` does."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder was deleted: change to one that is there (cd)") from None
    if here not in sys.path:
        sys.path.append(here)


def _values() -> dict[str, Iterable[str]]:
    """Return words that may follow options which take others as well: code of a user's own, or a list."""
    from paceline.models import MODELS
    from paceline.strategies import STRATEGIES
    from paceline.strategies.averaging import AVERAGING

    places = ("server", "ranks", *ELSEWHERE)
    return {
        "--model": MODELS,
        "--model.name": MODELS,
        "--strategies": (*STRATEGIES, *AVERAGING),
        "--on": places,
        "--strategy.on": places,
        "--log": (TENSORBOARD,),
    }


def exit_code(call: Callable[[], int | None], *, debug: bool) -> int:
    """Call a command and return the exit code; an error is printed in one line.

    >>> exit_code(lambda: None, debug=False)
    0
    """
    try:
        with removing_unused():
            return call() or 0
    except KeyboardInterrupt:
        print("paceline: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone, and nobody is left to read an error
        return OTHER_ERROR
    except Exception as error:
        if debug:
            traceback.print_exception(error)
        hint = "" if debug or is_plain(error) else _where_to_look(error)
        print(f"paceline: error: {in_a_line(error)}{hint}", file=sys.stderr)
        return USER_ERROR if is_plain(error) and isinstance(error, ValueError) else OTHER_ERROR


def _where_to_look(error: Exception) -> str:
    return "; --debug shows more" if raised_in(error) else " (a bug in paceline or in your model; --debug shows where)"


def _dispatch(given: list[str], *, may_import: bool) -> int:
    if may_import:
        _may_import_from_here()
    if given[:1] == ["help"]:
        given = [*given[1:], "--help"]
    if not given or given[0] in HELP:
        print(_help())
    elif given[0] in ("-V", "--version"):
        print(f"paceline {__version__}")
    elif given[0].partition("=")[0] == "--print-completion":
        shell = given[0].partition("=")[2] or " ".join(given[1:])
        tables = {name: command.table for name, command in COMMANDS.items()}
        first = ("help", "--help", "--version", "--print-completion")
        print(completion_script(shell, tables, first=first, values=_values()))
    else:
        name, arguments = command_named(given)
        if set(arguments) & set(HELP) or (name in GROUPS and not arguments):
            print(_help_of(name, everything="--help-all" in arguments))
        else:
            options, overrides = COMMANDS[name].parse(arguments)
            with naming_typed_flags(COMMANDS[name].table, arguments):
                COMMANDS[name].call(options, overrides)
    return 0


def command_named(given: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command's name and its arguments; the name of a group where its help is asked for.

    >>> command_named(["plan", "pruning", "--json"])
    ('plan pruning', ['--json'])
    >>> command_named(["plan", "pipline"])
    Traceback (most recent call last):
    paceline.cli.options.UsageError: unknown command 'plan pipline'; did you mean 'plan pipeline'?
    """
    first, rest = given[0], list(given[1:])
    if first in COMMANDS:
        return first, rest
    if first in GROUPS and rest and f"{first} {rest[0]}" in COMMANDS:
        return f"{first} {rest[0]}", rest[1:]
    if first in GROUPS and (set(rest) & set(HELP) or not rest):
        return first, rest
    if first in GROUPS and rest and (first not in OLD_NAMES or not rest[0].startswith("-")):
        _refuse_misspelt(first, rest[0])
    if first in OLD_NAMES:
        new = OLD_NAMES[first]
        warn(f"`paceline {first}` is now `paceline {new}`; the old name goes with the next release")
        return new, rest
    if first.startswith("-"):
        raise UsageError(f"unknown option {first}; options come after a command, such as `paceline race {first}`")
    raise UsageError(str(unknown("command", first, [*_first_words()])))


def _refuse_misspelt(group: str, word: str) -> None:
    """Refuse a word that is no command of its group, unless the group's name of before took a recipe there."""
    names = [name for name in COMMANDS if name.startswith(f"{group} ")]
    near = difflib.get_close_matches(f"{group} {word}", names, n=1, cutoff=0.8)
    if group in OLD_NAMES and (not near or Path(word).exists()):
        return
    if word.startswith("-"):
        raise UsageError(f"{group} needs a second word: {', '.join(names)}")
    hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(names)}"
    raise UsageError(f"unknown command {f'{group} {word}'!r}; {hint}")


def _first_words() -> dict[str, None]:
    return dict.fromkeys(name.split()[0] for name in COMMANDS)


def _help() -> str:
    return commands_help(
        "paceline: train at the pace of the pack, not of its slowest rider.\n\nCommands:",
        {name: summary(command.options) for name, command in COMMANDS.items()},
        ["`paceline COMMAND --help` shows its common options, `--help-all` all of them.",
         "`paceline --print-completion bash|zsh` prints a script for your shell.",
         "`paceline race` is a good start."],
    )  # fmt: skip


def _help_of(name: str, *, everything: bool) -> str:
    if name not in GROUPS:
        return COMMANDS[name].help(name, everything=everything)
    members = {each: summary(COMMANDS[each].options) for each in COMMANDS if each.startswith(f"{name} ")}
    return commands_help("Commands:", members, [f"`paceline {next(iter(members))} --help` shows its options."])
