"""`paceline.train` for every kind of strategy: what the command does, in a script."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import paceline
from paceline import Recipe
from paceline.codecs import QSGD
from paceline.codecs.payload import NotFiniteError
from paceline.distributed import RankGoneError
from paceline.recipes.extension import Extension
from paceline.runs.launch import RankError, _portable
from paceline.traces.history import trace_of
from paceline.traces.journal import WorkerJoined
from paceline.traces.journal_files import JournalWriter, read_journal

SMALL = Recipe(rounds=6).with_settings(
    cluster={"workers": 2}, data={"split": "iid"}, strategy={"k": 2}, evaluate_every=3, server={"checkpoint_every": 3}
)
PIPELINE = Recipe(rounds=4).with_strategy("full").with_settings(pipeline={"stages": 2})


def children():
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()


@pytest.fixture(autouse=True)
def _computed(monkeypatch, tmp_path):
    """The process has computed before it forks, as a script that simulates first has: OpenMP has threads by then."""
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    x = torch.ones(512, 512)
    (x @ x).relu_()
    yield
    torch.set_num_threads(before)


def test_ranks_that_average_are_forked_here_and_their_result_comes_back():
    seen, before = [], children()
    trained = paceline.train(SMALL.with_strategy("local-sgd"), on_standing=seen.append)
    assert trained.outcome.finished
    assert trained.folder == Path("runs/train")
    assert trained.result.strategy == "local-sgd"
    assert trained.result.rounds >= 6
    assert trained.result.loss == trained.result.trace.evaluations[-1].loss == seen[-1].loss
    assert torch.isfinite(trained.result.parameters).all()
    assert seen[0].round == 0
    assert seen[-1].round == seen[-1].rounds == 6
    assert children() == before


def test_rounds_on_ranks_come_to_what_their_journal_says_and_go_on(tmp_path):
    recipe = SMALL.with_settings(strategy={"name": "full", "on": "ranks"})
    trained = paceline.train(recipe, out=tmp_path / "run")
    assert trained.result.trace == trace_of(read_journal(tmp_path / "run" / "trace.jsonl"))
    again = paceline.train(recipe, out=tmp_path / "run", resume=True, extension=Extension(rounds=9))
    assert again.result.rounds == 9
    with pytest.raises(ValueError, match="rounds must be at least 9, which are done"):
        paceline.train(recipe, out=tmp_path / "run", resume=True, extension=Extension(rounds=8))
    with pytest.raises(ValueError, match=r"is of another recipe: seed was 0, and is 1 now"):
        paceline.train(recipe.with_settings(seed=1), out=tmp_path / "run", resume=True)


def test_encoded_rounds_go_on_with_what_was_held_back_and_replay_to_the_last_bit(tmp_path):
    """Real ranks against all of them in lockstep in one process, which is what a replay is, through two lives.

    The first life has lost its last checkpoint: three of its rounds are taken again.
    """
    recipe = SMALL.with_settings(
        cluster={"workers": 3},
        strategy={"name": "lgc", "k": 2, "on": "ranks"},
        codec={"name": "one-bit", "plan": "two-step"},
    )
    paceline.train(recipe, out=tmp_path / "run")
    for lost in (tmp_path / "run").glob("rank-*/checkpoint-00000006"):
        shutil.rmtree(lost)
    trained = paceline.train(recipe, out=tmp_path / "run", resume=True, extension=Extension(rounds=9))
    began, trace = read_journal(tmp_path / "run" / "trace.jsonl").began, trained.result.trace
    assert (began.codec, began.recipe["codec"]["plan"]) == ("one-bit error-feedback", "two-step")
    verdict = paceline.replay(tmp_path / "run")
    assert verdict.identical, verdict
    assert (verdict.steps, verdict.redone) == (12, 3)
    bits = 8 * trace.sent_bytes / 9  # of all three ranks, each shard to two others, and its sum to two others
    assert bits == pytest.approx(2 * 2 * trained.result.parameters.numel(), rel=0.2)


def test_the_part_of_every_rank_is_encoded_again_with_as_many_threads_as_the_rank_had(tmp_path, monkeypatch):
    recipe = SMALL.with_settings(
        strategy={"name": "full", "on": "ranks"}, codec={"name": "qsgd", "plan": "gather"}, rounds=2
    )
    paceline.train(recipe, out=tmp_path / "run")
    trace = tmp_path / "run" / "trace.jsonl"
    records = read_journal(trace).records
    trace.unlink()
    writer = JournalWriter(trace)
    for record in records:
        writer.write(replace(record, threads=1 + record.worker) if isinstance(record, WorkerJoined) else record)
    writer.close()
    found = set()

    def encode(codec, gradient, generator=None):
        found.add(torch.get_num_threads())
        return plainly(codec, gradient, generator)

    plainly = QSGD.encode
    monkeypatch.setattr(QSGD, "encode", encode)
    paceline.replay(tmp_path / "run")
    assert found == {1, 2}


@pytest.mark.parametrize("codec", ["power-sgd", "bfloat16"])
def test_rounds_that_a_ring_adds_up_encoded_replay_to_the_last_bit(tmp_path, codec):
    """The order of the sum is gloo's own from three ranks on; bfloat16 is rounded at every hop."""
    recipe = SMALL.with_settings(
        cluster={"workers": 3},
        strategy={"name": "lgc", "k": 2, "on": "ranks"},
        codec={"name": codec, "plan": "all-reduce"},
    )
    paceline.train(recipe, out=tmp_path / "run")
    verdict = paceline.replay(tmp_path / "run")
    assert verdict.identical, verdict
    assert verdict.steps == 6


