"""The typed decoder: a value is of its type and within its bounds, or the refusal names its place in one line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding import DecodingError, bounded, parse_object, read_fields


@dataclass(frozen=True, kw_only=True)
class Point:
    x: int
    y: float


@dataclass(frozen=True, kw_only=True)
class Example:
    count: int = bounded(1, 5)
    share: float | None
    kind: Literal["a", "b"]
    name: str
    on: bool
    table: dict[str, Any]
    pairs: tuple[tuple[int, int], ...]
    points: tuple[Point, ...]


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
    found = read_fields(Example, GOOD)
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
        read_fields(Example, GOOD | changes)
    assert why in str(caught.value)


def test_a_missing_field_is_named():
    with pytest.raises(DecodingError, match="field 'name' is missing"):
        read_fields(Example, {name: value for name, value in GOOD.items() if name != "name"})


def refusal(read):
    try:
        read()
    except DecodingError as error:
        return str(error)
    return ""


@given(name=st.sampled_from(sorted(GOOD)), value=VALUES)
def test_of_any_value_comes_the_right_type_or_one_line(name, value):
    why = refusal(lambda: read_fields(Example, GOOD | {name: value}))
    assert why.isprintable()
    assert len(why) < 200


@given(data=st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_of_any_bytes_comes_an_object_or_a_refusal_of_one_line(data):
    assert "\n" not in refusal(lambda: parse_object(data))
