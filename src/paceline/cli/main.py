"""The entry point: which command runs, and how its errors are printed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from paceline import __version__
from paceline.cli.bench import BenchOptions, bench
from paceline.cli.cluster import (
    KeysOptions,
    ReplayOptions,
    ServeOptions,
    TrainOptions,
    WorkOptions,
    keys,
    replay,
    serve,
    train,
    work,
)
from paceline.cli.inspect import InspectOptions, inspect
from paceline.cli.options import UsageError, parse
from paceline.cli.plan import PlanOptions, plan
from paceline.cli.pruning_commands import InspectPruningOptions, PlanPruningOptions, inspect_pruning, plan_pruning
from paceline.cli.simulate import RaceOptions, SimulateOptions, race, simulate
from paceline.lookup import unknown

COMMANDS: dict[str, tuple[type[Any], Callable[[Any, dict[str, str]], None]]] = {
    "race": (RaceOptions, race),
    "simulate": (SimulateOptions, simulate),
    "inspect": (InspectOptions, inspect),
    "plan": (PlanOptions, plan),
    "train": (TrainOptions, train),
    "serve": (ServeOptions, serve),
    "work": (WorkOptions, work),
    "keys": (KeysOptions, keys),
    "replay": (ReplayOptions, replay),
    "bench": (BenchOptions, bench),
    "plan-pruning": (PlanPruningOptions, plan_pruning),
    "inspect-pruning": (InspectPruningOptions, inspect_pruning),
}
WITHOUT_RECIPE = ("work", "keys", "replay", "bench", "plan-pruning", "inspect-pruning")

USER_ERROR, OTHER_ERROR, INTERRUPTED = 2, 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    >>> main(["--version"])
    paceline 0.1.0
    0
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    return exit_code(lambda: _dispatch(given), debug="--debug" in given)


def exit_code(call: Callable[[], int | None], *, debug: bool) -> int:
    """Call a command and return the exit code; an error is printed in one line.

    >>> exit_code(lambda: None, debug=False)
    0
    """
    try:
        return call() or 0
    except ValueError as error:
        return _failed(error, USER_ERROR, debug=debug)
    except KeyboardInterrupt:
        print("paceline: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone, and nobody is left to read an error
        return OTHER_ERROR
    except (OSError, MemoryError) as error:
        return _failed(error, OTHER_ERROR, debug=debug)
    except Exception as error:
        hint = "" if debug else " (a bug in paceline or in your model; --debug shows where)"
        return _failed(error, OTHER_ERROR, debug=debug, prefix=f"{type(error).__name__}: ", suffix=hint)


def _dispatch(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if given[0] in ("-V", "--version"):
        print(f"paceline {__version__}")
        return 0
    name, *rest = given
    if name not in COMMANDS:
        raise UsageError(str(unknown("command", name, COMMANDS)))
    kind, call = COMMANDS[name]
    try:
        options, overrides = parse(kind, rest, prog=f"paceline {name}", with_recipe=name not in WITHOUT_RECIPE)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    call(options, overrides)
    return 0


def _help() -> str:
    lines = ["paceline: train at the pace of the pack, not of its slowest rider.", "", "Commands:"]
    lines += [f"  paceline {name:<15} {str(kind.__doc__).splitlines()[0]}" for name, (kind, _) in COMMANDS.items()]
    lines += ["", "`paceline COMMAND --help` lists its options; `paceline race` is a good start."]
    return "\n".join(lines)


def _failed(error: BaseException, code: int, *, debug: bool, prefix: str = "", suffix: str = "") -> int:
    if debug:
        traceback.print_exception(error)
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"paceline: error: {prefix}{text}{suffix}", file=sys.stderr)
    return code
