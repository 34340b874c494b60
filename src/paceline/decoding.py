"""The typed decoder: what somebody else wrote, as values of the types that it must have, or a refusal with the place.

The type is the schema. What a type of Python cannot say stands beside it, in `Annotated`:

    Count = Annotated[int, Between(0, 2**53)]

    @dataclass(frozen=True, kw_only=True)
    class Beat:
        progress: Count

    decode(Beat, parse_object(b'{"progress":3}'))        ->  Beat(progress=3)
    decode(Beat, parse_object(b'{"progress":-3}'))       ->  DecodingError: progress must be a whole number between ...
    decode(tuple[Count, ...], [1, 2], "cuts")            ->  (1, 2)

What may stand for which type:

    int, float             a number, without `Between` of 0 to 2**64 - 1, or finite; a whole number is a float as well
    str, bool              text; true or false
    X | None, X | Y        null, or X; the first that takes it
    Literal["a", "b"]      one of these texts
    tuple[X, ...]          a list of any length, each item an X; also list[X], frozenset[X]
    tuple[X, Y]            a list of exactly these
    a dataclass            an object with its fields; one that has a default may be left out. With `AS_ARRAY` a list of
                           the fields' values, in their order, since lists are smaller
    {"x": X, "y": Y}       an object with exactly these fields, which becomes a dict
    dict[str, X]           an object with any fields, each an X
    dict[str, Any]         an object with anything in it, as it is

So it is in JSON. Recipe files and the command line write plain values in their own `Notation` (`paceline.settings`),
where a setting's rule has its bounds.

Whoever calls limits the size of the text first; `parse_object` limits what a text of that size can become.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import MISSING, dataclass, is_dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from paceline.errors import PacelineError

MOST_CONTAINERS = 4_000_000  # in a text of any size: each takes some 100 bytes of memory
MOST_WHOLE, MOST_FLOAT = 2**64 - 1, sys.float_info.max
INFINITE = "infinite"  # JSON has no number for it
MOST_COUNT = 2**53  # whole numbers up to here are all different as floats
MOST_NUMBER = 1_000_000
MOST_BLOCKS = 1_000_000
LONGEST_TEXT = 4096  # characters of a line
Reader: TypeAlias = Callable[[Any], Any]
Kind = TypeVar("Kind")


class DecodingError(PacelineError, ValueError):
    """JSON that is not what it must be.

    >>> raise DecodingError("version must be a whole number of 0 or more, not -1")
    Traceback (most recent call last):
    paceline.decoding.DecodingError: version must be a whole number of 0 or more, not -1
    """


# -- what stands beside a type -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Between:
    """The bounds of a number, both of them allowed. `infinite`: the text "infinite" may stand for a float without end.

    >>> decode(Annotated[float, Between(0, 1)], 2, "share")
    Traceback (most recent call last):
    paceline.decoding.DecodingError: share must be a number between 0 and 1, not 2
    """

    least: float
    most: float = MOST_WHOLE
    infinite: bool = False


@dataclass(frozen=True)
class Words:
    """What a value must be, in words of its own, and perhaps a question that it must pass.

    >>> decode(Annotated[str, Words("one letter", lambda text: len(text) == 1)], "ab", "name")
    Traceback (most recent call last):
    paceline.decoding.DecodingError: name must be one letter, not 'ab'
    """

    words: str
    fits: Callable[[Any], bool] = lambda value: True


@dataclass(frozen=True)
class ReadBy:
    """A reader where no type says how JSON holds a value: it takes what was found, and returns it or raises `must_be`.

    >>> decode(Annotated[float, ReadBy(lambda milliseconds: milliseconds / 1000)], 5)
    0.005
    """

    reader: Reader


AS_ARRAY = "as array"

# Numbers that journals, messages and checkpoints have in common.
Count: TypeAlias = Annotated[int, Between(0, MOST_COUNT)]  # of steps, batches, samples or bytes
WorkerNumber: TypeAlias = Annotated[int, Between(0, MOST_NUMBER)]  # or the number of a shard
Blocks: TypeAlias = Annotated[int, Between(1, MOST_BLOCKS)]


def is_line(text: str) -> bool:
    """Return whether a text is short and printable, so that it can go into a log."""
    return len(text) <= LONGEST_TEXT and text.isprintable()


def printable_line(text: str) -> str:
    """Return a text as a `Line`: what is not printable becomes "?", and what is too long is cut off.

    >>> printable_line("node-7\\x1b[2J\\n"), len(printable_line("x" * 5_000))
    ('node-7?[2J?', 4096)
    """
    cut = text[:LONGEST_TEXT]
    return cut if cut.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in cut)


Line: TypeAlias = Annotated[str, Words("a line of at most 4096 printable characters", is_line)]  # goes into a log
Fraction: TypeAlias = Annotated[float, Between(0, 1)]


@dataclass(frozen=True, eq=False)
class Notation:
    """How plain values are written: a reader for each plain type, texts that stand for None, texts that are lists.

    JSON is one; `paceline.settings` has those of recipe files and of the command line.
    """

    readers: Mapping[type, Reader]
    nothing: tuple[str, ...] = ()
    items: Callable[[str], list[str]] | None = None


# -- decoding ----------------------------------------------------------------------------------------------------------


@overload
def decode(hint: type[Kind], value: Any, where: str = "", *, notation: Notation | None = None) -> Kind: ...
@overload
def decode(hint: Any, value: Any, where: str = "", *, notation: Notation | None = None) -> Any: ...
def decode(hint: Any, value: Any, where: str = "", *, notation: Notation | None = None) -> Any:
    """Return a plain value as the type says; DecodingError names the place in it, which begins with `where`.

    >>> @dataclass(frozen=True)
    ... class Point:
    ...     x: int
    ...     y: Annotated[int, Between(1, 5)] = 1
    >>> decode(Point, {"x": 0})
    Point(x=0, y=1)
    >>> decode(tuple[Point, ...], [{"x": 0, "y": 6}], "points")
    Traceback (most recent call last):
    paceline.decoding.DecodingError: points[0]: y must be a whole number between 1 and 5, not 6
    """
    try:
        return reader_of(hint, notation or JSON)(value)
    except DecodingError as error:
        text = f"{where}{error}"
        raise DecodingError(text if where else text.removeprefix(":").lstrip()) from None


def must_be(words: str, value: Any) -> DecodingError:
    """Return the error for a value that is not what `words` say; whoever knows the place puts it in front.

    >>> must_be("a list", 7)
    DecodingError(' must be a list, not 7')
    """
    text = repr(value[:60] if isinstance(value, str | list) else value)
    return DecodingError(f" must be {words}, not {text if len(text) <= 60 else text[:57] + '...'}")


def reader_of(hint: Any, notation: Notation | None = None) -> Reader:
    """Return the function that `decode` calls; its errors lack the place of the value, and begin where that ends.

    >>> reader_of(tuple[int, ...])([1, 2])
    (1, 2)
    """
    if type(hint) is dict:
        return _object({name: reader_of(part, notation) for name, part in hint.items()})
    return _reader(hint, notation or JSON)


@functools.cache
def _reader(hint: Any, notation: Notation) -> Reader:
    origin, parts = get_origin(hint), get_args(hint)
    if notation is not JSON and (origin is Annotated or is_dataclass(hint)):
        raise TypeError(f"{hint} is read from JSON only: other notations have plain values, without bounds")
    if origin is Annotated:
        return _annotated(parts[0], parts[1:])
    if origin in (Union, types.UnionType):
        return _union(hint, notation)
    if origin in (list, frozenset) or (origin is tuple and parts[1:] == (...,)):
        return _list(_reader(parts[0], notation), origin, notation.items)
    if origin is tuple:
        readers = [_reader(part, notation) for part in parts]
        return _array([f"[{place}]" for place in range(len(parts))], readers, tuple)
    if is_dataclass(hint):
        return _object(*_fields(hint), hint)
    if origin is Literal:
        if not all(isinstance(part, str) for part in parts):
            raise TypeError(f"{hint} must be of texts: take an int with Between for numbers")
        return _plain(f"one of {', '.join(parts)}", lambda value: isinstance(value, str) and value in parts)
    if origin in (dict, Mapping):
        return notation.readers[dict] if parts[1] is Any else _table(_reader(parts[1], notation))
    if hint not in notation.readers:
        raise TypeError(f"{hint} is no type that can be decoded; decoding.py lists those that can")
    return notation.readers[hint]


def _union(hint: Any, notation: Notation) -> Reader:
    readers = [_reader(part, notation) for part in get_args(hint) if part is not type(None)]
    first = readers[0] if len(readers) == 1 else _first_of(readers, describe(hint))
    if len(readers) == len(get_args(hint)):
        return first
    nothing = notation.nothing
    if not nothing:
        return lambda value: None if value is None else first(value)
    return lambda value: None if value is None or value in nothing else first(value)


def _annotated(hint: Any, marks: Iterable[Any]) -> Reader:
    reader = _reader(hint, JSON)
    for mark in marks:
        if isinstance(mark, Between):
            reader = _number(hint, mark)
        elif isinstance(mark, Words):
            reader = _worded(reader, mark)
        elif isinstance(mark, ReadBy):
            reader = mark.reader
        elif mark is AS_ARRAY:
            readers, _ = _fields(hint)
            reader = _array([f".{name}" for name in readers], [*readers.values()], _from_values(hint, [*readers]))
    return reader


def _fields(kind: Any) -> tuple[dict[str, Reader], frozenset[str]]:
    """Return a reader for each field of a dataclass, and which fields have defaults."""
    hints, fields = get_type_hints(kind, include_extras=True), dataclasses.fields(kind)
    optional = (each.name for each in fields if each.default is not MISSING or each.default_factory is not MISSING)
    return {each.name: reader_of(hints[each.name]) for each in fields}, frozenset(optional)


def _from_values(kind: Any, names: list[str]) -> Callable[[list[Any]], Any]:
    return lambda values: kind(**dict(zip(names, values, strict=True)))


# -- readers: they return a value or raise, and the place in the error grows on its way out ----------------------------


def _plain(words: str, fits: Callable[[Any], bool]) -> Reader:
    def read(value: Any) -> Any:
        if fits(value):
            return value
        raise must_be(words, value)

    return read


def _worded(reader: Reader, mark: Words) -> Reader:
    def read(value: Any) -> Any:
        try:
            found = reader(value)
        except DecodingError:
            raise must_be(mark.words, value) from None
        if mark.fits(found):
            return found
        raise must_be(mark.words, value)

    return read


def _number(kind: type[int] | type[float], bounds: Between) -> Reader:
    least, most = bounds.least, bounds.most
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
        if bounds.infinite and value == INFINITE:
            return math.inf
        raise must_be(words, value)

    return read


def _first_of(readers: list[Reader], words: str) -> Reader:
    def read(value: Any) -> Any:
        for reader in readers:
            with suppress(DecodingError):
                return reader(value)
        raise must_be(words, value)

    return read


def _list(reader: Reader, make: Callable[[Iterable[Any]], Any], items_of: Callable[[str], list[str]] | None) -> Reader:
    def read(value: Any) -> Any:
        if items_of is not None and isinstance(value, str):
            value = items_of(value)
        if type(value) is not list and type(value) is not tuple:
            raise must_be("a list", value)
        items = iter(value)
        try:
            return make(map(reader, items))
        except DecodingError as error:
            raise DecodingError(f"[{_last(items, value)}]{error}") from None

    return read


def _array(names: list[str], readers: list[Reader], make: Callable[[list[Any]], Any]) -> Reader:
    wanted = len(readers)

    def read(value: Any) -> Any:
        if (type(value) is not list and type(value) is not tuple) or len(value) != wanted:
            raise must_be(f"a list of {wanted} values", value)
        items = iter(value)
        try:
            found = [*map(operator.call, readers, items)]
        except DecodingError as error:
            raise DecodingError(f"{names[_last(items, value)]}{error}") from None
        return make(found)

    return read


def _object(readers: Mapping[str, Reader], optional: frozenset[str] = frozenset(), kind: Any = None) -> Reader:
    every = [*readers.items()]

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise must_be("an object", value)
        wanted = every
        if value.keys() != readers.keys():
            wanted = [(name, reader) for name, reader in every if name in value or name not in optional]
            _refuse_names(value, dict(wanted))
        pairs = iter(wanted)
        try:
            found = {name: reader(value[name]) for name, reader in pairs}
        except DecodingError as error:
            raise DecodingError(f": {wanted[_last(pairs, wanted)][0]}{error}") from None
        return found if kind is None else kind(**found)

    return read


def _table(reader: Reader) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise must_be("an object", value)
        names = iter(value)
        try:
            return {name: reader(value[name]) for name in names}
        except DecodingError as error:
            raise DecodingError(f"[{[*value][_last(names, value)]!r:.40}]{error}") from None

    return read


def _refuse_names(value: dict[str, Any], wanted: dict[str, Reader]) -> None:
    for name in wanted:
        if name not in value:
            raise DecodingError(f": field {name!r} is missing")
    for name in value:
        if name not in wanted:
            raise DecodingError(f": unknown field {name!r:.40}")


def _last(items: Iterator[Any], values: Sized) -> int:
    """Return the place of the last item that an iterator over these values has given."""
    return len(values) - operator.length_hint(items) - 1


def describe(hint: Any) -> str:
    """Return a type in words.

    >>> describe(int | Literal["auto"]), describe(tuple[float, ...])
    ("a whole number or 'auto'", 'a list of numbers')
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(part) for part in parts)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in parts)
    if origin is Annotated:
        return next((mark.words for mark in parts[1:] if isinstance(mark, Words)), describe(parts[0]))
    if origin in (tuple, list, frozenset):
        kinds = {float: " of numbers", int: " of numbers", str: " of words"}
        return "a list" + (kinds.get(parts[0], "") if origin is not tuple or parts[1:] == (...,) else "")
    if is_dataclass(hint) or origin in (dict, Mapping):
        return "an object"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "'none'"}
    return names[hint]


