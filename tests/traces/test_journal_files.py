"""The file: whole lines survive anything, a torn one is known, a bad one is named, a full disk ends no run."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.live.folder import FollowedRun
from paceline.traces import journal_files
from paceline.traces.checked_lines import checked_line, checksum_of, with_checksum
from paceline.traces.journal import (
    Checkpointed,
    Evaluated,
    JournalError,
    JournalRecord,
    RecordsLost,
    Refused,
    Resumed,
    RunEnded,
    WorkerJoined,
    WorkerLeft,
    lines_of,
    record_from,
)
from paceline.traces.journal_files import JournalWriter, effective, read_journal
from tests.traces.test_journal_records import arrival, began, stepped
from tests.waiting import until

RECORDS: list[JournalRecord] = [
    began(),
    WorkerJoined(at_seconds=0.1, worker=0, shard=0, first_draw=0, threads=2, host='a"b\n\u2028c'),
    stepped(0, 1.0, fresh=((0, 0),), arrivals=(arrival(0, 0, 1.0),)),
    Refused(at_seconds=1.1, worker=None, peer="p", reason="r"),
    WorkerLeft(at_seconds=1.5, worker=0, reason="gone"),
    RunEnded(at_seconds=2.0, reason="done", rounds_done=1, diverged=False),
]


def write(path: Path, records: list[JournalRecord], *, append: bool = False) -> JournalWriter:
    with JournalWriter(path, append=append) as writer:
        for record in records:
            writer.write(record)
    return writer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


# -- torn lines ---------------------------------------------------------------------------------------------------


def test_a_file_torn_anywhere_gives_its_whole_lines_and_can_be_gone_on_with(file: Path) -> None:
    write(file, RECORDS)
    whole = file.read_bytes()
    first_line = whole.index(b"\n") + 1
    for size in range(first_line, len(whole) + 1):
        file.write_bytes(whole[:size])
        lines = whole[:size].count(b"\n")
        torn = not whole[:size].endswith(b"\n")
        found = read_journal(file)
        assert found.records == tuple(RECORDS[:lines])
        assert found.torn is torn
        assert write(file, RECORDS[lines:], append=True).lost == 0
        assert file.read_bytes() == whole


def test_a_file_torn_in_its_first_line_is_no_journal_and_is_begun_anew(file: Path) -> None:
    first = lines_of([began()])
    for size in range(len(first)):
        file.write_bytes(first[:size])
        with pytest.raises(JournalError, match="not a journal: there is no whole line in it"):
            read_journal(file)
        with JournalWriter(file, append=True) as writer:
            assert writer.empty
            writer.write(began())
            assert not writer.empty
        assert read_journal(file).records == (began(),)


def test_a_torn_line_longer_than_a_look_back_is_cut_off(file: Path) -> None:
    first = lines_of([began()])
    file.write_bytes(first + b"x" * (3 * journal_files._BYTES_AT_ONCE + 7))
    JournalWriter(file, append=True).close()
    assert file.read_bytes() == first


# -- bad lines ----------------------------------------------------------------------------------------------------

STEP = json.loads(lines_of([stepped(0, 1.0, fresh=((0, 0),), arrivals=(arrival(),))]))
del STEP["crc"]


def step_with(**changes: Any) -> str:
    return json.dumps({**STEP, **changes})


BAD_LINES = {
    "": "not JSON",
    "{": "not JSON",
    '{"kind":"stepped"} {}': "not JSON",
    "\x00\x00": "not JSON",
    "7": "not JSON",
    "[]": "not JSON",
    "[" * 200_000: "nested too deeply",
    '{"at_seconds":1}': "field 'kind' is missing",
    '{"kind":"stoped"}': "unknown kind of record 'stoped'; did you mean 'stepped'?",
    '{"kind":["stepped"]}': "unknown kind of record 'list'",
    '{"kind":"checkpointed","at_seconds":1.0}': "checkpointed: field 'version' is missing",
    '{"kind":"checkpointed","at_seconds":1.0,"version":1,"more":2}': "checkpointed: unknown field 'more'",
    '{"kind":"checkpointed","at_seconds":1.0,"version":1,"version":2}': "field 'version' is there twice",
    '{"kind":"checkpointed","at_seconds":NaN,"version":1}': "NaN is no number",
    '{"kind":"checkpointed","at_seconds":1e999,"version":1}': "the number 1e999 is too large",
    '{"kind":"checkpointed","at_seconds":-1.0,"version":1}': "at_seconds must be a number between 0 and 9007",
    '{"kind":"checkpointed","at_seconds":"1","version":1}': "at_seconds must be a number between 0 and 9007",
    '{"kind":"checkpointed","at_seconds":1.0,"version":true}': "between 0 and 9007199254740992, not True",
    '{"kind":"checkpointed","at_seconds":1.0,"version":1.0}': "between 0 and 9007199254740992, not 1.0",
    '{"kind":"checkpointed","at_seconds":1.0,"version":' + "9" * 5000 + "}": "",
    '{"kind":"worker_left","at_seconds":1.0,"worker":null,"reason":""}': "worker must be a whole number",
    '{"kind":"worker_left","at_seconds":1.0,"worker":0,"reason":7}': "reason must be text, not 7",
    '{"kind":"evaluated","at_seconds":1.0,"round":0,"loss":"x","accuracy":1}': "loss must be a number, not",
    '{"kind":"evaluated","at_seconds":1.0,"round":0,"loss":1' + "0" * 400 + ',"accuracy":1}': "loss must be a number",
    '{"kind":"run_ended","at_seconds":1.0,"reason":"","rounds_done":1,"diverged":0}': "diverged must be true or false",
    json.dumps(
        {name: value for name, value in json.loads(lines_of([began()])).items() if name != "crc"}
    ): "run_began is only for the first line",
    step_with(arrivals=7): "stepped: arrivals must be a list, not 7",
    step_with(arrivals=[[0, 0]]): "arrivals[0] must be a list of 11 values",
    step_with(arrivals=[[0, 0, 0, 5, 4, 0, 0, 0, 0, 0, 0]]): "between 1 and all blocks done, not 5 of 4",
    step_with(
        arrivals=[[0, 0, 0, 1, 1, 0.5, 0, 0, 0, 0, 0]]
    ): "arrivals[0].at_seconds must be microseconds of 0 or more, not 0.5",
    step_with(arrivals=[[0, 0, 0, 1, 1, 0, -1, 0, 0, 0, 0]]): ".work_seconds must be microseconds of 0 or more, not -1",
    step_with(arrivals=[[-1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]]): "[0].worker must be a whole number between 0 and 1000000",
    step_with(dropped=[[0, 0]]): "dropped[0] must be a list of 3 values",
    step_with(fresh=[[0, 0], 1]): "fresh[1] must be a list of 2 values, not 1",
}


@pytest.mark.parametrize(("bad", "why"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named_with_its_reason(file: Path, bad: str, why: str) -> None:
    """Its checksum fits: whoever may write the file can also write that."""
    file.write_bytes(with_line(RECORDS, 3, bad.encode()))
    with pytest.raises(JournalError) as caught:
        read_journal(file)
    said = str(caught.value)
    assert said.startswith(f"{file}:4: ")
    assert why in said
    assert len(said) < len(str(file)) + 300
    assert "\n" not in said


@settings(
    deadline=None, max_examples=100, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_byte_turned_in_any_line_is_refused_with_its_line(file: Path, data: st.DataObject) -> None:
    lines = lines_of(RECORDS).splitlines(keepends=True)
    number = data.draw(st.integers(0, len(lines) - 1))
    place = data.draw(st.integers(0, len(lines[number]) - 1))
    turned = data.draw(st.integers(0, 255).filter(lambda byte: byte != lines[number][place]))
    lines[number] = lines[number][:place] + bytes([turned]) + lines[number][place + 1 :]
    file.write_bytes(b"".join(lines))
    with pytest.raises(JournalError) as caught:
        read_journal(file)
    assert str(caught.value).startswith(f"{file}:{number + 1}: ")


def test_every_bit_that_flips_in_a_line_is_noticed() -> None:
    """Also in the field that holds the checksum, and in the journal's format."""
    for record in (began(), stepped(3, 1.5, arrivals=(arrival(),))):
        line = lines_of([record], before=7)[:-1]
        for bit in range(8 * len(line)):
            flipped = bytearray(line)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises(ValueError):
                record_from(bytes(flipped), before=7)


