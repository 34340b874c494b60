"""Traces as a file: what was written can be read, whatever its size."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.reports import report_html
from paceline.traces import Round, Trace, Work, trace_files
from paceline.traces.trace_files import read_traces, write_traces


def trace_of(rounds: int, workers: int = 4) -> Trace:
    return Trace(
        strategy="hpsgd",
        seed=0,
        workers=workers,
        recipe={"rounds": rounds},
        rounds_done=rounds,
        seconds=float(rounds),
        clock="real",
        averaged=True,
        used=rounds * workers,
        rounds=tuple(
            Round(version=version, opened_seconds=version, closed_seconds=version + 0.987654321, k=4, used=4, late=0)
            for version in range(rounds)
        ),
        works=tuple(
            Work(
                worker=worker,
                version=version,
                started_seconds=version + 0.123456789 * worker,
                finished_seconds=version + 0.9,
                arrived_seconds=version + 0.987654321,
            )
            for version in range(rounds)
            for worker in range(workers)
        ),
    )


@pytest.mark.parametrize("limit", ["MOST_BYTES", "MOST_FILE_BYTES"])
def test_what_was_written_is_never_too_large_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit) -> None:
    monkeypatch.setattr(trace_files, limit, 40_000 if limit == "MOST_BYTES" else 2_000)
    whole, small = trace_of(300), trace_of(3)
    write_traces(tmp_path, [whole, small])
    found, other = read_traces(tmp_path)
    assert (found.rounds_done, found.used, found.seconds) == (whole.rounds_done, whole.used, whole.seconds)
    kept = len(found.rounds)
    assert 0 < kept < 300
    assert found.rounds == whole.rounds[:kept]
    assert set(found.works) <= set(whole.works[: 4 * kept])
    words = f"the first {kept} of 300 rounds are kept with their times, for the file's size"
    assert found.missing == (words,)
    assert f"he first {kept} of 300 rounds are kept" in report_html([found])
    assert other.rounds_done == 3
    write_traces(tmp_path, [small])
    assert read_traces(tmp_path) == [small]
