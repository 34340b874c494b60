"""The commands of a real cluster: what is typed wrongly is told in one line, and a small run ends in a table."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.recipes import Recipe
from paceline.runs import cluster
from paceline.traces.journal import StepRecord, lines_of
from paceline.traces.journal_files import read_journal
from tests import warm

GOLDEN = Path(__file__).parents[1] / "golden"
ERRORS = {
    "a server open to strangers": (["serve", "--listen", "0.0.0.0:0"], ["0.0.0.0", "--tls", "--insecure"]),
    "an address without a port": (["serve", "--listen", "localhost"], ["localhost", "HOST:PORT"]),
    "a worker without a server": (["work"], ["HOST:PORT"]),
    "a worker at no address": (["work", "nowhere"], ["nowhere", "HOST:PORT"]),
    "keys that are not there": (["work", "127.0.0.1:1", "--tls", "none/worker"], ["none/worker"]),
    "an option of another command": (["work", "127.0.0.1:1", "--rounds", "3"], ["unknown option --rounds"]),
    "a resume of nothing": (
        ["train", "--resume", "no/such/run"],
        ["no/such/run is not there; give the folder of a run"],
    ),
    "a resume with another recipe": (["train", "--resume", "x", "--k", "3"], ["--resume", "own recipe"]),
    "a replay of nothing": (["replay", "no/such/run"], ["no/such/run"]),
    "a codec that is not there": (["train", "--codec", "bfloat"], ["bfloat", "bfloat16"]),
    "too few seats": (["train", "--server.most-workers", "3"], ["most_workers=3", "workers=10"]),
    "a host that is none": (["keys", "KEYS", "--hosts", "a b"], ["a b"]),
    "no days": (["keys", "KEYS", "--days", "0"], ["days"]),
}


@pytest.mark.parametrize(("arguments", "parts"), ERRORS.values(), ids=ERRORS.keys())
def test_a_mistake_is_told_in_one_line(arguments, parts, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    for part in parts:
        assert part in err
    assert not list(tmp_path.rglob("*.key"))


def test_keys_are_made_once_and_kept(tmp_path, capsys):
    assert main(["keys", str(tmp_path / "keys"), "--hosts", "ps.example.org,10.0.0.1"]) == 0
    assert "made" in capsys.readouterr().err
    before = {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()}
    assert main(["keys", str(tmp_path / "keys")]) == 0
    assert "kept" in capsys.readouterr().err
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()}


def test_keys_made_and_kept_are_one_document(tmp_path, capsys):
    assert main(["keys", str(tmp_path / "keys"), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert sorted(map(str, (tmp_path / "keys").iterdir())) == sorted(made["made"])
    assert main(["keys", str(tmp_path / "keys"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"made": [], "kept": made["made"]}


def test_a_worker_s_work_ends_in_one_document(tmp_path, capsys, monkeypatch):
    def work_for(address, options, *, on_welcome, **_):
        on_welcome(3, Recipe())

    monkeypatch.setattr(cluster, "work_for", work_for)
    assert main(["work", "127.0.0.1:1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"address": "127.0.0.1:1", "worker": 3, "recipe": Recipe().to_document()}


def run(*arguments, cwd, run=warm.run):
    environment = os.environ | {"COLUMNS": "80"}
    return run(
        [sys.executable, "-m", "paceline", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_train_ends_in_a_table_a_page_and_a_run_that_replays_unless_its_trace_was_altered(tmp_path):
    small = ["--workers", "2", "--k", "1", "--classes-per-worker", "5", "--rounds", "12"]
    first = run("train", *small, cwd=tmp_path, run=subprocess.run)  # the server and its workers start from nothing
    assert first.returncode == 0, first.stderr
    assert "lgc" in first.stdout
    assert "real cluster" in first.stdout
    assert max(map(len, first.stdout.splitlines())) <= 80
    for file in ("report.html", "results.json", "trace.jsonl", "checkpoint-00000012/manifest.json"):
        assert (tmp_path / "runs" / "train" / file).exists(), file
    again = run("replay", "runs/train", "--json", cwd=tmp_path)
    assert json.loads(again.stdout) == {
        "identical": True,
        "steps": 12,
        "redone": 0,
        "nearly": None,
        "difference": None,
        "checkpoint": 12,
        "missing": None,
    }

    taken = run("train", *small, "--out", "runs/train", cwd=tmp_path)
    assert taken.returncode == 2
    assert "holds a run" in taken.stderr

    trace = tmp_path / "runs" / "train" / "trace.jsonl"
    records = list(read_journal(trace).records)
    number = [number for number, record in enumerate(records) if isinstance(record, StepRecord)][3]
    records[number] = replace(records[number], fingerprint=records[number].fingerprint + 1)
    trace.write_bytes(lines_of(records))
    told = run("replay", "runs/train", cwd=tmp_path)
    assert told.returncode == 1
    assert "step 3: the weights after it are not the same" in told.stderr


def test_the_results_of_a_finished_run_are_printed_again(tmp_path, capsys):
    run = shutil.copytree(GOLDEN / "served", tmp_path / "run")
    before = sorted(path.name for path in run.iterdir())
    assert main(["train", "--resume", str(run), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert "is finished: all 54 rounds are done" in told.err
    assert sorted(path.name for path in run.iterdir()) == before
    (run / "results.json").unlink()
    assert main(["train", "--resume", str(run), "--json"]) == 2
    assert "has no results.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--delay", "pareto"], True),
        (["--delay.shape", "3"], True),
        (["--delay", "pareto", "--inject-delays"], False),
        (["--rounds", "3"], False),
    ],
)
@pytest.mark.parametrize("command", ["train", "serve"])
def test_delays_that_a_real_run_leaves_out_are_named(command, typed, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    where = ["--listen", "127.0.0.1:0"] if command == "serve" else []  # the usual port may be somebody else's
    assert main([command, *typed, *where, "--model", "no_such_module:net"]) == 2
    assert (
        "is ignored: a real run has delays of a recipe only with --inject-delays" in capsys.readouterr().err
    ) == said
