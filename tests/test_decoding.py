"""The typed decoder: a value is of its type and within its bounds, or the refusal names its place in one line."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding import (
    AS_ARRAY,
    JSON,
    Between,
    DecodingError,
    Notation,
    ReadBy,
    Words,
    decode,
    parse_object,
    reader_of,
)


@dataclass(frozen=True, kw_only=True)
class Point:
    x: int
    y: float


@dataclass(frozen=True, kw_only=True)
class Example:
    count: Annotated[int, Between(1, 5)]
    share: float | None
    kind: Literal["a", "b"]
    name: str
    on: bool
    table: dict[str, Any]
    pairs: tuple[tuple[int, int], ...]
    points: tuple[Annotated[Point, AS_ARRAY], ...]


GOOD = {
    "count": 3,
    "share": 1,
    "kind": "a",
    "name": "x",
    "on": True,
    "table": {"k": [1]},
    "pairs": [[1, 2]],
    "points": [[1, 0.5]],
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def test_values_become_what_the_hints_say():
    found = decode(Example, GOOD)
    assert found.points == (Point(x=1, y=0.5),)
    assert found.pairs == ((1, 2),)
    assert type(found.share) is float


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"count": 6}, "count must be a whole number between 1 and 5, not 6"),
        ({"count": True}, "count must be a whole number between 1 and 5, not True"),
        ({"count": 3.0}, "count must be a whole number between 1 and 5, not 3.0"),
        ({"share": "1"}, "share must be a number, not '1'"),
        ({"share": 10**400}, "share must be a number, not 1000"),
        ({"kind": "c"}, "kind must be one of a, b, not 'c'"),
        ({"kind": ["a"]}, "kind must be one of a, b, not ['a']"),
        ({"name": None}, "name must be text, not None"),
        ({"on": 1}, "on must be true or false, not 1"),
        ({"table": []}, "table must be an object, not []"),
        ({"pairs": [[1, 2], [1]]}, "pairs[1] must be a list of 2 values, not [1]"),
        ({"pairs": [[1, -2]]}, "pairs[0][1] must be a whole number of 0 or more, not -2"),
        ({"points": [[1, 0.5], [1, None]]}, "points[1].y must be a number, not None"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_a_refusal_names_the_place(changes, why):
    with pytest.raises(DecodingError) as caught:
        decode(Example, GOOD | changes)
    assert why in str(caught.value)


@dataclass(frozen=True, kw_only=True)
class Shape:
    name: Annotated[str, Words("one letter", lambda text: len(text) == 1)]
    corner: Point
    sizes: dict[str, int] = field(default_factory=dict)
    layers: frozenset[int] = frozenset()
    rest: tuple[()] = ()
    at: Annotated[float, ReadBy(lambda value: value / 1000)] = 0.0


SHAPE = {"name": "a", "corner": {"x": 1, "y": 2}}


def test_what_has_a_default_may_be_left_out_and_objects_are_objects_unless_it_is_said():
    assert decode(Shape, SHAPE) == Shape(name="a", corner=Point(x=1, y=2.0))
    whole = {**SHAPE, "sizes": {"a b": 3}, "layers": [2, 1, 2], "rest": [], "at": 5}
    corner = Point(x=1, y=2.0)
    assert decode(Shape, whole) == Shape(name="a", corner=corner, sizes={"a b": 3}, layers=frozenset({1, 2}), at=0.005)
    assert decode({"shape": {"x": int}, "both": tuple[int, str]}, {"shape": {"x": 1}, "both": [2, "b"]}) == {
        "shape": {"x": 1},
        "both": (2, "b"),
    }


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"name": "ab"}, "name must be one letter, not 'ab'"),
        ({"name": 7}, "name must be one letter, not 7"),
        ({"corner": [1, 2]}, "corner must be an object, not [1, 2]"),
        ({"corner": {"x": 1}}, "corner: field 'y' is missing"),
        ({"corner": {"x": 1, "y": 2, "z": 3}}, "corner: unknown field 'z'"),
        ({"corner": {"x": 1, "y": "2"}}, "corner: y must be a number, not '2'"),
        ({"sizes": {"a\nb": -1}}, r"sizes['a\nb'] must be a whole number of 0 or more, not -1"),
        ({"layers": [1, "x"]}, "layers[1] must be a whole number of 0 or more, not 'x'"),
        ({"rest": [1]}, "rest must be a list of 0 values, not [1]"),
    ],
)
def test_a_place_within_a_place_is_named_as_well(changes, why):
    with pytest.raises(DecodingError) as caught:
        decode(tuple[Shape, ...], [SHAPE, SHAPE | changes], "shapes")
    assert str(caught.value) == f"shapes[1]: {why}"
    with pytest.raises(DecodingError) as caught:
        decode(Shape, SHAPE | changes)
    assert str(caught.value) == why


@dataclass(frozen=True)
class Pair:
    left: int
    right: int = 0


UNIONS = {
    "a bounded number or text": (Annotated[int, Between(1, 3)] | str, [2, "a"], [9], "a whole number or text"),
    "a list or a number": (list[int] | int, [[1, 2], 3], ["a"], "a list of numbers or a whole number"),
    "an object or a number": (Pair | int, [{"left": 1}, 3], [[]], "an object or a whole number"),
    "a table or true": (dict[str, int] | bool, [{"a": 1}, True], ["a"], "an object or true or false"),
    "words of its own": (Annotated[str, Words("one letter", lambda text: len(text) == 1)] | int, ["a", 1], ["ab"],
                         "one letter or a whole number"),
    "pairs or nothing or text": (tuple[int, int] | None | str, [[1, 2], None, "a"], [3], "a list or 'none' or text"),
}  # fmt: skip


@pytest.mark.parametrize(("hint", "taken", "refused", "words"), UNIONS.values(), ids=UNIONS)
def test_a_union_may_be_of_anything_and_its_refusal_names_all(hint, taken, refused, words):
    for value in taken:
        found = decode(hint, value)
        assert found == (Pair(**value) if hint == Pair | int and isinstance(value, dict) else found)
        assert (found is None) == (value is None)
    for value in refused:
        with pytest.raises(DecodingError, match=f"must be {re.escape(words)}, not"):
            decode(hint, value)


@pytest.mark.parametrize("hint", [Literal[1, 2], complex, complex | int, dict[str, complex]], ids=str)
def test_a_type_that_cannot_be_decoded_is_refused_before_any_value_is_seen(hint):
    with pytest.raises(TypeError, match=r"must be of texts|is no type that can be decoded"):
        reader_of(hint)


@pytest.mark.parametrize("hint", [Pair, tuple[Pair, ...], Annotated[int, Between(1, 2)], Pair | None], ids=str)
def test_only_json_has_objects_and_bounds(hint):
    with pytest.raises(TypeError, match="is read from JSON only"):
        reader_of(hint, Notation({**JSON.readers}))


def test_of_very_many_names_the_one_that_is_there_twice_is_found_at_once():
    names = ",".join(f'"{number}":0' for number in [*range(200_000), 199_999])
    with pytest.raises(DecodingError, match="field '199999' is there twice"):
        parse_object(f"{{{names}}}".encode())


def test_a_missing_field_is_named():
    with pytest.raises(DecodingError, match="field 'name' is missing"):
        decode(Example, {name: value for name, value in GOOD.items() if name != "name"})


def refusal(read):
    try:
        read()
    except DecodingError as error:
        return str(error)
    return ""


@given(name=st.sampled_from(sorted(GOOD)), value=VALUES)
def test_of_any_value_comes_the_right_type_or_one_line(name, value):
    why = refusal(lambda: decode(Example, GOOD | {name: value}))
    assert why.isprintable()
    assert len(why) < 200


@given(data=st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_of_any_bytes_comes_an_object_or_a_refusal_of_one_line(data):
    assert "\n" not in refusal(lambda: parse_object(data))
