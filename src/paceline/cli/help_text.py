"""The help of a command: its common options, or all of them, in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, get_type_hints

from paceline.cli.options import Option
from paceline.recipes import Recipe
from paceline.terminal import WIDTH

INDENT = 24  # where the words of an option begin


def command_help(
    name: str, about: str, options: Sequence[Option], *, common: Sequence[str] = (), everything: bool = False
) -> str:
    """Return the help of a command; `common` are the settings of its recipe that it shows even if not `everything`."""
    places = [option for option in options if option.spelling.positional]
    own = [option for option in options if not option.of_recipe and not option.spelling.positional]
    settings = [option for option in options if option.of_recipe]
    usage = " ".join(["usage: paceline", name, *(option.metavar for option in places), "[OPTIONS]"])
    lines = [usage, "", *_paragraphs(about), ""]
    lines += [line for option in places for line in _entry(f"  {option.metavar.strip('[]')}", option.rule.help)]
    lines += ["", "options:"] if places else ["options:"]
    if everything:
        lines += _entries(own, every_name=True)
        sections: dict[str, list[Option]] = {}
        for option in settings:
            sections.setdefault(option.path[0] if len(option.path) > 1 else "", []).append(option)
        for section, entries in sections.items():
            lines += ["", _section_title(section), *_entries(entries, every_name=True)]
        return "\n".join(lines)
    by_name = {option.name: option for option in settings}
    shown = [*(option for option in own if option.spelling.common), *(by_name[name] for name in common)]
    lines += _entries(shown, every_name=False)
    more = len(own) + len(settings) - len(shown)
    whole = ", with all settings of a recipe" if settings else ""
    lines += ["", f"paceline {name} --help-all lists {more} more{whole}."] if more else []
    return "\n".join(lines)


def commands_help(title: str, summaries: Mapping[str, str], hints: Iterable[str]) -> str:
    """Return a list of commands with what each does.

    >>> print(commands_help("Commands:", {"race": "Race several strategies."}, ["`paceline race` is a good start."]))
    Commands:
      paceline race             Race several strategies.
    <BLANKLINE>
    `paceline race` is a good start.
    """
    entries = [line for name, text in summaries.items() for line in _entry(f"  paceline {name}", text, indent=28)]
    return "\n".join([title, *entries, "", *hints])


def _section_title(section: str) -> str:
    if not section:
        return "recipe:"
    kind: Any = get_type_hints(Recipe)[section]
    return textwrap.shorten(f"[{section}] {str(kind.__doc__).splitlines()[0]}", WIDTH)


def _entries(options: Iterable[Option], *, every_name: bool) -> list[str]:
    lines: list[str] = []
    for option in options:
        names = [*option.flags[1:], option.flags[0]] if option.of_recipe else option.flags
        value = "" if option.is_flag else f" {option.metavar}"
        lines += _entry(f"  {', '.join(names if every_name else names[:1])}{value}", _words(option))
    return lines


def _words(option: Option) -> str:
    words = option.rule.help
    if option.rule.choices and option.hint is str:
        words += f" ({', '.join(option.choices)})"
    default = _default_text(option)
    return f"{words} [{default}]" if default else words


def _default_text(option: Option) -> str:
    """Return the default as the help shows it; a flag of a command's own is off, and that goes without saying."""
    default = option.default
    if option.spelling.shown is not None:
        return option.spelling.shown
    if default is MISSING or (not option.of_recipe and (default is False or default in ("", None))):
        return ""
    if default is None:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return "empty" if default in ("", ()) else str(default)


def _entry(head: str, words: str, *, indent: int = INDENT) -> list[str]:
    """Return an option and its words beside it, or below where it is long."""
    space = " " * indent
    wrapped = textwrap.wrap(
        words, WIDTH, initial_indent=space, subsequent_indent=space, break_long_words=True, break_on_hyphens=False
    )
    if len(head) < indent - 1 and wrapped:
        return [head.ljust(indent) + wrapped[0][indent:], *wrapped[1:]]
    heads = textwrap.wrap(head.strip(), WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
    return [*heads, *wrapped]


def _paragraphs(text: str) -> list[str]:
    parts = [" ".join(part.split()) for part in text.strip().split("\n\n")]
    return "\n\n".join(textwrap.fill(part, WIDTH, break_on_hyphens=False) for part in parts).split("\n")


def summary(kind: type) -> str:
    """Return the first line of a command's description."""
    return str(kind.__doc__).splitlines()[0]
