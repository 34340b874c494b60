"""A recipe from a file and from overrides, with errors that say where.

A value comes with its *place*: `my.toml:4` or `--strategy.k`. An error is one line that names the place, the value
and what is allowed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import shlex
import tomllib
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from paceline.decoding import describe
from paceline.errors import PacelineError
from paceline.files import is_open_file, read_plain
from paceline.lookup import unknown
from paceline.quantities import unit_examples, with_unit
from paceline.recipes.recipe import Recipe, section_with
from paceline.renaming import RENAMED_SETTINGS, with_new_names
from paceline.settings import Rule, SettingError, convert
from paceline.user_code import is_code

MOST_BYTES = 64 * 1024
MOST_PARTS = 16  # of a dotted key; those of a recipe have two
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_DEEP_KEY = re.compile(rf"(?<![\w.-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MOST_PARTS}}}")
# In a file they are meant relative to it; in what the shell hands over, to the current folder.
PATHS = (("delay", "file"), ("data", "directory"), ("pipeline", "plan"))

Path_ = tuple[str, ...]

_OPTIONAL: tuple[Path_, ...] = (
    ("epochs",),
    ("target_loss",),
    ("target_accuracy",),
    ("data", "classes_per_worker"),
    ("strategy", "k"),
    ("cluster", "late_blocks"),
    ("pruning", "protect"),
)
"""Settings that may be unset; of any other, null in a document is an infinite number."""


class RecipeError(PacelineError, ValueError):
    """A recipe that cannot be read, in one line.

    >>> raise RecipeError("my.toml:3: unknown key 'ronds'")
    Traceback (most recent call last):
    paceline.recipes.reading.RecipeError: my.toml:3: unknown key 'ronds'
    """


def read_recipe(
    path: str | Path | None = None, overrides: Mapping[str, str] | None = None, *, trust: bool = False
) -> Recipe:
    """Return the recipe in a file (or the default), with dotted settings from the command line on top.

    Code that the file alone names is refused unless `trust`: whoever sends a recipe must not choose what runs.

    >>> read_recipe(overrides={"strategy.k": "3"}).strategy.k
    3
    >>> read_recipe(overrides={"strategy.k": "many"})
    Traceback (most recent call last):
    paceline.recipes.reading.RecipeError: --strategy.k: expected a whole number or 'auto' or 'none', got 'many'
    """
    file = None if path is None else Path(path)
    text = "" if file is None else _text_of(file)
    values = _values(text, file)
    lines = _line_numbers(text)
    places = {}
    for setting in values:
        line = lines.get(setting, lines.get(setting[:1]))  # a section may be one line: strategy = {k = 3}
        places[setting] = str(file) if line is None else f"{file}:{line}"
    for dotted, value in (overrides or {}).items():
        setting = tuple(dotted.split("."))
        values[setting] = value
        places[setting] = f"--{dotted.replace('_', '-')}"
    for old in [setting for setting in values if setting in RENAMED_SETTINGS]:
        new = RENAMED_SETTINGS[old]
        warnings.warn(
            f"{places[old]}: {'.'.join(old)} is called {new[-1]} now; the old name goes with the next release",
            FutureWarning,
            stacklevel=2,
        )
        value = values.pop(old)
        if new not in values:
            values[new], places[new] = value, places[old]
    _settle_budget(values, places, overrides or {})
    typed = {tuple(dotted.split(".")) for dotted in overrides or {}} - {*RENAMED_SETTINGS}
    recipe = _build(values, places, texts=typed)
    if not trust:
        _refuse_code({path: value for path, value in values.items() if path not in typed}, places)
    return recipe


def _refuse_code(values: Mapping[Path_, Any], places: Mapping[Path_, str]) -> None:
    """Refuse a user's own code among the settings of a file, with the options that would name it."""
    names: dict[Path_, str] = {path: value for path, value in values.items() if _rule_of(path).code and is_code(value)}
    if not names:
        return
    listed = " and ".join(map(repr, names.values()))
    options = " ".join(f"--{_rule_of(path).alias} {shlex.quote(value)}" for path, value in names.items())
    if not options.isprintable():  # a terminal would obey it, and no module has such a name
        raise RecipeError(f"{places[next(iter(names))]}: {listed} must be 'module:name'")
    raise RecipeError(
        f"{places[next(iter(names))]}: {listed} is code, and a recipe does not choose what runs here; if you trust it, "
        f"add {options}, or --trust (in a script: Recipe.load(file, trust=True))"
    )


def _rule_of(path: Path_) -> Rule:
    kind: Any = Recipe if len(path) == 1 else _sections()[path[0]]
    rule: Rule = kind.__dataclass_fields__[path[-1]].metadata["rule"]
    return rule


def with_typed(recipe: Recipe, overrides: Mapping[str, str]) -> Recipe:
    """Return a recipe with dotted settings from the command line in place of its own; both are checked together.

    >>> with_typed(Recipe().with_settings(optimizer={"schedule": "poly"}), {"optimizer.power": "1"}).optimizer.power
    1.0
    >>> with_typed(Recipe(), {"optimizer.decay_from": "start"})
    Traceback (most recent call last):
    paceline.recipes.reading.RecipeError: --optimizer.decay-from: decay_from goes with schedule = poly (schedule=steps)
    """
    values = _document_values(recipe.to_document())
    places = {path: f"the run's {'.'.join(path)}" for path in values}
    typed = {tuple(dotted.split(".")): text for dotted, text in overrides.items()}
    places |= {tuple(dotted.split(".")): f"--{dotted.replace('_', '-')}" for dotted in overrides}
    return _build(values | typed, places, texts=typed)


