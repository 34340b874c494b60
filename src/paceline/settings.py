"""How a setting is declared: its default, what it is, and what it may be, in one place.

    lr: float = setting(0.05, "learning rate", above=0, most=1e6, alias="lr")

One frozen dataclass of such fields holds the settings of a feature. The reader of recipe files, the command line, the
help text and the checks at construction all read the same declaration.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.errors import PacelineError
from paceline.lookup import unknown
from paceline.user_code import is_code


class SettingError(PacelineError, ValueError):
    """A setting that cannot be; `path` says which, such as ('strategy', 'k'), `beside` with which other it clashes.

    >>> str(SettingError(("strategy", "k"), "k must be 1 or more (k=0)"))
    'k must be 1 or more (k=0)'
    """

    def __init__(self, path: tuple[str, ...], message: str, *, beside: tuple[str, ...] | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.beside = beside


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The rule of one setting: which values are allowed, and what they mean."""

    help: str
    choices: Callable[[], Iterable[str]] | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    infinite: bool = False
    alias: str | None = None
    code: bool = False  # besides the choices, code of a user's own: module:name

    def check(self, name: str, value: Any) -> None:
        """Raise if a value breaks the rule.

        >>> Rule(help="", least=1, most=9).check("k", 0)
        Traceback (most recent call last):
        paceline.settings.SettingError: k must be between 1 and 9 (k=0)
        """
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, str) and self.choices is not None and part not in (allowed := list(self.choices())):
                if self.code and is_code(part):
                    continue
                kind = self.alias if name == "name" and self.alias else name  # "unknown strategy", not "unknown name"
                own = ", or your own as module:name" if self.code else ""
                raise SettingError((name,), str(unknown(kind.replace("_", " "), part, allowed)) + own)
            if isinstance(part, (int, float)) and not isinstance(part, bool) and not self._allows(part):
                raise SettingError((name,), f"{name} must be {self.range} ({name}={part!s:.40})")

    def _allows(self, value: float) -> bool:
        if isinstance(value, float) and not math.isfinite(value):
            return self.infinite and value > 0
        return not (
            (self.least is not None and value < self.least)
            or (self.above is not None and value <= self.above)
            or (self.most is not None and value > self.most)
        )

    @property
    def range(self) -> str:
        """The allowed range, in words.

        >>> Rule(help="", above=0).range, Rule(help="", least=0, most=1).range
        ('more than 0', 'between 0 and 1')
        """
        if self.least is not None and self.most is not None:
            return f"between {_number(self.least)} and {_number(self.most)}"
        if self.above is not None:
            most = f" and at most {_number(self.most)}" if self.most is not None else ""
            return f"more than {_number(self.above)}{most}"
        return f"{_number(self.least)} or more" if self.least is not None else "a finite number"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def setting(default: Any, help: str, **rule: Any) -> Any:
    """Declare a field with its rule.

    >>> @dataclass(frozen=True)
    ... class Example:
    ...     rounds: int = setting(300, "rounds to run", least=1)
    >>> Example().rounds
    300
    """
    return dataclasses.field(default=default, metadata={"rule": Rule(help=help, **rule)})


class Checked:
    """A frozen dataclass whose settings are checked when it is made."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        hints = _hints(kind)
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, hint = getattr(self, field.name), hints[field.name]
            if not _fits(value, hint):
                raise SettingError((field.name,), f"{field.name} must be {_wanted(hint)} ({field.name}={value!r:.60})")
            rule: Rule | None = field.metadata.get("rule")
            if rule is not None:
                rule.check(field.name, value)


def refuse_settings_of_others(settings: Any, owners: Mapping[str, Sequence[str]], kind: str) -> None:
    """Refuse a changed setting that only other choices of `settings.name` have; `owners` says who has which.

    >>> from dataclasses import make_dataclass
    >>> chosen = make_dataclass("Chosen", [("name", str, "top-k"), ("levels", int, 7)])(levels=3)
    >>> refuse_settings_of_others(chosen, {"levels": ["qsgd"]}, "codec")
    Traceback (most recent call last):
    paceline.settings.SettingError: levels is a setting of qsgd, and the codec is top-k
    """
    for field in dataclasses.fields(settings):
        whose = owners.get(field.name, (settings.name,))
        if settings.name not in whose and getattr(settings, field.name) != field.default:
            message = f"{field.name} is a setting of {' and '.join(whose)}, and the {kind} is {settings.name}"
            raise SettingError((field.name,), message)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return isinstance(value, hint)
    if isinstance(value, tuple):
        value = list(value)
    try:
        converted = convert(value, hint)
    except ValueError:
        return False
    return isinstance(value, list) or isinstance(value, str) == isinstance(converted, str)


def _wanted(hint: Any) -> str:
    is_section = isinstance(hint, type) and dataclasses.is_dataclass(hint)
    return f"a {hint.__name__}" if is_section else describe(hint)


# -- values from files and the command line --------------------------------------------------------------------------

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def convert(value: Any, hint: Any, *, typed: bool = False) -> Any:
    """Return a value of TOML's types, or text, as the type says; ValueError if it cannot be.

    Text from a command line stands for any type. In a file, which has types of its own (`typed`), it is only text.

    >>> convert("0.5, 0.75", tuple[float, ...]), convert("auto", int | Literal["auto"]), convert(3, float)
    ((0.5, 0.75), 'auto', 3.0)
    >>> convert("3", int, typed=True)
    Traceback (most recent call last):
    ValueError: 3
    """
    if typed and isinstance(value, str) and (hint in (int, float, bool) or get_origin(hint) is tuple):
        raise ValueError(value)
    if get_origin(hint) in (Union, types.UnionType):
        return _first(value, get_args(hint), typed=typed)
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        raise ValueError(value)
    if get_origin(hint) is tuple:
        return _tuple(value, get_args(hint)[0], typed=typed)
    return _plain_value(value, hint)


def _first(value: Any, hints: tuple[Any, ...], *, typed: bool) -> Any:
    for hint in hints:
        with suppress(ValueError):
            return convert(value, hint, typed=typed)
    raise ValueError(value)


def _tuple(value: Any, hint: Any, *, typed: bool) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list):
        raise ValueError(value)
    return tuple(convert(part, hint, typed=typed) for part in value)


def _plain_value(value: Any, hint: Any) -> Any:
    if hint is type(None) and value in ("", "none", None):
        return None
    if hint in (bool, str) and isinstance(value, hint):
        return value
    if hint is bool and isinstance(value, str) and value.lower() in _TRUE + _FALSE:
        return value.lower() in _TRUE
    if hint in (int, float) and isinstance(value, (int, hint, str)) and not isinstance(value, bool):
        try:
            return hint(value.replace("_", "") if isinstance(value, str) else value)
        except OverflowError as error:
            raise ValueError(value) from error
    raise ValueError(value)


def describe(hint: Any) -> str:
    """Return a type in words.

    >>> describe(int | Literal["auto"]), describe(tuple[float, ...])
    ("a whole number or 'auto'", 'a list of numbers')
    """
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list of {'numbers' if get_args(hint)[0] is float else 'words'}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "'none'"}
    return names[hint]
