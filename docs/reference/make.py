"""Write the pages of the command line and of a recipe's keys, from the tables that paceline itself reads.

    python docs/reference/make.py       command-line.md and recipe-keys.md, beside this file

The pages are committed, so that they can be read without building the site. A test fails where a page is not what this
program would write.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from paceline.cli.main import COMMANDS, Command
from paceline.cli.options import Option, recipe_options
from paceline.decoding import describe
from paceline.models import MODELS
from paceline.quantities import unit_examples
from paceline.recipes import Recipe

HERE = Path(__file__).parent
FLAG = re.compile(r"(?<![\w`.-])--[a-z][\w.-]*\w(?![^`]*`)")
LARGE, MOST_DIGITS = re.compile(r"\d\S*e\+\d+"), 1e10  # numbers that a range gives as 1e+06
IN_ALL = ("--json", "--debug")  # told once, above all commands
NOTE = "<!-- docs/reference/make.py writes this page from the tables of the command line and of recipes. -->"
COMMAND_LINE = """# Commands and options

`paceline COMMAND --help` prints the common options of a command, `--help-all` all of them. What holds for every
command:

- **A recipe and settings.** Commands that take a recipe take every setting of it as an option, by its dotted name or
  a short one: `--strategy.k 3`, `--k 3` ([recipes](../recipes.md)).
- **Flags.** What is true or false needs no value: `--inject-delays`, `--data.augment`; `--no-data.download` and
  `--data.download false` say no.
- **Units.** A setting whose name ends in a unit takes a plain number in that unit, or a text with another:
  `--delay.shift-seconds 5ms`, `--network.server-bits-per-second 1Gbit/s`, `--pipeline.memory-mb 2GB`. Times are `us`,
  `ms`, `s`, `min`, `h`, `d`; sizes `B`, `kB`, `MB`, `GB`, `TB`, and with an `i` (`GiB`) in powers of 1024; rates
  `Mbit/s`, `MB/s`, and so on.
- **`--out FOLDER`** is always a folder; `export` alone takes a file there. Without it, results go to the next that is
  free: `runs/race`, `runs/race-2`. One that holds a run or results is refused; other files in it are pointed out, and
  stay.
- **`--json`** prints one JSON document to stdout, and nothing else there. Progress, notes and warnings go to stderr.
- **Errors** are one line, and the exit code says whose fault it was: 2 for what was typed, 1 for the rest, 130 for
  Ctrl-C. An error of your own model, data or loss says where it was raised. `--debug` shows the traceback.

Commands, options and choices are completed in bash and zsh, with this line in `~/.bashrc` (or with `zsh` in
`~/.zshrc`):

```sh
eval "$(paceline --print-completion bash)"
```

"""
RECIPE_KEYS = """# Keys of a recipe

A recipe is a TOML file, and every key below is also an option: the key `k` of `[strategy]` is `--strategy.k`. Where
an option has a short form, it stands beside its key. [Recipes](../recipes.md) tells how files, options and defaults go
together. In a file, `none` is the text `"none"`.