def _settle_budget(values: dict[Path_, Any], places: Mapping[Path_, str], overrides: Mapping[str, str]) -> None:
    """Let rounds or epochs on the command line stand in place of the other in the file; refuse both in one place."""
    rounds, epochs = ("rounds",), ("epochs",)
    if rounds not in values or values.get(epochs, "none") in ("", "none"):
        return
    typed = [path for path in (rounds, epochs) if path[0] in overrides]
    if len(typed) != 1:
        raise RecipeError(f"{places[epochs]}: give rounds or epochs, not both")
    del values[epochs if typed == [rounds] else rounds]


def recipe_from_document(document: Mapping[str, Any]) -> Recipe:
    """Return a recipe from nested plain values; null stands for an infinite number.

    >>> recipe_from_document({"network": {"server_bits_per_second": None}}).network.server_bits_per_second
    inf
    """
    values = _document_values(with_new_names(document))
    return _build(values, {path: ".".join(path) for path in values})


def _document_values(document: Mapping[str, Any]) -> dict[Path_, Any]:
    """Return the values of a document by their paths."""
    values: dict[Path_, Any] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            values |= {(str(name), str(inner)): entry for inner, entry in value.items()}
        else:
            values[(str(name),)] = value
    for path, value in values.items():
        if value is None:
            values[path] = None if path in _OPTIONAL else math.inf
    return values


def _values(text: str, file: Path | None) -> dict[Path_, Any]:
    """Return the values of a recipe file by their paths."""
    if _DEEP_KEY.search(text):  # reading one takes time that grows with the square of its parts
        raise RecipeError(f"{file}: not valid TOML: a key has more than {MOST_PARTS} parts")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{file}: not valid TOML: {str(error).splitlines()[0]}") from None
    except ValueError as error:  # a whole number of thousands of digits
        raise RecipeError(f"{file}: not valid TOML: {error}") from None
    except RecursionError:
        raise RecipeError(f"{file}: not valid TOML: nested too deeply") from None
    found: dict[Path_, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict) and name in _sections():
            found.update({(name, inner): entry for inner, entry in value.items()})
        else:
            found[(name,)] = value
    for setting in PATHS:
        if found.get(setting) and isinstance(found[setting], str) and file is not None:
            beside = Path() if is_open_file(file) else file.parent
            found[setting] = str(beside / Path(found[setting]).expanduser())
    return found


def _line_numbers(text: str) -> dict[Path_, int]:
    """Return the line on which each setting or section is first written, found by looking for headings and keys."""
    section: Path_ = ()
    found: dict[Path_, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        heading = re.match(r"\s*\[\s*\"?([\w-]+)\"?\s*\]", line)
        if heading:
            section = (heading.group(1),)
            found.setdefault(section, number)
        key = re.match(r"\s*([\w\".-]+)\s*=", line)
        if key:
            written = tuple(part.strip('"') for part in key.group(1).split("."))
            found.setdefault((*section, *written), number)
    return found


def _text_of(path: Path) -> str:
    try:
        data = read_plain(path, most_bytes=MOST_BYTES, open_files=True)
    except OSError as error:
        raise RecipeError(f"cannot read recipe {path}: {error.strerror or error}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text (byte {error.start})") from None


@functools.cache
def _sections() -> dict[str, type]:
    hints = get_type_hints(Recipe)
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and dataclasses.is_dataclass(hint)}


def _build(values: Mapping[Path_, Any], places: Mapping[Path_, str], *, texts: Collection[Path_] = ()) -> Recipe:
    """Make a recipe of values; those of `texts` come from the command line, where a number is text too."""
    sections = _sections()
    chosen: dict[str, dict[str, Any]] = {name: {} for name in sections}
    top: dict[str, Any] = {}
    for path, value in values.items():
        hint = _hint_of(path, places[path])
        try:
            converted = convert(with_unit(path[-1], value), hint, typed=path not in texts)
        except ValueError:
            expected = describe(hint) + unit_examples(path[-1])
            raise RecipeError(f"{places[path]}: expected {expected}, got {_short(value)}") from None
        (chosen[path[0]] if len(path) == 2 else top)[path[-1]] = converted
    parts = {name: _make(sections[name], (name,), chosen[name], places) for name in sections}
    recipe: Recipe = _make(Recipe, (), {**top, **parts}, places)
    return recipe


def _hint_of(path: Path_, place: str) -> Any:
    """Return the type a setting must have; an error if there is no such setting."""
    sections = _sections()
    kind: Any
    if len(path) == 1:
        if path[0] in sections:
            raise RecipeError(f"{place}: {path[0]!r} is a section: write [{path[0]}] and its settings below")
        kind, where = Recipe, "a recipe"
    else:
        if path[0] not in sections:
            raise RecipeError(f"{place}: {unknown('section', path[0], sections)}")
        kind, where = sections[path[0]], f"[{path[0]}]"
    names = [field.name for field in dataclasses.fields(kind)]
    if len(path) <= 2 and path[-1] not in names and (home := section_with(path[-1])) is not None:
        where_to = f"below [{home}]" if home else "above all sections"
        raise RecipeError(f"{place}: {path[-1]!r} is no key in {where}: write it {where_to}")
    if len(path) > 2 or path[-1] not in names:
        raise RecipeError(f"{place}: {unknown(f'key in {where}', '.'.join(path[1:]) or path[0], names)}")
    return get_type_hints(kind)[path[-1]]


def _make(kind: type, prefix: Path_, chosen: Mapping[str, Any], places: Mapping[Path_, str]) -> Any:
    try:
        return kind(**chosen)
    except SettingError as error:
        full = (*prefix, *error.path)
        place = (
            places.get(full)
            or places.get(error.beside or ())
            or next((places[path] for path in places if path[:1] == full[:1]), None)
        )
        raise RecipeError(f"{place}: {error}" if place else str(error)) from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
