"""What `paceline replay` says of a run: exactly what it compared, and what it could not."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import shutil
import subprocess

import pytest

import paceline
from paceline.cli import main
from paceline.recipes import Recipe
from paceline.traces.checkpoints import read_newest, write_checkpoint
from paceline.traces.journal import StepRecord, lines_of
from paceline.traces.journal_files import JournalWriter, read_journal
from tests import warm

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("replay verdict")]  # one run for all of them

RECIPE = Recipe(rounds=6).with_settings(
    cluster={"workers": 2}, strategy={"k": 1}, data={"split": "iid"}, server={"checkpoint_every": 4}
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of 6 rounds on real workers, with checkpoint 6, and 4 (or 0, if that was still being written then)."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", warm.Popen)  # starts the workers
        assert paceline.train(RECIPE, out=folder).outcome.finished
    return folder


@pytest.fixture
def run(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path / "run")


def without_last_checkpoint(run):
    """Remove checkpoint 6, and return the number of the one before."""
    shutil.rmtree(run / "checkpoint-00000006")
    (earlier,) = run.glob("checkpoint-*")
    return int(earlier.name[-8:])


def cut_after(run, steps, *, keeping=lambda record: False):
    """Cut the trace after so many steps, but for the records that are kept."""
    trace, kept, taken = run / "trace.jsonl", [], 0
    for record in read_journal(trace).records:
        taken += isinstance(record, StepRecord)
        if taken < steps or (taken == steps and isinstance(record, StepRecord)) or keeping(record):
            kept.append(record)
    trace.write_bytes(lines_of(kept))


def replayed(run, capsys):
    """Return the exit code, what is said on stdout and on stderr, and the JSON document."""
    code = main(["replay", str(run)])
    out, err = capsys.readouterr()
    assert main(["replay", str(run), "--json"]) == code
    return code, out, " ".join(err.split()), json.loads(capsys.readouterr().out)


def test_a_whole_run_is_compared_whole(run, capsys):
    code, out, _, document = replayed(run, capsys)
    assert code == 0
    assert out == "identical: 6 steps, and the weights of checkpoint 6 to the last bit\n"
    assert document == {
        "identical": True,
        "steps": 6,
        "difference": None,
        "checkpoint": 6,
        "redone": 0,
        "nearly": None,
        "missing": None,
    }


def test_a_trace_that_ends_before_the_checkpoint_is_no_proof_of_it(run, capsys):
    cut_after(run, 2)
    code, out, err, document = replayed(run, capsys)
    assert code == 1
    assert out == "identical: 2 steps by their fingerprints, and no weights\n"
    missing = "the trace ends after step 2; checkpoint 6 was not compared"
    assert err.endswith(f"not the whole run: {missing}")
    found = {"identical": False, "steps": 2, "difference": None, "checkpoint": None, "missing": missing}
    assert document == found | {"redone": 0, "nearly": None}


def test_a_replay_ends_where_a_full_disk_left_a_hole_and_says_what_is_missing(run, capsys, monkeypatch):
    """Rounds 3 to 5: what comes after them follows from what nobody knows."""
    trace = run / "trace.jsonl"
    records = read_journal(trace).records
    trace.unlink()
    with JournalWriter(trace) as journal:
        for record in records:
            version = record.version if isinstance(record, StepRecord) else None
            with monkeypatch.context() as patch:
                if version in (2, 3, 4):
                    patch.setattr("paceline.traces.journal_files.os.write", full_disk)
                journal.write(record)
    code, out, err, document = replayed(run, capsys)
    missing = "records of rounds 3 to 5 are missing, and nothing after them was replayed"
    assert (code, document["steps"], document["difference"], document["missing"]) == (1, 2, None, missing)
    assert out == "identical: 2 steps by their fingerprints, and no weights\n"
    assert err.endswith(f"not the whole run: {missing}")


def full_disk(*given):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_first_line_alone_proves_nothing(run, capsys):
    trace = run / "trace.jsonl"
    trace.write_bytes(trace.read_bytes().splitlines(keepends=True)[0])
    code, out, err, document = replayed(run, capsys)
    assert (code, document["identical"], document["steps"]) == (1, False, 0)
    assert "the trace ends after step 0; checkpoint 6 was not compared" in err
    assert out.startswith("identical: 0 steps by their fingerprints, and no weights")


def test_a_run_that_was_killed_is_compared_with_its_checkpoint_on_the_way(run, capsys):
    cut_after(run, 5)
    earlier = without_last_checkpoint(run)
    code, out, err, document = replayed(run, capsys)
    assert code == 1
    assert out == f"identical: 5 steps, and the weights of checkpoint {earlier} to the last bit\n"
    assert "the trace ends after step 5 without the run's end" in err
    assert (document["identical"], document["checkpoint"], document["difference"]) == (False, earlier, None)


def test_a_checkpoint_that_is_passed_on_the_way_must_be_the_runs(run, capsys):
    cut_after(run, 5)
    earlier = without_last_checkpoint(run)
    checkpoint, _ = read_newest(run)
    checkpoint.tensors["parameters"][0] += 1
    shutil.rmtree(run / f"checkpoint-{earlier:08d}")
    write_checkpoint(run, checkpoint)
    code, _, err, document = replayed(run, capsys)
    assert code == 1
    assert f"not identical: the parameters after step {earlier} are not those of its checkpoint" in err
    assert not document["identical"]


def test_a_run_without_its_last_checkpoint_or_its_last_steps_is_not_whole(run, capsys):
    earlier = without_last_checkpoint(run)
    code, out, err, _ = replayed(run, capsys)
    assert code == 1
    assert out == f"identical: 6 steps, and the weights of checkpoint {earlier} to the last bit\n"
    assert err.endswith("there is no whole checkpoint of the last step, 6")
    shutil.rmtree(run / f"checkpoint-{earlier:08d}")
    code, _, err, _ = replayed(run, capsys)
    assert code == 1
    assert err.endswith("there is no whole checkpoint to compare with")
    cut_after(run, 5, keeping=lambda record: type(record).__name__ == "RunEnded")
    code, _, err, _ = replayed(run, capsys)
    assert code == 1
    assert err.endswith("records of round 6 are missing, and nothing after them was replayed")


def test_a_line_that_was_taken_out_of_the_trace_is_told_by_the_line_where_it_shows(run, capsys):
    """Sealed again, so that the file looks whole."""
    records = read_journal(run / "trace.jsonl").records
    kinds = [type(record).__name__ for record in records]
    removed = kinds.index("WorkerJoined")
    (run / "trace.jsonl").write_bytes(lines_of(records[:removed] + records[removed + 1 :]))
    assert main(["replay", str(run)]) != 0
    told = capsys.readouterr().err
    (line,) = map(int, re.findall(r"line (\d+) of the trace", told))
    assert removed < line <= len(records), told
    removed = kinds.index("StepRecord")
    (run / "trace.jsonl").write_bytes(lines_of(records[:removed] + records[removed + 1 :]))
    assert main(["replay", str(run)]) != 0
    assert "records of round 1 are missing" in " ".join(capsys.readouterr().err.split())


def test_a_run_that_is_over_asks_for_nothing_when_it_is_resumed(run, capsys):
    trace = run / "trace.jsonl"
    began, *rest = read_journal(trace).records
    own = {**began.recipe, "model": {**began.recipe["model"], "name": "my_models:net"}}
    trace.write_bytes(lines_of([dataclasses.replace(began, recipe=own), *rest]))
    assert main(["train", "--resume", str(run)]) == 0
    assert "is finished: all 6 rounds are done" in capsys.readouterr().err
    assert main(["train", "--resume", str(run), "--rounds", "9"]) != 0
    assert "--model my_models:net" in capsys.readouterr().err
