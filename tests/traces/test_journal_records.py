"""A record is read back as it was written, to the last bit; and every field can be refused."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.decoding import MOST_BLOCKS, MOST_NUMBER
from paceline.traces import journal
from paceline.traces.journal import (
    KINDS,
    Arrival,
    Arrived,
    Dropped,
    JournalRecord,
    RunBegan,
    StepRecord,
    line_of,
    record_from,
)

COUNTS = st.integers(0, 2**40)
SMALL = st.integers(0, MOST_NUMBER)
LOSSES = st.floats(-journal.MOST_LOSS, journal.MOST_LOSS)
SECONDS = st.integers(0, 10**13).map(lambda microseconds: microseconds / 1e6)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
GRADIENTS = st.lists(st.tuples(SMALL, COUNTS), max_size=3).map(tuple)
DROPPED = st.lists(st.builds(Dropped, worker=SMALL, version=COUNTS, reason=st.text()), max_size=2).map(tuple)


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    blocks = draw(st.integers(1, 100))
    return Arrival(
        worker=draw(SMALL),
        version=draw(COUNTS),
        draw=draw(COUNTS),
        blocks_done=draw(st.integers(1, blocks)),
        blocks=blocks,
        at_seconds=draw(SECONDS),
        work_seconds=draw(st.none() | SECONDS),
        transfer_seconds=draw(SECONDS),
        loss_mean=draw(st.none() | LOSSES),
        loss_variance=draw(st.none() | LOSSES.map(abs)),
        samples=draw(COUNTS),
        batch_samples=draw(st.just(0) | COUNTS),
        first_sample=draw(st.just(0) | COUNTS),
    )


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("worker", "shard"), SMALL),
    **dict.fromkeys(("first_draw", "version", "round", "rounds", "rounds_done"), COUNTS),
    "first_sample": st.none() | COUNTS,
    "threads": st.integers(1, journal.MOST_THREADS),
    **dict.fromkeys(("sent_bytes", "received_bytes"), COUNTS),
    **dict.fromkeys(("workers", "blocks"), st.integers(1, MOST_BLOCKS)),
    **dict.fromkeys(("seed", "fingerprint"), st.integers(1 - 2**64, 2**64 - 1)),
    **dict.fromkeys(("paceline", "strategy", "signature", "codec", "host", "reason", "peer", "torch"), st.text()),
    "on": st.sampled_from(("server", "ranks")),
    **dict.fromkeys(("at_seconds", "opened_seconds"), SECONDS),
    **dict.fromkeys(("loss", "accuracy", "test_loss"), st.none() | NUMBERS),
    **dict.fromkeys(("fresh", "late"), GRADIENTS),
    "format": st.just(journal.FORMAT),
    "diverged": st.booleans(),
    "records": COUNTS.filter(bool),
    **dict.fromkeys(("recipe", "changes"), st.dictionaries(st.text(), PLAIN, max_size=3)),
    "dropped": DROPPED,
    "arrivals": st.lists(arrivals(), max_size=3).map(tuple),
}


def records_of(kind: str) -> st.SearchStrategy[JournalRecord]:
    named = {field.name: FIELDS[field.name] for field in fields(KINDS[kind])}
    if kind == "refused":
        named["worker"] = st.none() | SMALL
    return st.builds(KINDS[kind], **named)


def began(**changes: Any) -> RunBegan:
    plain = RunBegan(
        format=journal.FORMAT,
        paceline="0.1.0",
        strategy="lgc",
        seed=0,
        workers=3,
        blocks=4,
        recipe={"target_loss": 0.5},
        signature="mlp",
        codec="none",
    )
    return replace(plain, **changes)


def arrival(worker: int = 0, version: int = 0, at_seconds: float = 1.0, **changes: Any) -> Arrival:
    plain = Arrival(
        worker=worker,
        version=version,
        draw=version,
        blocks_done=4,
        blocks=4,
        at_seconds=at_seconds,
        work_seconds=0.5,
        transfer_seconds=0.1,
        loss_mean=0.7,
        loss_variance=0.2,
        samples=32,
    )
    return replace(plain, **changes)


def stepped(version: int = 0, at_seconds: float = 1.0, **changes: Any) -> StepRecord:
    plain = StepRecord(
        at_seconds=at_seconds,
        version=version,
        opened_seconds=at_seconds,
        fresh=(),
        late=(),
        dropped=(),
        arrivals=(),
        fingerprint=0,
        sent_bytes=0,
        received_bytes=0,
    )
    return replace(plain, **changes)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40, derandomize=True)
@given(data=st.data())
def test_a_record_is_read_back_as_it_was_written(kind: str, data: st.DataObject) -> None:
    record = data.draw(records_of(kind))
    line = line_of(record)
    assert line.count(b"\n") == 1
    assert json.loads(line)["kind"] == kind
    found = record_from(line)
    assert repr(found) == repr(record), "repr tells -0.0 from 0.0, and True from 1"
    assert found == record


@settings(deadline=None, derandomize=True)
@given(seconds=st.floats(0, 1e9))
def test_times_are_rounded_to_microseconds_once_and_alike_everywhere(seconds: float) -> None:
    record = stepped(at_seconds=seconds, arrivals=(arrival(at_seconds=seconds, work_seconds=seconds),))
    found = record_from(line_of(record))
    assert isinstance(found, StepRecord)
    assert found.at_seconds == round(seconds, 6)
    assert found.arrivals[0].at_seconds == found.at_seconds
    assert found.arrivals[0].work_seconds == pytest.approx(seconds, abs=1e-6)
    assert line_of(found) == line_of(record_from(line_of(found)))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_null_and_no_time_runs_backwards(number: float) -> None:
    slip = arrival(loss_mean=number, loss_variance=number, work_seconds=number, transfer_seconds=number)
    line = line_of(Arrived(arrivals=(slip, arrival(work_seconds=-1.0, transfer_seconds=-1.0)), dropped=()))
    found = record_from(line)
    assert isinstance(found, Arrived)
    first, second = found.arrivals
    assert (first.loss_mean, first.loss_variance, first.work_seconds, first.transfer_seconds) == (None, None, None, 0.0)
    assert (second.work_seconds, second.transfer_seconds) == (0.0, 0.0)
    assert record_from(line_of(journal.Evaluated(at_seconds=0.0, round=1, loss=number, accuracy=number))) == (
        journal.Evaluated(at_seconds=0.0, round=1, loss=None, accuracy=None)
    )
    assert record_from(line_of(began(recipe={"network": {"bandwidth": number}}))).recipe == {  # type: ignore[union-attr]
        "network": {"bandwidth": None}
    }


def test_numpys_numbers_are_numbers() -> None:
    record = stepped(np.int64(3), np.float64(1.5), fresh=((np.int64(0), np.int64(3)),))  # type: ignore[arg-type]
    assert record_from(line_of(record)) == stepped(3, 1.5, fresh=((0, 3),))


def test_an_arrival_is_small() -> None:
    """A real gradient's numbers: a late hour, losses of 17 digits."""
    some = tuple(
        arrival(
            worker,
            version=12_345,
            at_seconds=3601.123456,
            work_seconds=0.052134,
            transfer_seconds=0.000412,
            loss_mean=0.6931471824645996,
            loss_variance=0.23456789553165436,
        )
        for worker in range(100)
    )
    with_losses = len(line_of(stepped(arrivals=some))) / 100
    without = len(line_of(stepped(arrivals=tuple(replace(a, loss_mean=None, loss_variance=None) for a in some)))) / 100
    assert with_losses < 90
    assert without < 60