# -- JSON --------------------------------------------------------------------------------------------------------------


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object strictly: no field twice, no NaN, no number that a float cannot hold, not too many parts.

    >>> parse_object(b'{"a":1,"a":2}')
    Traceback (most recent call last):
    paceline.decoding.DecodingError: field 'a' is there twice
    """
    if data.count(b"[") + data.count(b"{") > MOST_CONTAINERS:
        raise DecodingError(f"not JSON that can be read (more than {MOST_CONTAINERS:,} lists and objects)")
    try:
        found = _STRICT.decode(data.decode("utf-8"))
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
    raise DecodingError(f"field {twice!r:.40} is there twice")


def _finite(text: str) -> float:
    number = float(text)
    if math.isfinite(number):
        return number
    raise DecodingError(f"the number {text:.40} is too large")


def _refuse_constant(name: str) -> float:
    raise DecodingError(f"not JSON ({name} is no number)")


_STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)

JSON = Notation(
    {
        int: _number(int, Between(0)),
        float: _number(float, Between(-MOST_FLOAT, MOST_FLOAT)),
        str: _plain("text", lambda value: isinstance(value, str)),
        bool: _plain("true or false", lambda value: isinstance(value, bool)),
        dict: _plain("an object", lambda value: isinstance(value, dict)),
    }
)
