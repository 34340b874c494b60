"""Quantities as people read and type them: one text for one value, and refusals that name it."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import PacelineError
from paceline.quantities import (
    QuantityError,
    calendar_text,
    count_text,
    duration_text,
    number_text,
    percent_text,
    rate_in_bytes,
    seconds_text,
    size_in_bytes,
    size_text,
)


@pytest.mark.parametrize("seconds", [0.0, 1e-7, 9.999e-4, 0.001, 0.9999, 1.0, 9.999, 99.99, 1e5])
def test_a_duration_has_a_unit_and_few_digits(seconds: float) -> None:
    for text in (duration_text(seconds), duration_text(seconds, trim=True)):
        value, unit = text.split()
        assert math.isclose(
            float(value) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit], seconds, rel_tol=0.05, abs_tol=1e-6
        )


@pytest.mark.parametrize("value", [5.7634, 999.6, 1e5, 123456789.0, 1e-5, 9.9996e-5, -12.345, 1e300])
def test_a_number_has_at_most_eight_characters(value: float) -> None:
    assert len(number_text(value)) <= 8
    assert math.isclose(float(number_text(value)), value, rel_tol=0.05)


@pytest.mark.parametrize("count", [0, 99_999, 99_999.6, 999_499, 1e6, 123.4e9, 9.99e12])
def test_a_count_has_at_most_six_characters(count: float) -> None:
    assert len(count_text(count)) <= 6


def test_what_is_not_known_is_a_dash_in_a_table() -> None:
    assert {seconds_text(None), seconds_text(math.nan), percent_text(math.inf), percent_text(None)} == {"-"}


def test_times_of_the_calendar_change_their_unit_at_its_edge() -> None:
    texts = [calendar_text(seconds) for seconds in (59.99, 60, 3599, 3600, 86_399, 86_400)]
    assert texts == ["59.99 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "23 h 59 min", "1 d 00 h"]


@given(st.floats(0, 1e15))
def test_no_part_of_a_quantity_is_a_whole_of_the_next_unit(value: float) -> None:
    """119.6 s were "1 min 60 s", and 999,999 bytes "1000.0 kB"; above the largest unit numbers go on."""
    assert not re.search(r"\b60(\.00)? (s|min)|\b24 h", calendar_text(value))
    for text, largest in (
        (duration_text(value), "s"),
        (duration_text(value, trim=True), "s"),
        (size_text(value), "GB"),
        (count_text(value), "T"),
    ):
        number, unit = re.fullmatch(r"([\d.,e+-]+) ?(\D*)", text).groups()  # type: ignore[union-attr]
        assert unit in (largest, "") or float(number) < 1000, text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (calendar_text(119.6), "2 min 00 s"),
        (calendar_text(59.996), "1 min 00 s"),
        (calendar_text(3599.7), "1 h 00 min"),
        (size_text(999_999), "1.0 MB"),
        (size_text(999_949), "999.9 kB"),
        (duration_text(0.99996), "1.00 s"),
        (duration_text(999.7e-6, trim=True), "1 ms"),
        (count_text(999_600), "1.0M"),
        (count_text(999_940_000), "999.9M"),
        (seconds_text(999.96), "1,000"),
    ],
)
def test_a_number_just_below_a_unit_is_written_in_that_unit(text: str, found: str) -> None:
    assert text == found


@pytest.mark.parametrize("text", ["", "2", "GB", "-1GB", "0GB", "1.2.3GB", "1e999GB", "2 XB", "two GB"])
def test_a_size_that_is_none_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(QuantityError, match="--memory must be a size above 0 such as 500MB") as refused:
        size_in_bytes("--memory", text)
    assert isinstance(refused.value, PacelineError)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize("text", ["1Gbit", "1GB", "0bit/s", "fast", "1.2.3bit/s"])
def test_a_rate_that_is_none_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(QuantityError, match="--bandwidth must be a rate above 0"):
        rate_in_bytes("--bandwidth", text)


def test_bits_are_an_eighth_of_bytes() -> None:
    assert rate_in_bytes("rate", "8Mbit/s") == rate_in_bytes("rate", "1 MB/s") == rate_in_bytes("rate", "8Mbps") == 1e6


@pytest.mark.parametrize("text", ["512 B", "2.5 kB", "1.0 MB", "3.0 GB"])
def test_a_size_that_was_written_can_be_read(text: str) -> None:
    assert size_text(size_in_bytes("size", text)) == text