def test_a_line_without_a_checksum_is_refused(file: Path) -> None:
    sealed = lines_of(RECORDS).splitlines(keepends=True)
    for number, line in enumerate(sealed):
        without = line[: line.rindex(b',"crc"')] + b"}\n"
        file.write_bytes(b"".join([*sealed[:number], without, *sealed[number + 1 :]]))
        with pytest.raises(JournalError, match=rf"jsonl:{number + 1}: the line is not as it was written"):
            read_journal(file)
        file.write_bytes(b"".join([*sealed[:number], without]))
        with pytest.raises(JournalError, match=r"cannot write the journal .* after its last line: the line is not"):
            JournalWriter(file, append=True)


def test_a_line_that_is_gone_doubled_or_moved_is_refused_with_the_line_where_it_shows(file: Path) -> None:
    """Every line, to every place; only the end may be missing, as a kill leaves it."""
    write(file, RECORDS[:3])
    write(file, [*RECORDS[3:], Checkpointed(at_seconds=3.0, version=1)], append=True)  # by another writer
    lines = file.read_bytes().splitlines(keepends=True)
    whole = read_journal(file).records
    for number in range(len(lines)):
        rest = lines[:number] + lines[number + 1 :]
        edits = [(rest, number)] if number < len(rest) else []
        edits += [([*lines[:place], lines[number], *lines[place:]], place) for place in range(len(lines) + 1)]
        edits += [
            ([*rest[:place], lines[number], *rest[place:]], min(number, place))
            for place in range(len(lines))
            if place != number
        ]
        for edited, first in edits:
            file.write_bytes(b"".join(edited))
            shows = next(n for n, line in enumerate(edited) if n == len(lines) or line != lines[n])
            assert shows >= first
            with pytest.raises(JournalError, match=rf"jsonl:{shows + 1}: "):
                read_journal(file)
    file.write_bytes(b"".join(lines[:-1]))
    assert read_journal(file).records == whole[:-1]


