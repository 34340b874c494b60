"""Command-line options from dataclasses: those of a command, and one for every setting of a recipe.

Recipe options arrive as text and are converted and checked where those of a file are (`paceline.recipes.reading`), so
that a bad value is refused in the same words wherever it was written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import tyro

from paceline.errors import PacelineError
from paceline.recipes import Recipe, read_recipe
from paceline.settings import Rule, describe

UNSET = "\x00unset"

RecipeFile = Annotated[tyro.conf.Positional[str], tyro.conf.arg(name="recipe", metavar="[RECIPE]")]
"""The first argument of every command that takes a recipe."""

Command = TypeVar("Command")


class UsageError(PacelineError, ValueError):
    """A command line that cannot be understood or carried out.

    >>> raise UsageError("unknown option --rouds")
    Traceback (most recent call last):
    paceline.cli.options.UsageError: unknown option --rouds
    """


@dataclass(frozen=True)
class RecipeOption:
    """One setting of a recipe as an option."""

    path: tuple[str, ...]
    hint: Any
    default: Any
    rule: Rule

    @property
    def flags(self) -> list[str]:
        """The option's dotted form, and its short form where it has one.

        >>> next(setting for setting in recipe_options() if setting.path == ("strategy", "k")).flags
        ['--strategy.k', '--k']
        """
        dotted = "--" + ".".join(self.path).replace("_", "-")
        short = f"--{self.rule.alias}" if self.rule.alias else dotted
        return [dotted] if short == dotted else [dotted, short]


def recipe_options() -> Iterator[RecipeOption]:
    """Yield every setting of a recipe.

    >>> len(list(recipe_options())) > 30
    True
    """
    hints = get_type_hints(Recipe)
    for field in dataclasses.fields(Recipe):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            inner_hints = get_type_hints(kind)
            for inner in dataclasses.fields(kind):
                path = (field.name, inner.name)
                yield RecipeOption(path, inner_hints[inner.name], inner.default, inner.metadata["rule"])
        else:
            yield RecipeOption((field.name,), kind, field.default, field.metadata["rule"])


def given_recipe(file: str, overrides: dict[str, str]) -> Recipe:
    """Return the recipe of a file, or the default one, with the settings that were typed."""
    return read_recipe(Path(file) if file else None, overrides)


def parse(
    command: type[Command], arguments: Sequence[str], *, prog: str, with_recipe: bool = True
) -> tuple[Command, dict[str, str]]:
    """Return the options of a command, and the recipe's settings among them as {dotted name: text}.

    >>> @dataclass(frozen=True)
    ... class Example:
    ...     json: bool = False
    >>> parse(Example, ["--json", "--k", "3"], prog="example")
    (Example(json=True), {'strategy.k': '3'})
    >>> parse(Example, ["--rouds", "3"], prog="example")
    Traceback (most recent call last):
    paceline.cli.options.UsageError: unknown option --rouds; did you mean --rounds?
    """
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            parsed: Any
            parsed, extra = tyro.cli(
                _options_of(cast(Any, command), with_recipe=with_recipe),
                args=list(arguments),
                prog=prog,
                description=command.__doc__,
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UsageError(_one_line(message.getvalue())) from None
    if extra:
        raise _unknown_option(extra[0], command, with_recipe=with_recipe)
    return parsed.command, dict(_given(parsed.recipe)) if with_recipe else {}


@functools.cache
def _options_of(command: Any, *, with_recipe: bool) -> Any:
    """Return all options as one dataclass."""
    unprefixed = tyro.conf.arg(name="")
    parts: list[Any] = [("command", Annotated[command, unprefixed])]
    if with_recipe:
        parts.append(("recipe", Annotated[_recipe_dataclass(), unprefixed]))
    return dataclasses.make_dataclass(command.__name__, parts)


@functools.cache
def _recipe_dataclass() -> type:
    """Return a dataclass like `Recipe` in which every setting is optional text."""
    groups: dict[str, list[Any]] = {}
    top: list[Any] = []
    for setting in recipe_options():
        entry = (setting.path[-1], Annotated[str, _argument(setting)], UNSET)
        (top if len(setting.path) == 1 else groups.setdefault(setting.path[0], [])).append(entry)
    hints = get_type_hints(Recipe)
    for name, entries in groups.items():
        section = dataclasses.make_dataclass(name, entries, frozen=True)
        section.__doc__ = str(hints[name].__doc__).splitlines()[0]
        top.append((name, section, dataclasses.field(default_factory=section)))
    return dataclasses.make_dataclass("recipe", top, frozen=True)


def _argument(setting: RecipeOption) -> Any:
    choices = list(setting.rule.choices()) if setting.rule.choices and setting.hint is str else []
    return tyro.conf.arg(
        metavar="NAME" if choices else _metavar(setting.hint),
        help=setting.rule.help + (f" ({', '.join(choices)})" if choices else ""),
        help_behavior_hint=f"[{_default_text(setting.default)}]",
        aliases=setting.flags[1:] or None,
    )


def _metavar(hint: Any) -> str:
    """Return the placeholder of a value in the help.

    >>> from typing import Literal
    >>> _metavar(int | Literal["auto"]), _metavar(tuple[float, ...]), _metavar(bool)
    ('INT|auto', 'LIST', 'true|false')
    """
    meaning = describe(hint)
    if meaning.startswith("a list"):
        return "LIST"
    for words, short in (("a whole number", "INT"), ("a number", "NUMBER"), ("text", "TEXT"), (" or ", "|")):
        meaning = meaning.replace(words, short)
    return meaning.replace("'", "")


def _default_text(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return "empty" if default in ("", ()) else str(default)


def _given(recipe: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if dataclasses.is_dataclass(value):
            yield from _given(value, f"{field.name}.")
        elif value != UNSET:
            yield f"{prefix}{field.name}", value


def _unknown_option(option: str, command: type, *, with_recipe: bool) -> UsageError:
    if not option.startswith("-"):
        return UsageError(f"unexpected argument {option!r}")
    flags = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(command)]
    known = flags + [flag for setting in recipe_options() if with_recipe for flag in setting.flags]
    near = difflib.get_close_matches(option, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "--help lists all"
    return UsageError(f"unknown option {option}; {hint}")


def _one_line(box: str) -> str:
    """Return the first paragraph of tyro's framed message."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│ \t") for line in text.splitlines() if not re.match(r"\s*[╭╰]", line)]
    body = takewhile(lambda line: not line.startswith("──"), lines)  # up to the first horizontal rule
    return " ".join(" ".join(body).split()) or "the options cannot be understood; --help lists all"
