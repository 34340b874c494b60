"""Files of step times: what is written is read back, a kill and a full disk lose little, and files stay small."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.traces import step_times
from paceline.traces.alignment import aligned_starts
from paceline.traces.checked_lines import checked_line
from paceline.traces.ideal import ideal_steps
from paceline.traces.step_times import (
    BucketsMade,
    LinkTimed,
    ServerTimes,
    StepTimes,
    TimesBegan,
    TimesEnded,
    TimesFileError,
    TimesWriter,
    WorkerTimes,
    read_all_times,
    read_times,
    summed,
    times_line,
    times_path,
    times_record,
)

BEGAN = TimesBegan(
    format=1, paceline="0.2.0", noun="rank", number=1, workers=2, host="node-7", launch="1a2b", sync="ddp", notes=("a",)
)
durations = st.integers(0, 10**9).map(lambda micro: micro / 1e6)
steps = st.builds(
    StepTimes,
    step=st.integers(0, 10**6),
    steps=st.integers(1, 64),
    version=st.none() | st.integers(0, 10**6),
    started_seconds=durations,
    seconds=durations,
    input_seconds=durations,
    forward_seconds=durations,
    backward_seconds=durations,
    wait_seconds=durations,
    optimiser_seconds=durations,
    processor_seconds=st.none() | durations,
    buckets=st.lists(st.tuples(durations, durations), max_size=4).map(tuple),
)
others = st.one_of(
    st.just(BEGAN),
    st.builds(BucketsMade, step=st.integers(0, 99), bytes=st.lists(st.integers(0, 2**40), max_size=3).map(tuple)),
    st.builds(
        LinkTimed,
        at_seconds=durations,
        to=st.integers(0, 99),
        bytes=st.integers(0, 2**30),
        seconds=durations,
        latency_seconds=durations,
    ),
    st.builds(
        ServerTimes,
        version=st.integers(0, 99),
        closed_seconds=durations,
        step_seconds=durations,
        send_seconds=durations,
        decode_seconds=durations,
    ),
    st.builds(TimesEnded, at_seconds=durations, reason=st.text(max_size=20)),
)


@given(steps | others)
def test_every_record_is_read_back_as_it_was_written(record: object) -> None:
    back = times_record(times_line(record))  # type: ignore[arg-type]
    if isinstance(record, TimesEnded):
        assert isinstance(back, TimesEnded)
        assert back.reason.isprintable()
        assert len(back.reason) == len(record.reason)
        record = replace(record, reason=back.reason) if not record.reason.isprintable() else record
    assert back == record


def test_what_a_terminal_would_obey_is_neither_written_nor_read(tmp_path: Path) -> None:
    began = replace(BEGAN, host="node\x1b[2J", notes=("two\nlines", "x" * 9_000))
    writer = TimesWriter(tmp_path / "rank-1.jsonl")
    writer.write(began)
    writer.close()
    read = read_times(tmp_path / "rank-1.jsonl").began
    assert (read.host, read.notes[0], len(read.notes[1])) == ("node?[2J", "two?lines", 4096)
    forged = checked_line({"kind": "times_ended", "at_seconds": 1.0, "reason": "\x1b]0;"})
    with pytest.raises(ValueError, match="printable"):
        times_record(forged)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=12))
def test_of_a_step_that_was_taken_twice_the_last_line_counts(spans: list[tuple[int, int]]) -> None:
    """A restart inside a sum leaves lines that overlap: each step is counted once at the most, the last line always."""
    kept: list[tuple[int, int]] = []
    for first, count in reversed(spans):
        if all(first + count <= other or other + length <= first for other, length in kept):
            kept.append((first, count))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rank-1.jsonl")
        lines = [StepTimes(step=first, steps=count, started_seconds=0.0, seconds=1.0) for first, count in spans]
        path.write_bytes(b"".join(map(times_line, [BEGAN, *lines])))
        assert [(line.step, line.steps) for line in read_times(path).steps] == kept[::-1]


@given(steps)
def test_the_line_of_a_step_is_the_json_that_the_encoder_writes(times: StepTimes) -> None:
    values = json.loads(times_line(times))
    del values["crc"]
    assert checked_line(values) == times_line(times)


@given(st.data())
def test_a_flipped_bit_is_noticed(data: st.DataObject) -> None:
    line = bytearray(times_line(BucketsMade(step=3, bytes=(1, 2))))
    place = data.draw(st.integers(0, len(line) - 2))
    line[place] ^= 1 << data.draw(st.integers(0, 6))
    with pytest.raises(ValueError):
        times_record(bytes(line))


def written(path: Path, count: int, first: int = 0) -> None:
    writer = TimesWriter(path)
    writer.write(BEGAN)
    for step in range(first, first + count):
        writer.write(StepTimes(step=step, started_seconds=float(step), seconds=1.0, forward_seconds=0.5))
    writer.close()


def test_a_torn_line_is_left_out_and_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = times_path(tmp_path, "rank", 1)
    written(path, 3)
    path.write_bytes(path.read_bytes()[:-5])
    torn = read_times(path)
    assert torn.torn
    assert [step.step for step in torn.steps] == [0, 1]
    written(path, 2, first=2)
    whole = read_times(path)
    assert not whole.torn
    assert [step.step for step in whole.steps] == [0, 1, 2, 3]
    assert read_all_times(tmp_path) == {"rank": {1: whole}}


def test_a_step_that_was_taken_again_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.jsonl"
    written(path, 3)
    written(path, 2, first=1)
    assert [step.step for step in read_times(path).steps] == [0, 1, 2]


def test_a_long_run_has_a_small_file_that_still_holds_all_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_times, "LINES_AT_A_STRIDE", 16)
    path = tmp_path / "rank-1.jsonl"
    written(path, 1_000)
    times = read_times(path)
    assert len(times.steps) < 16 * 8
    assert sum(step.steps for step in times.steps) == 1_000
    assert sum(step.seconds for step in times.steps) == pytest.approx(1_000.0)
    for before, after in zip(times.steps, times.steps[1:], strict=False):
        assert after.step == before.step + before.steps
    aligned = [step for step in times.steps if step.steps > 1][1:-1]
    assert all(step.step % step.steps == 0 for step in aligned)


def test_ranks_that_are_at_different_steps_sum_the_same_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "LINES_AT_A_STRIDE", 16)
    written(tmp_path / "a.jsonl", 200)
    written(tmp_path / "b.jsonl", 187)
    first = {(step.step, step.steps) for step in read_times(tmp_path / "a.jsonl").steps}
    second = [(step.step, step.steps) for step in read_times(tmp_path / "b.jsonl").steps]
    assert set(second[:-1]) <= first


def test_sums_are_sums() -> None:
    one = StepTimes(step=0, started_seconds=1.0, seconds=0.5, input_seconds=0.125, buckets=((0.25, 0.5),))
    two = StepTimes(step=1, started_seconds=1.5, seconds=0.25, input_seconds=0.0625, buckets=((0.125, 0.25),))
    both = summed([one, two])
    assert (both.steps, both.seconds, both.input_seconds, both.buckets) == (2, 0.75, 0.1875, ((0.375, 0.75),))
    assert summed([one, StepTimes(step=1, started_seconds=0.0, seconds=0.0)]).buckets == ()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_is_noted_and_ends_nothing() -> None:
    writer = TimesWriter(Path("/dev/full"))
    writer.write(BEGAN)
    writer.write(StepTimes(step=0, started_seconds=0.0, seconds=1.0))
    writer.close()
    assert "No space left" in writer.error
    assert writer.lost == 2


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no whole line"),
        (b"{}\n", "checksum"),
        (times_line(TimesEnded(at_seconds=0.0, reason="")), "begins with times_began"),
        (times_line(BEGAN) + b"x" * (step_times.LONGEST_LINE_BYTES + 2), "at most"),
    ],
)
def test_what_is_no_file_of_times_is_refused_in_one_line(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(content)
    with pytest.raises(TimesFileError, match=why):
        read_times(path)


class FullDisk:
    """Takes no more than `room` bytes, as a full disk does, until it is given more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 2**40
        self._write = os.write
        monkeypatch.setattr(step_times.os, "write", self.write)

    def write(self, file: int, text: bytes) -> int:
        if self.room == 0:
            raise OSError(28, "No space left on device")
        taken = self._write(file, text[: self.room])
        self.room -= taken
        return taken