def test_a_journal_that_is_followed_tells_of_an_edit_as_one_that_is_read(file: Path) -> None:
    lines = lines_of(RECORDS).splitlines(keepends=True)
    run = FollowedRun(file.parent)
    for number in range(3):
        file.write_bytes(b"".join(lines[: number + 1]))
        run.look()
    assert run.problems == []
    with file.open("ab") as journal:
        journal.write(lines[2])
    run.look()
    (problem,) = run.problems
    assert problem.startswith("trace.jsonl:4: the line is not as it was written, or a line before it is missing")


def with_line(records: list[JournalRecord], number: int, body: bytes) -> bytes:
    """Return the lines of records with another one at a place, all with checksums that fit."""
    head = lines_of(records[:number])
    whole = checksum_of(head)
    line = with_checksum(body[:-1] if body.endswith(b"}") else body, whole)
    return head + line + lines_of(records[number:], checksum_of(line))


def test_bytes_that_are_no_text_are_refused(file: Path) -> None:
    file.write_bytes(with_line([began()], 1, b'{"kind":"\xff"}'))
    with pytest.raises(JournalError, match=r"jsonl:2: not UTF-8 text \(byte 9\)"):
        read_journal(file)


def test_a_journal_begins_with_its_run(file: Path) -> None:
    file.write_bytes(lines_of([RECORDS[1], began()]))
    with pytest.raises(JournalError, match=r"jsonl:1: a journal begins with run_began"):
        read_journal(file)


def test_another_format_is_refused_before_its_fields_are(file: Path) -> None:
    file.write_bytes(checked_line({"kind": "run_began", "format": 2, "unheard_of": 1}))
    with pytest.raises(JournalError, match=r"jsonl:1: format 2 is not known \(known: 3\); read it with the paceline"):
        read_journal(file)


@pytest.mark.parametrize("end", [b"\n", b""], ids=["whole", "torn"])
def test_a_line_too_long_is_refused_without_being_read(file: Path, monkeypatch: pytest.MonkeyPatch, end: bytes) -> None:
    monkeypatch.setattr(journal_files, "LONGEST_LINE_BYTES", 1000)
    file.write_bytes(lines_of([began()]) + b"x" * 1000 + end + b"x" * (not end))
    with pytest.raises(JournalError, match=r"jsonl:2: a line is at most 1,000 bytes"):
        read_journal(file)


def test_no_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"^cannot read the journal .*none\.jsonl: No such file or directory$"):
        read_journal(tmp_path / "none.jsonl")
    with pytest.raises(JournalError, match=r"^cannot read the journal .*: it is a folder, not a plain file$"):
        read_journal(tmp_path)
    with pytest.raises(JournalError, match=r"^cannot write the journal .*: Is a directory$"):
        JournalWriter(tmp_path)


# -- processes that die -------------------------------------------------------------------------------------------

WRITES_FOR_EVER = """
import os, sys
from itertools import count
from paceline.traces.journal_files import JournalWriter
from tests.traces.test_journal_records import arrival, began, stepped
noted = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
journal = JournalWriter(sys.argv[1])
journal.write(began())
for version in count():
    journal.write(stepped(version, arrivals=tuple(arrival(worker, version) for worker in range(50))))
    os.pwrite(noted, version.to_bytes(8, "big"), 0)
"""


