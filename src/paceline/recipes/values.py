"""A value from a file or the command line -> the type a setting has."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def convert(value: Any, hint: Any) -> Any:
    """The value as the type says, from TOML's types or from text; ValueError if it cannot be.

    >>> convert("0.5, 0.75", tuple[float, ...]), convert("auto", int | Literal["auto"]), convert(3, float)
    ((0.5, 0.75), 'auto', 3.0)
    """
    if get_origin(hint) in (Union, types.UnionType):
        return _first(value, get_args(hint))
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        raise ValueError(value)
    if get_origin(hint) is tuple:
        return _tuple(value, get_args(hint)[0])
    return _plain(value, hint)


def _first(value: Any, hints: tuple[Any, ...]) -> Any:
    for hint in hints:
        try:
            return convert(value, hint)
        except ValueError:
            continue
    raise ValueError(value)


def _tuple(value: Any, hint: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list):
        raise ValueError(value)
    return tuple(convert(part, hint) for part in value)


def _plain(value: Any, hint: Any) -> Any:
    if hint is type(None):
        if value in ("", "none", None):
            return None
    elif hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
            return value.lower() in _TRUE
    elif hint is str:
        if isinstance(value, str):
            return value
    elif isinstance(value, hint) or (hint is float and isinstance(value, int)):
        if not isinstance(value, bool):
            return _number(value, hint)
    elif isinstance(value, str):
        return _number(value.replace("_", ""), hint)
    raise ValueError(value)


def _number(value: str | int | float, hint: Any) -> Any:
    try:
        return hint(value)
    except OverflowError as error:
        raise ValueError(value) from error


def describe(hint: Any) -> str:
    """A type in words.

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
