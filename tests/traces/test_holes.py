"""What a full disk did not take is said wherever the record is read: rounds and records, by one finder."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.analysis.what_if.measured_run import measured_run
from paceline.cli import main
from paceline.diagnosis import diagnose
from paceline.live.folder import FollowedRun
from paceline.live.state import JournalState
from paceline.reports import report_html
from paceline.runs.simulation import Result, as_document
from paceline.traces import journal_files
from paceline.traces.history import trace_of
from paceline.traces.journal import JournalRecord, Resumed, RunBegan, RunEnded, StepRecord
from paceline.traces.journal_files import JournalWriter, read_journal
from paceline.traces.recorded_run import read_run
from paceline.traces.records import summarise
from tests.live.journals import began, journals, step


def written(file: Path, records: Sequence[JournalRecord], lost: Sequence[bool], *, lives: int | None = None) -> None:
    """Write records to a disk that does not take those that are `lost`; the process is killed after `lives` records."""
    real_write, full = os.write, [False]

    def write(descriptor: int, data: bytes) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_files.os, "write", write)
        for first, last in ((0, lives), (lives, None)) if lives is not None else ((0, None),):
            if first == lives and first is not None and first >= len(records):
                break
            writer = JournalWriter(file, append=first != 0)
            for record, full[0] in zip(records[first:last], lost[first:last], strict=True):
                writer.write(record)
            full[0] = first == 0 and lives is not None  # a killed writer says nothing any more
            writer.close()


def rounds_of(sentences: Sequence[str]) -> set[int]:
    """Return the rounds that sentences say are missing."""
    found: set[int] = set()
    for words in sentences:
        numbers = [int(word.replace(",", "")) for word in words.split() if word[0].isdigit()]
        if words.startswith("records of round"):
            found |= set(range(numbers[0], numbers[-1] + 1))
    return found


RUN: list[JournalRecord] = [
    began(rounds=200),
    *(step(version, 1.0 + version, fresh=(0, 1, 2)) for version in range(200)),
    RunEnded(at_seconds=300.0, reason="all rounds are done", rounds_done=200, diverged=False),
]


@pytest.mark.parametrize("lives", [None, 150], ids=["one life", "killed in the hole"])
def test_every_reader_says_which_rounds_are_missing(tmp_path, lives, capsys):
    """111 rounds; the second writer of the killed run knows nothing of them, and the lines around them tell."""
    lost = [68 <= place <= 178 for place in range(len(RUN))]
    back = [] if lives is None else [Resumed(at_seconds=151.0, version=149, reason="restarted")]
    records = [*RUN[:lives], *back, *RUN[lives:]] if lives is not None else RUN
    lost = [*lost[:lives], *([True] if back else []), *lost[lives:]] if lives is not None else lost
    written(tmp_path / "trace.jsonl", records, lost, lives=lives)
    said = "ecords of rounds 68 to 178 are missing"
    run = read_run(tmp_path)
    assert said in "; ".join(run.missing)
    assert said in report_html([run.trace])
    (document,) = as_document(None, [Result(summary=summarise(run.trace), trace=run.trace)])["results"]
    assert said in "; ".join(document["missing"])
    assert said in " ".join(diagnose(run).notes)
    assert said in "; ".join(measured_run(run).notes)
    followed = FollowedRun(tmp_path)
    while followed.look():
        pass
    assert said in "; ".join(followed.document()["problems"])
    assert main(["report", str(tmp_path)]) == 0
    assert said in (tmp_path / "report.html").read_text(encoding="utf-8")
    capsys.readouterr()


@settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_rounds_said_to_be_missing_are_those_that_are_not_in_the_file(tmp_path: Path, data: st.DataObject) -> None:
    """Of any run, with restarts, on a disk that fills up and is freed; the live state says it as the trace does."""
    records = data.draw(journals())
    records = [records[0], *(each for each in records[1:] if not isinstance(each, RunBegan))]
    lost = data.draw(st.lists(st.booleans(), min_size=len(records), max_size=len(records)))
    lost[0] = False
    file = tmp_path / "trace.jsonl"
    file.unlink(missing_ok=True)
    written(file, records, lost)
    journal = read_journal(file)
    version, there = 0, set[int]()
    for record in records:  # what the run has come to
        if isinstance(record, Resumed):
            version = record.version
        version = record.version + 1 if isinstance(record, StepRecord) else version
    known = 0  # what the file has come to
    for record in journal.records:
        if isinstance(record, Resumed):
            there, known = {each for each in there if each < record.version}, record.version
        elif isinstance(record, StepRecord):
            there.add(record.version)
            known = record.version + 1
        elif isinstance(record, RunEnded):
            known = max(known, record.rounds_done)
    if len(trace_of(journal).missing) < 5:
        assert rounds_of(trace_of(journal).missing) == {each + 1 for each in range(known) if each not in there}
    state = JournalState()
    for record in journal.records:
        state.take(record)
    assert tuple(state.missing) == trace_of(journal).missing
    assert bool(any(lost)) >= bool(state.missing), "a whole record has no hole"


def test_a_run_that_lost_nothing_says_nothing(tmp_path):
    written(tmp_path / "trace.jsonl", RUN, [False] * len(RUN))
    run = read_run(tmp_path)
    assert run.missing == ()
    assert "missing" not in json.dumps(as_document(None, [Result(summary=summarise(run.trace), trace=run.trace)]))