BAD_RECORDS = [
    (lambda: journal.WorkerLeft(at_seconds=0.0, worker=-1, reason=""), "worker_left: worker must be a whole number"),
    (lambda: journal.WorkerLeft(at_seconds=-1.0, worker=1, reason=""), "at_seconds must be a number between 0 and"),
    (lambda: journal.WorkerLeft(at_seconds=math.nan, worker=1, reason=""), "at_seconds must be a number between 0 and"),
    (
        lambda: journal.WorkerLeft(at_seconds=0.0, worker=1.5, reason=""),
        "worker must be a whole number",
    ),  # type: ignore[arg-type]
    (lambda: journal.WorkerLeft(at_seconds=0.0, worker=1, reason=None), "reason must be text, not None"),  # type: ignore[arg-type]
    (lambda: began(format=2), "format 2 is not known (known: 3)"),
    (lambda: began(workers=0), "workers must be a whole number between 1 and 10000000, not 0"),
    (lambda: began(recipe={"out": object()}), "recipe must be of plain values"),
    (lambda: stepped(arrivals=(arrival(), arrival(blocks_done=5))), "arrivals[1] must have between 1 and all blocks"),
    (
        lambda: stepped(arrivals=(arrival(at_seconds=math.inf),)),
        "[0].at_seconds must be microseconds",
    ),
    (lambda: stepped(arrivals=(arrival(at_seconds=-1.0),)), "arrivals[0].at_seconds must be microseconds of 0 or more"),
    (lambda: stepped(fresh=((1, 2, 3),)), "fresh[0] must be a list of 2 values, not [1, 2, 3]"),
    (lambda: stepped(fresh=((-1, 2),)), "fresh[0][0] must be a whole number between 0 and 1000000, not -1"),
]


@pytest.mark.parametrize(("make", "why"), BAD_RECORDS)
def test_a_record_nobody_could_read_is_not_written(make: Any, why: str) -> None:
    with pytest.raises(ValueError) as caught:
        line_of(make())
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [None, "soon", [1.0]])
def test_a_time_that_is_none_is_refused_with_its_name_and_value(value):
    with pytest.raises(ValueError, match="checkpointed: at_seconds cannot be written: ") as refused:
        line_of(journal.Checkpointed(at_seconds=value, version=7))
    assert str(refused.value).endswith(f"(at_seconds={value!r})")


def test_a_journal_of_a_server_says_nothing_of_ranks_and_one_of_ranks_says_it():
    """Absent is a server: journals of before have no such fields, and those of a server still look the same."""
    assert b'"on"' not in line_of(began())
    on_ranks = began(on="ranks", torch="2.13.0")
    assert record_from(line_of(on_ranks)) == on_ranks
    with pytest.raises(ValueError, match="on must be server or ranks, not 'nobody'"):
        line_of(began(on="nobody"))
