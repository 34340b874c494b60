"""A run's folder is deleted, moved or replaced while the run goes on: nothing is lost, and nobody else's is touched."""

from __future__ import annotations

import os
import shutil

import pytest

import paceline
from paceline.drivers.ranks.checkpoints import RankCheckpoints
from paceline.traces.checkpoints import read_newest
from paceline.traces.journal import TRACE, Checkpointed, JournalError, RunEnded, StepRecord
from paceline.traces.journal_files import JournalWriter, read_journal
from tests.drivers.served.test_worker import batches, network, serving
from tests.waiting import until

ROUNDS = 12


def train(tmp_path, after_round, happens, then=lambda: None):
    """Serve and work; `happens` after some rounds, and `then` some rounds later. Return how the server ended."""
    model, source = network(), batches(100)
    with serving(network(), tmp_path, rounds=ROUNDS, checkpoint_every=1000) as (address, ended):
        try:
            with paceline.Worker(address, model, patience_seconds=1.0) as worker:
                while worker.running():
                    if worker.version == after_round:
                        happens()
                    if worker.version == after_round + 3:
                        then()
                    inputs, targets = next(source)
                    for x, y in worker.blocks(inputs, targets):
                        (model(x)[range(len(y)), y] ** 2).mean().backward()
                    worker.send()
        except ConnectionError:  # the server has stopped before its time
            pass
    return ended[0]


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_folder_that_is_gone_is_written_anew_with_all_of_the_trace_and_a_checkpoint_at_once(how, tmp_path):
    run, away = tmp_path / "run", tmp_path / "away"

    def until_resumable():
        until(lambda: read_newest(run)[0], "a checkpoint, long before one is due")

    gone = (lambda: shutil.rmtree(run)) if how == "deleted" else (lambda: run.rename(away))
    outcome = train(tmp_path, 5, gone, until_resumable)
    assert outcome.finished
    assert not outcome.lost
    assert "was deleted or moved: its trace is written anew" in outcome.errors[0]
    records = read_journal(run / TRACE).records
    assert [record.version for record in records if isinstance(record, StepRecord)] == list(range(ROUNDS))
    assert next(record.version for record in records if isinstance(record, Checkpointed)) == 0
    assert isinstance(records[-1], RunEnded)
    assert read_newest(run)[0].version == ROUNDS
    if how == "moved":  # a run of its own, which ends where it was taken away
        kept = read_journal(away / TRACE).records
        assert kept == records[: len(kept)]


def test_a_folder_that_is_another_run_s_is_left_alone_and_the_run_stops(tmp_path):
    run = tmp_path / "run"

    def replaced():
        run.rename(tmp_path / "away")
        run.mkdir()
        (run / TRACE).write_text("another run\n")

    error = train(tmp_path, 5, replaced)
    assert isinstance(error, JournalError)
    assert str(error) == f"{run / TRACE} is another run's now: nothing more of this run is written there"
    assert os.listdir(run) == [TRACE]
    assert (run / TRACE).read_text() == "another run\n"


def test_a_journal_that_cannot_be_written_anew_is_tried_again_with_every_record(tmp_path):
    folder = tmp_path / "run"
    record = Checkpointed(at_seconds=1.0, version=1)
    with JournalWriter(folder / TRACE) as journal:
        journal.write(record)
        shutil.rmtree(folder)
        folder.write_text("a file where the folder was")
        journal.write(record)
        assert "cannot write the journal" in journal.error
        folder.unlink()
        journal.write(record)
    assert journal.rewritten == 1
    assert (folder / TRACE).read_bytes().count(b"\n") == 3


def test_a_rank_s_folder_that_is_gone_is_claimed_again_and_another_launch_s_is_not(tmp_path):
    checkpoints = RankCheckpoints(tmp_path / "run", rank=0)
    checkpoints.claim("ours")
    assert not checkpoints.claim_again("ours")
    shutil.rmtree(tmp_path / "run")
    assert checkpoints.claim_again("ours")
    assert checkpoints.launch == "ours"
    checkpoints.claim("theirs")
    with pytest.raises(ValueError, match="is another run's now"):
        checkpoints.claim_again("ours")