def test_a_killed_process_loses_at_most_the_line_it_was_writing(file: Path, tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    process = subprocess.Popen([sys.executable, "-c", WRITES_FOR_EVER, file, noted], cwd=Path(__file__).parents[2])
    try:
        written = "300 kB are written"
        until(lambda: file.exists() and file.stat().st_size > 300_000, written, every_seconds=0.005, process=process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    versions = [record.version for record in read_journal(file).records[1:]]  # type: ignore[union-attr]
    last_noted = int.from_bytes(noted.read_bytes(), "big")
    assert versions == list(range(len(versions)))
    assert last_noted <= versions[-1] <= last_noted + 1
    write(file, [stepped(len(versions))], append=True)
    assert len(read_journal(file).records) == len(versions) + 2


# -- disks that are full ------------------------------------------------------------------------------------------


@settings(
    deadline=None, max_examples=100, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(room=st.lists(st.none() | st.just(0) | st.integers(1, 60), min_size=9, max_size=40), mends=st.booleans())
def test_whatever_the_disk_does_the_file_holds_whole_lines_and_the_rest_is_counted(
    file: Path, room: list[int | None], mends: bool
) -> None:
    """Each write takes `room` bytes and then fails, or all of it where there is None; cutting may fail once too."""
    file.unlink(missing_ok=True)
    rooms, cuts = iter(room), iter([mends])
    real_write, real_cut = os.write, os.ftruncate

    def short_write(descriptor: int, data: bytes) -> int:
        taken = next(rooms, None)
        if taken is None:
            return real_write(descriptor, data)
        if taken == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, data[:taken])

    def failing_cut(descriptor: int, size: int) -> None:
        if not next(cuts, True):
            raise OSError(errno.EIO, "Input/output error")
        real_cut(descriptor, size)

    kept = []
    with pytest.MonkeyPatch.context() as patch, JournalWriter(file) as writer:
        patch.setattr(journal_files.os, "write", short_write)
        patch.setattr(journal_files.os, "ftruncate", failing_cut)
        for record in RECORDS:
            lost = writer.lost
            writer.write(record)
            kept += [record] if writer.lost <= lost else []
        for _ in range(len(room)):
            writer.write(RECORDS[-1])
    if began() not in kept:
        kept.insert(0, began())
    found = read_journal(file)
    assert not found.torn
    written = [record for record in found.records if not isinstance(record, RecordsLost)]
    assert written[: len(kept)] == kept
    assert len(written) + writer.lost == len(RECORDS) + len(room)
    assert sum(record.records for record in found.records if isinstance(record, RecordsLost)) == writer.lost
    assert (writer.error is None) >= (0 not in room)


def test_a_device_that_is_always_full_ends_nothing() -> None:
    writer = write(Path("/dev/full"), RECORDS)
    assert writer.lost == len(RECORDS)
    assert writer.error == "cannot write the journal /dev/full: No space left on device"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a tiny tmpfs to fill it")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tiny tmpfs here to fill: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_and_is_freed(tiny_disk: Path) -> None:
    ballast, file = tiny_disk / "ballast", tiny_disk / "trace.jsonl"
    ballast.write_bytes(b"x" * 16_384)
    step = stepped(arrivals=tuple(arrival(worker) for worker in range(20)))
    with JournalWriter(file) as writer:
        writer.write(began())
        for version in range(50):
            writer.write(replace(step, version=version))
        full = read_journal(file)
        assert 1 < len(full.records) < 51
        assert not full.torn
        assert writer.lost == 51 - len(full.records)
        assert writer.error == f"cannot write the journal {file}: No space left on device"
        ballast.unlink()
        lost = writer.lost
        writer.write(RECORDS[-1])
    assert writer.lost == lost
    hole = RecordsLost(records=lost, reason="No space left on device")
    assert read_journal(file).records == (*full.records, hole, RECORDS[-1])


def test_steps_that_have_changed_places_are_refused_though_checksums_fit(file: Path) -> None:
    steps = [stepped(version, float(version)) for version in range(4)]
    back = Resumed(at_seconds=1.0, version=1, reason="")
    write(file, [began(), *steps, back, *steps[1:]])
    assert len(read_journal(file).records) == 9, "a run that went back to a checkpoint"
    for wrong in ([steps[0], steps[0]], [steps[1], steps[0]], [*steps, back, steps[0]]):
        file.unlink()
        write(file, [began(), *wrong])
        with pytest.raises(JournalError, match="step 0 comes after step"):
            read_journal(file)


def test_a_record_too_long_to_read_is_lost_and_said(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_files, "LONGEST_LINE_BYTES", 1000)
    long = stepped(arrivals=(arrival(),) * 50)
    writer = write(file, [began(), long, RECORDS[-1]])
    assert writer.lost == 1
    assert "(at most 1,000)" in str(writer.error)
    began_record, hole, last = read_journal(file).records
    assert (began_record, last) == (began(), RECORDS[-1])
    assert isinstance(hole, RecordsLost)
    size = len(lines_of([long]))
    assert (hole.records, hole.reason) == (1, f"a record of {size:,} bytes (at most 1,000)")


def test_a_hole_that_nothing_follows_is_said_when_the_file_is_closed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = os.write
    with JournalWriter(file) as writer:
        writer.write(began())
        monkeypatch.setattr(journal_files.os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        for record in RECORDS[1:]:
            writer.write(record)
        monkeypatch.setattr(journal_files.os, "write", real_write)
    assert read_journal(file).records == (began(), RecordsLost(records=len(RECORDS) - 1, reason="broken"))


def test_a_beginning_that_was_lost_is_made_up_for(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its first line a journal is unreadable, and without Resumed it would count void records."""
    real_write = os.write
    again = Resumed(at_seconds=3.0, version=0, reason="restarted")
    with JournalWriter(file) as writer:
        monkeypatch.setattr(journal_files.os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        for record in (began(), RECORDS[1], again):
            writer.write(record)
        assert writer.lost == 3
        monkeypatch.setattr(journal_files.os, "write", real_write)
        writer.write(RECORDS[-1])
    assert writer.lost == 1
    assert read_journal(file).records == (began(), again, RecordsLost(records=1, reason="broken"), RECORDS[-1])


def test_after_closing_nothing_is_written(file: Path) -> None:
    writer = write(file, RECORDS)
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.write(RECORDS[0])


def test_a_new_journal_makes_its_folder_and_never_replaces_an_old_one(tmp_path: Path) -> None:
    file = tmp_path / "runs" / "1" / "trace.jsonl"
    write(file, RECORDS)
    with pytest.raises(JournalError, match="it holds a run"):
        write(file, RECORDS[:1])
    assert read_journal(file).records == tuple(RECORDS)


# -- what counts --------------------------------------------------------------------------------------------------


def saved(version: int) -> Checkpointed:
    return Checkpointed(at_seconds=0.0, version=version)


def resumed(version: int) -> Resumed:
    return Resumed(at_seconds=0.0, version=version, reason="restarted")


def measured(after: int) -> Evaluated:
    return Evaluated(at_seconds=0.0, round=after, loss=1.0, accuracy=0.5)


JOINED = RECORDS[1]
S = [stepped(version) for version in range(6)]
HISTORIES = {
    "nothing is void": ([began(), S[0], saved(1), S[1]], [began(), S[0], saved(1), S[1]]),
    "after the checkpoint": (
        [began(), S[0], saved(1), S[1], resumed(1), S[1]],
        [began(), S[0], saved(1), resumed(1), S[1]],
    ),
    "twice to the same": (
        [began(), S[0], saved(1), S[1], resumed(1), JOINED, S[1], resumed(1), S[1]],
        [began(), S[0], saved(1), resumed(1), S[1]],
    ),
    "further back": (
        [began(), S[0], saved(1), S[1], saved(2), resumed(2), S[2], resumed(1), S[1]],
        [began(), S[0], saved(1), resumed(1), S[1]],
    ),
    "a void checkpoint is saved again": (
        [began(), saved(0), S[0], saved(1), resumed(0), S[0], saved(1), S[1], resumed(1)],
        [began(), saved(0), resumed(0), S[0], saved(1), resumed(1)],
    ),
    "a checkpoint nobody noted": (
        [began(), JOINED, S[0], S[1], measured(2), JOINED, S[2], resumed(2), S[2]],
        [began(), JOINED, S[0], S[1], measured(2), resumed(2), S[2]],
    ),
    "a checkpoint noted twice": (
        [began(), S[0], saved(1), measured(1), saved(1), S[1], resumed(1)],
        [began(), S[0], saved(1), measured(1), saved(1), resumed(1)],
    ),
    "a checkpoint noted after void steps": (
        [began(), S[0], S[1], S[2], saved(1), S[3], resumed(1), S[1]],
        [began(), S[0], saved(1), resumed(1), S[1]],
    ),
    "from the beginning": ([began(), JOINED, S[0], resumed(0), S[0]], [began(), resumed(0), S[0]]),
}


@pytest.mark.parametrize(("records", "count"), HISTORIES.values(), ids=HISTORIES.keys())
def test_what_a_resumed_server_takes_back_is_void(records: list[JournalRecord], count: list[JournalRecord]) -> None:
    assert effective(records) == tuple(count)
    assert effective(effective(records)) == tuple(count)