@pytest.mark.parametrize("room", [0, 20])
def test_a_first_line_that_a_full_disk_refused_comes_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    disk, path = FullDisk(monkeypatch), tmp_path / "rank-1.jsonl"
    disk.room = room
    writer = TimesWriter(path)
    writer.write(BEGAN)
    writer.write(StepTimes(step=0, started_seconds=0.0, seconds=1.0))
    disk.room = 2**40
    for step in (1, 2):
        writer.write(StepTimes(step=step, started_seconds=float(step), seconds=1.0))
    writer.close()
    times = read_times(path)
    assert times.began == BEGAN
    assert [each.step for each in times.steps] == [1, 2]
    assert path.read_bytes().count(b"times_began") == 1


def test_other_records_do_not_change_which_steps_are_summed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "LINES_AT_A_STRIDE", 16)
    for name, noted in (("a", ()), ("b", (5, 17, 18, 40, 41, 90))):
        writer = TimesWriter(tmp_path / name)
        writer.write(BEGAN)
        for step in range(128):
            writer.write(StepTimes(step=step, started_seconds=float(step), seconds=1.0))
            if step in noted:
                writer.write(BucketsMade(step=step, bytes=(1,)))
        writer.close()
    ranks = {number: read_times(tmp_path / name) for number, name in enumerate("ab")}
    assert [(each.step, each.steps) for each in ranks[0].steps] == [(each.step, each.steps) for each in ranks[1].steps]


def test_ranks_whose_sums_differ_are_counted_once() -> None:
    def rank(number: int, lines: list[tuple[int, int]]) -> WorkerTimes:
        made = [StepTimes(step=a, steps=b, started_seconds=float(a), seconds=1.0 * b) for a, b in lines]
        return WorkerTimes(began=BEGAN, steps=tuple(made))

    ranks = {0: rank(0, [(step, 2) for step in range(0, 32, 2)]), 1: rank(1, [(step, 1) for step in range(32)])}
    assert sum(each.seconds for each in ideal_steps(ranks)[1]) == 32.0


def test_where_a_clock_began_again_is_kept_though_it_did_not_go_back(tmp_path: Path) -> None:
    for number, offset in ((0, 0.0), (1, 7.0)):
        for first, behind in ((0, offset), (3, offset + 40.0 * (1 - number))):
            writer = TimesWriter(tmp_path / f"{number}")
            writer.write(BEGAN)
            for step in range(first, first + 3):
                writer.write(StepTimes(step=step, started_seconds=behind + step, seconds=1.0))
            writer.close()
    ranks = {number: read_times(tmp_path / f"{number}") for number in (0, 1)}
    assert ranks[1].restarts == (3,)
    starts = aligned_starts(ranks)
    assert starts[0] == pytest.approx(starts[1])
