"""`paceline diagnose`: the verdict first, in 80 columns; one JSON document; a page; refusals in one line."""

from __future__ import annotations

import json

import pytest

from paceline.cli.main import main
from paceline.traces.trace_files import write_traces
from tests.diagnosis.recordings import Delay, served, watched
from tests.reports.race_traces import race


def test_the_verdict_comes_first_and_everything_fits_in_eighty_columns(tmp_path, capsys):
    watched(tmp_path, 4, 60, seed=1, delays=[Delay(rank=2)])
    assert main(["diagnose", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    first = " ".join(printed.out.split("\n\n")[0].split())
    assert first.startswith("Rank 2 is late in 100 % of the steps, by ")
    assert "in its forward pass, since step 0. Without it the run would have taken " in first
    assert max(map(len, printed.out.splitlines())) <= 80
    assert " ".join(printed.err.split()) == (
        f"page: {tmp_path / 'diagnosis.html'} what would help: paceline what-if {tmp_path}"
    )
    page = (tmp_path / "diagnosis.html").read_text(encoding="utf-8")
    assert "<h1>Rank 2 is slow, and costs" in page


def test_one_document_with_the_sentences_and_all_figures(tmp_path, capsys):
    served(tmp_path / "run", 4, 60, seed=1, delays=[Delay(rank=1)])
    assert main(["diagnose", str(tmp_path / "run"), "--json", "--out", str(tmp_path / "page"), "--skip", "10"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["suspects"][0]["members"], found["steps"]) == ("slow", [1], 50)
    assert found["skipped_steps"] == 10
    assert found["verdict"][0].startswith("Worker 1")
    assert (tmp_path / "page" / "diagnosis.html").is_file()
    assert not (tmp_path / "run" / "diagnosis.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not there; give the folder of a run"),
        (["."], "holds no run: it has none of trace.jsonl, traces.json.gz and times"),
        (["run", "--skip", "-1"], "skip must be 0 or more"),
        (["run", "--skip", "600"], "--skip 600 leaves no step of 20: give fewer"),
        ([], "RUN is missing"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    watched(tmp_path / "run", 2, 20, seed=1)
    assert main(["diagnose", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_race_asks_which_run(tmp_path, capsys):
    write_traces(tmp_path, race(workers=4, rounds=20))
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "holds several runs: say which with --strategy (" in capsys.readouterr().err
    assert main(["diagnose", str(tmp_path), "--strategy", "lgc", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["strategy"] == "lgc"


def test_a_report_is_made_of_a_watched_script(tmp_path, capsys):
    watched(tmp_path, 3, 20, seed=1)
    assert main(["report", str(tmp_path)]) == 0
    assert main(["diagnose", str(tmp_path), "--out", str(tmp_path / "other")]) == 0
    assert (tmp_path / "diagnosis.html").read_bytes() == (tmp_path / "other" / "diagnosis.html").read_bytes()