"""


def command_line() -> str:
    """Return the page of all commands."""
    rows = [(f"[`paceline {name}`](#{_slug(name)})", _summary(command)) for name, command in COMMANDS.items()]
    parts = [NOTE, "", COMMAND_LINE + _table(("command", "what it does"), rows), ""]
    for name, command in COMMANDS.items():
        parts += [f"## paceline {name}", "", *_about_command(name, command), ""]
    return "\n".join(parts)


def _about_command(name: str, command: Command) -> list[str]:
    own = [option for option in command.table if not option.of_recipe]
    places = [option for option in own if option.spelling.positional]
    usage = " ".join(["paceline", name, *(option.metavar for option in places), "[OPTIONS]"])
    common = [flag for option in own for flag in option.flags if flag in IN_ALL]
    keys = "[every key of a recipe](recipe-keys.md), " if command.common is not None else ""
    beside = f"also takes {keys}{' and '.join(f'`{flag}`' for flag in common)}"
    lines = [f"`{usage}` {beside}.", "", _plain(str(command.options.__doc__))]
    rows = [(f"`{option.metavar.strip('[]')}`", _words(option), "") for option in places]
    rows += [
        (_flags(option), _words(option), _own_default(option))
        for option in own
        if option not in places and not set(option.flags) & set(IN_ALL)
    ]
    return [*lines, "", _table(("option", "what it says", "default"), rows)]


def recipe_keys() -> str:
    """Return the page of every setting of a recipe."""
    hints = get_type_hints(Recipe)
    sections: dict[str, list[Option]] = {}
    for option in recipe_options():
        sections.setdefault(option.path[0] if len(option.path) > 1 else "", []).append(option)
    parts = [NOTE, "", RECIPE_KEYS.rstrip()]
    for section, options in sections.items():
        title = f"`[{section}]`" if section else "Top of the file"
        parts += ["", f"## {title}", ""]
        if section:
            parts += [_plain(str(hints[section].__doc__).split("\n\n")[0]), ""]
        parts += [_table(("key", "what it says", "default", "what it may be"), map(_key, options))]
    return "\n".join([*parts, ""])


def _key(option: Option) -> tuple[str, ...]:
    names = [option.path[-1], *option.flags[1:]]
    return ", ".join(f"`{name}`" for name in names), _words(option), f"`{_toml(option.default)}`", _range(option)


# -- the cells of a row ------------------------------------------------------------------------------------------------


def _flags(option: Option) -> str:
    value = "" if option.is_flag else f" {option.metavar.replace('|', ' or ')}"
    return ", ".join(f"`{flag}{value}`" for flag in option.flags)


def _own_default(option: Option) -> str:
    if option.spelling.shown is not None:
        return _plain(option.spelling.shown)
    missing = option.is_flag or option.default in ("", None, dataclasses.MISSING)
    return "" if missing else f"`{option.default}`"


def _toml(value: Any) -> str:
    """Return a default as it is written in a TOML file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{"none" if value is None else value}"' if value is None or isinstance(value, str) else f"{value}"


def _range(option: Option) -> str:
    """Return the values that a setting may have: words of a list, or a kind of number with its range and unit."""
    words = [f"`{word}`" for word in option.choices]
    if option.hint is str:
        words += [f"`{word}`" for word in MODELS if option.name == "model.name"]  # its rule is in code: networks differ
        own = ["`module:name`"] if option.rule.code or option.name == "model.name" else []
        return ", ".join([*words, *own]) or "text"
    numbers = [kind for kind in (get_args(option.hint) or (option.hint,)) if kind in (int, float)]
    kinds = [_plain(describe(kind) + unit_examples(option.name)) for kind in numbers]
    if get_args(option.hint)[1:] == (...,):
        kinds = [describe(option.hint)]
    rule = option.rule
    if kinds and any(bound is not None for bound in (rule.least, rule.above, rule.most)):
        kinds[0] += f", {LARGE.sub(lambda found: _digits(float(found[0])), rule.range)}"
    infinite = ["`inf`"] if rule.infinite else []
    nothing = ["`none`"] if type(None) in get_args(option.hint) else []
    literal = [f"`{word}`" for part in get_args(option.hint) for word in get_args(part) if not words]
    return "; ".join(["; ".join(kinds), *infinite, *words, *literal, *nothing]).removeprefix("; ")


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value < MOST_DIGITS else f"{value:g}".replace("e+", "e")


def _words(option: Option) -> str:
    words = _plain(option.rule.help)
    if not option.of_recipe and option.choices:
        words += f" ({', '.join(f'`{word}`' for word in option.choices)})"
    return words


# -- Markdown ----------------------------------------------------------------------------------------------------------


def _summary(command: Command) -> str:
    return _plain(str(command.options.__doc__).splitlines()[0])


def _plain(text: str) -> str:
    """Return a text whose paragraphs are one line each, and which Markdown leaves as it is; options are code."""
    paragraphs = "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))
    return FLAG.sub(r"`\g<0>`", re.sub(r"[|<*\[]", r"\\\g<0>", paragraphs))


def _slug(command: str) -> str:
    return f"paceline-{command.replace(' ', '-')}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


PAGES = {"command-line.md": command_line, "recipe-keys.md": recipe_keys}

if __name__ == "__main__":
    for page, text in PAGES.items():
        (HERE / page).write_text(text(), encoding="utf-8")
        print(HERE / page)
