"""Typed values out of JSON that somebody else wrote: the lines of a journal, the headers of messages.

A dataclass is its own schema: type hints say what a field may be, and `bounded` between which values.

    @dataclass(frozen=True, kw_only=True)
    class Beat:
        progress: int = bounded(0, 2**53)

    read_fields(Beat, parse_object(b'{"progress":3}'))   ->   Beat(progress=3)

A dataclass inside of another is an array of its fields' values in JSON, in their order, since arrays are smaller.
Whoever calls limits the size of the text first. Every refusal is a `DecodingError` of one line that names the field.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from paceline.errors import PacelineError

MOST_CONTAINERS = 4_000_000  # in a text of any size: each takes some 100 bytes of memory
MOST_WHOLE, MOST_FLOAT = 2**64 - 1, sys.float_info.max
DEFAULT_BOUNDS: dict[type, tuple[float, float]] = {int: (0, MOST_WHOLE), float: (-MOST_FLOAT, MOST_FLOAT)}
Reader = Callable[[Any], Any]
Kind = TypeVar("Kind")


class DecodingError(PacelineError, ValueError):
    """JSON that is not what it must be.

    >>> raise DecodingError("version must be a whole number of 0 or more, not -1")
    Traceback (most recent call last):
    paceline.decoding.DecodingError: version must be a whole number of 0 or more, not -1
    """


def bounded(least: float, most: float = MOST_WHOLE, default: Any = MISSING) -> Any:
    """Declare a field for a number between `least` and `most`; others are 0 to 2**64 - 1 (int) or finite (float)."""
    return field(default=default, metadata={"bounds": (least, most)})


def read_with(reader: Reader, default: Any = MISSING) -> Any:
    """Declare a field with a reader of its own, which returns the value or raises `must_be`."""
    return field(default=default, metadata={"reader": reader})


def must_be(words: str, value: Any) -> DecodingError:
    """Return the error for a value that is not what `words` say; whoever knows the field puts its name in front.

    >>> must_be("a list", 7)
    DecodingError(' must be a list, not 7')
    """
    text = repr(value[:60] if isinstance(value, str | list) else value)
    return DecodingError(f" must be {words}, not {text if len(text) <= 60 else text[:57] + '...'}")


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object strictly: no field twice, no NaN, no number that a float cannot hold, not too many parts.

    >>> parse_object(b'{"a":1,"a":2}')
    Traceback (most recent call last):
    paceline.decoding.DecodingError: field 'a' is there twice
    """
    if data.count(b"[") + data.count(b"{") > MOST_CONTAINERS:
        raise DecodingError(f"not JSON that can be read (more than {MOST_CONTAINERS:,} lists and objects)")
    try:
        found = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant
        )
    except DecodingError:
        raise
    except UnicodeDecodeError as error:
        raise DecodingError(f"not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise DecodingError(f"not JSON ({error.msg}, column {error.colno})") from None
    except RecursionError:
        raise DecodingError("not JSON that can be read (nested too deeply)") from None
    except ValueError as error:  # Python refuses whole numbers of very many digits
        raise DecodingError(f"not JSON ({error})") from None
    if not isinstance(found, dict):
        raise DecodingError("not a JSON object")
    return found


def read_fields(kind: type[Kind], values: dict[str, Any]) -> Kind:
    """Make a dataclass of an object's values: it has exactly its fields, each of its type and within its bounds.

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class Point:
    ...     x: int
    ...     y: int = bounded(1, 5)
    >>> read_fields(Point, {"x": 0, "y": 6})
    Traceback (most recent call last):
    paceline.decoding.DecodingError: y must be a whole number between 1 and 5, not 6
    """
    return kind(**read_object(field_readers(cast(Any, kind)), values))


def read_object(readers: dict[str, Reader], values: Any) -> dict[str, Any]:
    """Return the values of an object that has exactly these fields, each read by its reader.

    >>> read_object({"x": reader_of(int)}, {"x": -1})
    Traceback (most recent call last):
    paceline.decoding.DecodingError: x must be a whole number of 0 or more, not -1
    """
    if not isinstance(values, dict):
        raise must_be("an object", values)
    if values.keys() != readers.keys():
        for name in readers:
            if name not in values:
                raise DecodingError(f"field {name!r} is missing")
        raise DecodingError(f"unknown field {next(name for name in values if name not in readers)!r:.40}")
    read = _read_parts(readers, readers.values(), map(values.__getitem__, readers))
    return dict(zip(readers, read, strict=True))


def object_reader(readers: dict[str, Reader]) -> Reader:
    """Return a reader of JSON objects with exactly these fields.

    >>> object_reader({"x": reader_of(int)})({"x": 3})
    {'x': 3}
    """

    def read(value: Any) -> dict[str, Any]:
        try:
            return read_object(readers, value)
        except DecodingError as error:
            text = str(error)
            raise DecodingError(text if text.startswith(" ") else f": {text}") from None

    return read


@functools.cache
def field_readers(kind: Any) -> dict[str, Reader]:
    """Return a function for each field of a dataclass that takes a JSON value and returns it checked, or raises."""
    hints = get_type_hints(kind)
    return {
        each.name: each.metadata.get("reader") or reader_of(hints[each.name], each.metadata.get("bounds"))
        for each in fields(kind)
    }


def reader_of(hint: Any, bounds: tuple[float, float] | None = None) -> Reader:
    """Return a function that takes a JSON value and returns it as the type that `hint` says, or raises.

    >>> reader_of(tuple[int, ...])([1, 2])
    (1, 2)
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        inner = reader_of(parts[0], bounds)
        return lambda value: None if value is None else inner(value)
    if origin is tuple and parts[1:] == (...,):
        return list_reader(reader_of(parts[0]))
    if origin is tuple:
        return _array({place: reader_of(part) for place, part in enumerate(parts)}, tuple)
    if is_dataclass(hint):
        kind: Any = hint
        readers = field_readers(kind)
        return _array(
            {f".{name}": reader for name, reader in readers.items()},
            lambda read: kind(**dict(zip(readers, read, strict=True))),
        )
    if hint in (int, float):
        return _number(hint, *(bounds or DEFAULT_BOUNDS[hint]))
    if origin is Literal:
        return _value(f"one of {', '.join(parts)}", lambda value: isinstance(value, str) and value in parts)
    plain, words = {str: (str, "text"), bool: (bool, "true or false")}.get(hint, (dict, "an object"))
    return _value(words, lambda value: isinstance(value, plain))


def _value(words: str, fits: Callable[[Any], bool]) -> Reader:
    def read(value: Any) -> Any:
        if fits(value):
            return value
        raise must_be(words, value)

    return read


def _number(kind: type[int] | type[float], least: float, most: float) -> Reader:
    words = "a whole number" if kind is int else "a number"
    if most == MOST_WHOLE:
        words += f" of {least} or more"
    elif most != MOST_FLOAT:
        words += f" between {least:.16g} and {most:.16g}"

    def read(value: Any) -> float:
        if type(value) is kind and least <= value <= most:
            return value
        if kind is float and type(value) is int and least <= value <= most:
            return float(value)
        raise must_be(words, value)

    return read


def list_reader(reader: Reader) -> Reader:
    """Return a reader of JSON lists whose items `reader` reads."""

    def read(value: Any) -> tuple[Any, ...]:
        if isinstance(value, list | tuple):
            return tuple(_read_parts(range(len(value)), itertools.repeat(reader), value))
        raise must_be("a list", value)

    return read


def array_reader(*readers: Reader) -> Reader:
    """Return a reader of JSON lists with as many items as there are readers, each read by its own.

    >>> array_reader(reader_of(int), reader_of(str))([1, "a"])
    (1, 'a')
    """
    return _array(dict(enumerate(readers)), tuple)


def _array(readers: dict[str | int, Reader], make: Callable[[list[Any]], Any]) -> Reader:
    names, each = [*readers], [*readers.values()]

    def read(value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) == len(names):
            return make(_read_parts(names, each, value))
        raise must_be(f"a list of {len(names)} values", value)

    return read


def _read_parts(names: Iterable[str | int], readers: Iterable[Reader], values: Iterable[Any]) -> list[Any]:
    read: list[Any] = []
    try:
        for reader, value in zip(readers, values):  # noqa: B905 - a list's reader repeats for ever
            read.append(reader(value))
    except DecodingError as error:
        name = next(itertools.islice(names, len(read), None))
        raise DecodingError(f"[{name}]{error}" if isinstance(name, int) else f"{name}{error}") from None
    return read


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise DecodingError(f"field {next(name for name in names if names.count(name) > 1)!r:.40} is there twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if math.isfinite(number):
        return number
    raise DecodingError(f"the number {text:.40} is too large")


def _refuse_constant(name: str) -> float:
    raise DecodingError(f"not JSON ({name} is no number)")
