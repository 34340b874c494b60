"""Whether a command of the docs can be typed as it stands there; without running it."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.run import get_args_parser as torchrun_parser

from experiments.__main__ import experiments_of, parsed, settings_of
from paceline.cli.main import COMMANDS, command_named
from tests.docs.pages import ROOT

GIVEN = "..."  # a command that is told in part
BETWEEN = {"|", "||", "&&", ";", "&", ">", ">>", "<", "2>"}
IN_FRONT = {"exec", "nohup", "time", "env", "$"}
# Programs that are none of ours, whose arguments nobody checks here.
OTHERS = {
    ".", "accelerate", "cat", "cd", "cp", "curl", "echo", "eval", "export", "git", "head", "ip", "kill", "kubectl",
    "ls", "mkdir", "mkdocs", "pytest", "ray", "sbatch", "scontrol", "scp", "sleep", "source", "squeue", "srun", "ssh",
    "exit", "sudo", "tail", "tc", "tensorboard", "uv", "wait",
}  # fmt: skip


def commands_of(text: str) -> list[str]:
    """Return the commands of a block of `sh`, one a line; a line that ends in a backslash goes on in the next.

    >>> commands_of("# first\\npaceline race  # why\\n\\npaceline train \\\\\\n    --k 3\\n")
    ['paceline race  # why', 'paceline train     --k 3']
    """
    lines = text.replace("\\\n", "").split("\n")
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def problem_of(command: str, root: Path = ROOT) -> str | None:
    """Return what is wrong with a command of a block of `sh`, or None."""
    try:
        return next((f"{command}: {found}" for part in _parts(command) if (found := _wrong(part, root))), None)
    except ValueError as error:
        return f"{command}: {error}"


def _parts(command: str) -> Iterator[list[str]]:
    """Yield the simple commands of a line, without comments and settings of the environment."""
    words = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    words.whitespace_split, words.commenters = True, "#"
    part: list[str] = []
    for word in [*words, ";"]:
        if word in BETWEEN:
            while part and (part[0] in IN_FRONT or re.match(r"[A-Z_]+=", part[0])):
                del part[0]
            if part:
                yield part
            part = []
        else:
            part.append(word)


def _wrong(words: list[str], root: Path) -> str | None:
    program, rest = words[0].rpartition("/")[2] if words[0] != "." else ".", words[1:]
    if GIVEN in words:
        return None
    if program == "paceline":
        return _wrong_paceline(rest)
    if program == "torchrun" or rest[:2] == ["-m", "torch.distributed.run"]:
        return _wrong_torchrun(rest if program == "torchrun" else rest[2:], root)
    if program in ("python", "python3"):
        return _wrong_python(rest, root)
    if program == "make":
        return _wrong_make(rest, root)
    if program == "pip":
        return _wrong_pip(rest, root)
    return (
        None
        if program in OTHERS or program.startswith("$")
        else f"{program!r} is no program that the docs use; mistyped?"
    )


def _wrong_paceline(arguments: list[str]) -> str | None:
    if arguments[:1] and arguments[0] in ("--print-completion", "--version", "--help", "help"):
        return None
    heard = io.StringIO()
    with contextlib.redirect_stderr(heard):
        name, rest = command_named(arguments)
        if not {"--help", "--help-all"} & set(rest):
            COMMANDS[name].parse(rest)
    return heard.getvalue().strip() or None


def _wrong_torchrun(arguments: list[str], root: Path) -> str | None:
    heard = io.StringIO()
    try:
        with contextlib.redirect_stderr(heard):
            parser = torchrun_parser()
            parser.allow_abbrev = False
            found = parser.parse_args(arguments)
    except SystemExit:
        return heard.getvalue().strip().splitlines()[-1]
    script = ["-m", found.training_script] if found.module else [found.training_script]
    return _wrong_python([*script, *found.training_script_args], root)


def _wrong_python(arguments: list[str], root: Path) -> str | None:
    if arguments[:1] == ["-m"]:
        module, rest = arguments[1], arguments[2:]
        return {"paceline": _wrong_paceline, "experiments": _wrong_experiments}.get(module, lambda rest: None)(rest)
    script, options = arguments[0], [word.partition("=")[0] for word in arguments[1:] if word.startswith("--")]
    if not script.startswith(("examples/", "docs/", "experiments/", "tests/")):
        return None  # a script of the reader's own
    if not (root / script).is_file():
        return f"there is no {script}"
    known = _options_of((root / script).read_text(encoding="utf-8"))
    return next((f"{script} has no {option}" for option in options if option not in known), None)


def _options_of(script: str) -> set[str]:
    """Return the options that a script names, and their opposites where it has such.

    >>> sorted(_options_of('add_argument("--steps"); add_argument("--fast", action=argparse.BooleanOptionalAction)'))
    ['--fast', '--help', '--no-fast', '--no-steps', '--steps']
    """
    named = set(re.findall(r"""["'](--[\w-]+)["']""", script)) | {"--help"}
    opposites = {f"--no-{name[2:]}" for name in named - {"--help"}} if "BooleanOptionalAction" in script else set()
    return named | opposites


def _wrong_experiments(arguments: list[str]) -> str | None:
    heard = io.StringIO()
    try:
        with contextlib.redirect_stderr(heard), contextlib.redirect_stdout(heard):
            options = parsed(arguments)
            for experiment in experiments_of(options):
                if options.names:
                    settings_of(experiment, options)
    except SystemExit:
        return " ".join(heard.getvalue().split())
    except ValueError as error:
        return str(error)
    return None


def _wrong_make(arguments: list[str], root: Path) -> str | None:
    targets = re.findall(r"^([a-z][\w-]*):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    asked = [word for word in arguments if "=" not in word and not word.startswith("-")]
    for word in asked:
        if word not in targets:
            return f"the Makefile has no {word}"
    given = next((word.partition("=")[2] for word in arguments if word.startswith("ARGS=")), "")
    rooms = {"reproduce": "papers", "bench": "questions,timings"}
    of = rooms.get(asked[0]) if asked else None
    return _wrong_experiments(["--of", of, *shlex.split(given)]) if of else None


def _wrong_pip(arguments: list[str], root: Path) -> str | None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"(?:paceline|\.)\[([\w,]+)\]", " ".join(arguments)):
        for extra in extras.split(","):
            if extra not in project["optional-dependencies"]:
                return f"there is no extra {extra!r}"
    return None
