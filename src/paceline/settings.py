"""How a setting is declared: its default, what it is, and what it may be, in one place.

    lr: float = setting(0.05, "learning rate", above=0, most=1e6, alias="lr")

One frozen dataclass of such fields holds the settings of a feature. The reader of recipe files, the command line, the
help text and the checks at construction all read the same declaration.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_type_hints

from paceline.decoding import JSON, Notation, Reader, decode, describe, must_be
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
    code: bool = False  # the value may be code of a user's own: module:name

    def check(self, name: str, value: Any) -> None:
        """Raise if a value breaks the rule.

        >>> Rule(help="", least=1, most=9).check("k", 0)
        Traceback (most recent call last):
        paceline.settings.SettingError: k must be between 1 and 9 (k=0)
        """
        for part in value if isinstance(value, (tuple, list)) else (value,):
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
    """A frozen dataclass whose settings are checked when it is made.

    What is kept is what a file's value would come to: a list is a tuple, so that equal settings are equal and hashable.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)
        hints = _hints(kind)
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            given, hint = getattr(self, field.name), hints[field.name]
            try:
                value = _fitted(given, hint)
            except ValueError:
                message = f"{field.name} must be {_wanted(hint)} ({field.name}={given!r:.60})"
                raise SettingError((field.name,), message) from None
            object.__setattr__(self, field.name, value)
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


def _fitted(value: Any, hint: Any) -> Any:
    """Return a value that was given as an object as its setting keeps it; ValueError if it cannot be."""
    is_section = isinstance(hint, type) and dataclasses.is_dataclass(hint)
    kept = value if is_section else convert(value, hint, typed=True)
    if (is_section and not isinstance(value, hint)) or isinstance(value, str) != isinstance(kept, str):
        raise must_be(_wanted(hint), value)  # "none" is not None
    return kept


def _wanted(hint: Any) -> str:
    is_section = isinstance(hint, type) and dataclasses.is_dataclass(hint)
    return f"a {hint.__name__}" if is_section else describe(hint)


# -- values from files and the command line --------------------------------------------------------------------------

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def convert(value: Any, hint: Any, *, typed: bool = False) -> Any:
    """Return a value of TOML's types, or text, as the type says; DecodingError if it cannot be. Rules have the bounds.

    Text from a command line stands for any type. In a file, which has types of its own (`typed`), it is only text.

    >>> from typing import Literal
    >>> convert("0.5, 0.75", tuple[float, ...]), convert("auto", int | Literal["auto"]), convert(3, float)
    ((0.5, 0.75), 'auto', 3.0)
    >>> convert("3", int, typed=True)
    Traceback (most recent call last):
    paceline.decoding.DecodingError: must be a whole number, not '3'
    """
    return decode(hint, value, notation=_IN_A_FILE if typed else _TYPED_IN)


def _number_reader(kind: type[int] | type[float], *, as_text: bool) -> Reader:
    kinds = (int, kind, str) if as_text else (int, kind)

    def read(value: Any) -> float:
        with suppress(ValueError, OverflowError):
            if isinstance(value, kinds) and not isinstance(value, bool):
                return kind(value.replace("_", "") if isinstance(value, str) else value)
        raise must_be(describe(kind), value)

    return read


def _switch(value: Any) -> bool:
    word = value.lower() if isinstance(value, str) else ""
    if word in _TRUE + _FALSE:
        return word in _TRUE
    found: bool = JSON.readers[bool](value)
    return found


def _items(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


_IN_A_FILE = Notation(
    {**JSON.readers, int: _number_reader(int, as_text=False), float: _number_reader(float, as_text=False)},
    nothing=("", "none"),
)
_TYPED_IN = Notation(
    {**JSON.readers, int: _number_reader(int, as_text=True), float: _number_reader(float, as_text=True), bool: _switch},
    nothing=("", "none"),
    items=_items,
)