def test_the_stages_of_a_pipeline_are_forked_here(tmp_path):
    plans = []
    trained = paceline.train(PIPELINE, out=tmp_path / "run", on_plan=plans.append)
    assert trained.result.rounds == 4
    assert [plan.stages for plan in plans] == [2]


@pytest.mark.parametrize(
    ("recipe", "options", "because"),
    [
        (SMALL.with_strategy("hpsgd").with_settings(cluster={"workers": 2000}), {}, "2,000 processes are too many"),
        (SMALL.with_strategy("hpsgd").with_settings(data={"split": "non-iid", "classes_per_worker": 3}), {}, "classes"),
        (SMALL.with_strategy("hpsgd"), {"listen": "127.0.0.1:1"}, "--listen is for a parameter server"),
        (PIPELINE.with_strategy("lgc"), {}, "a pipeline takes a step with all gradients"),
        (SMALL.with_strategy("hpsgd"), {"resume": True}, "cannot read .*recipe.json"),
    ],
    ids=["too many", "split", "listen", "pipeline", "nothing to resume"],
)
def test_what_cannot_be_leaves_no_folder_and_no_process(recipe, options, because, tmp_path):
    before = children()
    with pytest.raises(ValueError, match=because):
        paceline.train(recipe, out=tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()
    assert children() == before


def test_an_error_of_rank_0_is_raised_here_as_what_it_is():
    with pytest.raises(NotFiniteError, match="Lower the learning rate") as caught:
        paceline.train(SMALL.with_strategy("ssgd").with_settings(optimizer={"lr": 1e6}))
    assert "_check_headers" in caught.value.__notes__[0]  # where it was raised, for whoever asks


def test_a_callback_that_fails_ends_the_ranks():
    before = children()

    def fail(status):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        paceline.train(SMALL.with_strategy("ssgd"), on_standing=fail)
    assert children() == before


def test_errors_that_cannot_be_copied_keep_their_words():
    class OddError(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} {two}")

    class OddValueError(OddError, ValueError):
        pass

    assert repr(_portable(OddError(1, 2))) == repr(RankError("OddError: 1 2"))
    assert repr(_portable(OddValueError(1, 2))) == repr(ValueError("1 2"))
    assert type(_portable(RankGoneError("rank 1 is gone"))) is RankGoneError


def test_inside_a_launch_it_is_a_rank(tmp_path, monkeypatch):
    recipe = SMALL.with_strategy("local-sgd")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "PACELINE_STORE": str(tmp_path / "store")}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"give --out \(out=\)"):
        paceline.train(recipe)
    with pytest.raises(ValueError, match="run it without torchrun"):
        paceline.train(SMALL)
    trained = paceline.train(recipe, out=tmp_path / "run")
    assert trained.result.trace.workers == 1


def test_folder_is_the_old_name_of_out(tmp_path):
    with (
        pytest.warns(DeprecationWarning, match="folder is called out now"),
        pytest.raises(ValueError, match="cannot read"),
    ):
        paceline.train(SMALL.with_strategy("hpsgd"), folder=tmp_path / "new", resume=True)
