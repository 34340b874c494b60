"""`paceline train --on ranks`: rounds without a server, in real processes; and their journal, replayed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch

import paceline
from paceline.cli.main import main
from paceline.drivers.ranks.launch import Place
from paceline.drivers.replayed import Replay
from paceline.recipes.assembly import load_data, make_strategy, make_training
from paceline.runs.cluster import WorkerOptions
from paceline.runs.ranks import train_rank
from paceline.traces.history import trace_of
from paceline.traces.journal import (
    TRACE,
    Checkpointed,
    Evaluated,
    Extended,
    Resumed,
    RunBegan,
    RunEnded,
    StepRecord,
    lines_of,
)
from paceline.traces.journal_files import read_journal
from paceline.traces.step_times import read_all_times
from tests.cluster.test_ranks import NAMED_WITHIN_SECONDS, ended, ranks_of, said, started, wait_for_checkpoints

NETWORK = """
from torch import nn

def net(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, classes))
"""
SMALL = """
rounds = 14
evaluate_every = 5
[data]
name = "synthetic"
samples = 160
classes = 4
channels = 1
size = 4
split = "iid"
[model]
name = "nets:net"
[worker]
batch_size = 8
[optimizer]
name = "lars"
[cluster]
workers = 4
[delay]
shift_seconds = 0.02
mean_seconds = 0.01
persistence = 2
inject = true
[strategy]
name = "lgc"
k = 3
on = "ranks"
[pruning]
name = "info-batch"
[server]
checkpoint_every = 6
"""
LONG = """
rounds = 40
evaluate_every = 10
[data]
split = "iid"
[cluster]
workers = 2
[delay]
shift_seconds = 0.02
mean_seconds = 0.01
inject = true
[strategy]
name = "{name}"
k = 1
on = "ranks"
[server]
checkpoint_every = 8
silence_seconds = 4
"""
ROUNDING = 1e-4  # of the weights' length


def apart(found, expected):
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))


def records_of(folder, kind):
    return [record for record in read_journal(folder / TRACE).records if isinstance(record, kind)]


# -- one run, looked at from several sides -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four ranks with BatchNorm, LARS, late gradients and pruned samples, to its end."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "nets.py").write_text(NETWORK)
    (folder / "small.toml").write_text(SMALL)
    run = started("paceline", "train", "small.toml", "--trust", "--out", "run", tmp_path=folder)
    try:
        assert ended(run, folder) == 0, said(folder)
    finally:
        run.kill()
    return folder / "run"


@pytest.fixture
def ran(finished, tmp_path, monkeypatch):
    """A copy of the run, to be read where its network can be imported."""
    monkeypatch.syspath_prepend(finished.parent)
    return shutil.copytree(finished, tmp_path / "run")


OWN_NETWORK = WorkerOptions(model="nets:net")


def test_a_run_of_four_ranks_is_replayed_to_the_last_bit(ran):
    pruned = []
    verdict = paceline.replay(ran, OWN_NETWORK, on_end=lambda batches, *_: pruned.append(batches.pruned.sat_out))
    assert verdict.identical, verdict
    assert (verdict.steps, verdict.checkpoint) == (14, 14)
    assert pruned[0] > 0
    assert any(step.late for step in records_of(ran, StepRecord))


def test_every_gradient_of_the_journal_is_a_step_of_its_rank_whose_times_say_the_injected_delay(ran):
    times = read_all_times(ran)["rank"]
    arrivals = {(a.worker, a.draw): a for record in records_of(ran, StepRecord) for a in record.arrivals}
    steps = {(rank, step.step): step for rank, found in times.items() for step in found.steps}
    assert arrivals.keys() <= steps.keys()
    for key, arrival in arrivals.items():
        step = steps[key]
        assert step.version == arrival.version
        assert step.computing_seconds + step.wait_seconds <= step.seconds + 5e-6
        assert step.forward_seconds > 0
        if arrival.blocks_done == arrival.blocks:
            assert step.forward_seconds + step.backward_seconds >= 0.02 - 1e-5  # the least of the recipe's delays
    assert all(found.ended.reason == "all rounds are done" for found in times.values())
    assert any(step.buckets for step in steps.values())


def test_its_journal_table_and_page_are_those_of_any_run(ran):
    began = read_journal(ran / TRACE).began
    assert (began.on, began.torch, began.strategy) == ("ranks", torch.__version__, "lgc@ranks")
    assert {0, 14} <= {record.round for record in records_of(ran, Evaluated)} <= {0, 5, 10, 14}
    assert [record.version for record in records_of(ran, Checkpointed)] == [6, 12, 14]
    (result,) = json.loads((ran / "results.json").read_text())["results"]
    assert (result["strategy"], result["rounds"], result["used"]) == ("lgc@ranks", 14, 14 * 3)
    assert "lgc@ranks" in (ran / "report.html").read_text()


class UnmarkedReplay(Replay):
    """A server's replay that compares the decisions, and not the bits of the weights."""

    def _compare(self, record):
        pass


def test_a_server_that_is_told_the_same_decides_the_same_and_comes_to_the_same_weights(ran):
    journal = read_journal(ran / TRACE)
    recipe = paceline.Recipe.from_document(journal.began.recipe)
    training = make_training(recipe, load_data(recipe))
    server = UnmarkedReplay(journal.records, training, make_strategy(recipe), snapshot_version=14)
    assert list(server) == list(range(1, 15))
    assert server.verdict.difference is None
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in saved_model(ran, training).parameters()])
    assert 0 < apart(server.snapshot["parameters"], weights) < ROUNDING


def saved_model(folder, training):
    from paceline.drivers.ranks.checkpoints import RankCheckpoints

    checkpoints = RankCheckpoints(folder, rank=0)
    training.module.load_state_dict(checkpoints.read(checkpoints.held()[0])["model"])
    return training.module


def rewrite(folder, change):
    journal = read_journal(folder / TRACE)
    (folder / TRACE).write_bytes(lines_of(map(change, journal.records)))


def test_other_bits_under_another_torch_are_said_to_be_of_another_torch(ran, capsys, monkeypatch):
    command = ["replay", str(ran), "--model", "nets:net"]

    def recorded_elsewhere(record):
        if isinstance(record, StepRecord) and record.version == 9:
            return replace(record, fingerprint=record.fingerprint + 1)
        return record

    rewrite(ran, recorded_elsewhere)
    assert main(command) == 1
    assert "step 9: the weights after it are not the same" in capsys.readouterr().err
    monkeypatch.setattr("torch.__version__", "99.0")
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "the same 14 steps" in out
    assert "differ by 0.0e+00 of their length" in out
    assert "and this is 99.0" in out


def test_a_journal_that_is_of_other_ranks_is_refused_in_one_line(ran, capsys):
    rewrite(ran, lambda record: replace(record, workers=3) if isinstance(record, RunBegan) else record)
    assert main(["replay", str(ran), "--model", "nets:net"]) == 2
    assert "the trace is of 3 ranks, and its recipe of 4" in capsys.readouterr().err


# -- deaths ------------------------------------------------------------------------------------------------------------


def test_a_run_of_full_that_was_killed_is_resumed_and_extended_and_comes_to_what_a_server_does(tmp_path):
    (tmp_path / "full.toml").write_text(LONG.format(name="full"))
    folder = tmp_path / "run"
    run = started("paceline", "train", "full.toml", "--trust", "--out", folder, tmp_path=tmp_path)
    try:
        wait_for_checkpoints(run, folder, tmp_path)
        os.kill(ranks_of(run)[1], signal.SIGKILL)
        assert ended(run, tmp_path, within=NAMED_WITHIN_SECONDS) == 1
    finally:
        run.kill()
    assert "rank 1 is gone" in said(tmp_path)
    assert f"paceline train --resume {folder}" in said(tmp_path)
    again = started("paceline", "train", "--resume", folder, "--rounds", "46", tmp_path=tmp_path)
    try:
        assert ended(again, tmp_path) == 0, said(tmp_path)
    finally:
        again.kill()
    assert [record.rounds for record in records_of(folder, Extended)] == [46]
    assert records_of(folder, RunEnded)[-1].rounds_done == 46
    assert paceline.replay(folder).identical
    recipe = paceline.Recipe.load(tmp_path / "full.toml", trust=True).with_settings(
        rounds=46, strategy={"on": "server"}
    )
    training = make_training(recipe, load_data(recipe))
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in saved_model(folder, training).parameters()])
    assert apart(weights, paceline.simulate(recipe).parameters) < ROUNDING


def test_torchrun_starts_the_ranks_again_and_they_go_on_with_their_late_gradients(tmp_path, capsys):
    (tmp_path / "lgc.toml").write_text(LONG.format(name="lgc"))
    folder = tmp_path / "run"
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    run = started(*launch, "-m", "paceline", "train", "lgc.toml", "--trust", "--out", folder, tmp_path=tmp_path)
    try:
        wait_for_checkpoints(run, folder, tmp_path)
        os.kill(ranks_of(run)[1], signal.SIGKILL)
        assert ended(run, tmp_path) == 0, said(tmp_path)
    finally:
        run.kill()
    (resumed,) = records_of(folder, Resumed)
    assert resumed.version >= 8
    (result,) = json.loads((folder / "results.json").read_text())["results"]
    steps = {record.version: record for record in records_of(folder, StepRecord)}
    assert sorted(steps) == list(range(40))
    measured = [evaluation.round for evaluation in trace_of(read_journal(folder / TRACE)).evaluations]
    assert measured == sorted({*measured, 0, 40})  # none twice, though the first life may have measured them too
    assert result["used"] + result["late"] == sum(len(step.fresh) + len(step.late) for step in steps.values())
    assert paceline.replay(folder).identical
    assert main(["train", "--resume", str(folder)]) == 0
    assert "all 40 rounds are done" in capsys.readouterr().err


# -- one rank alone, in this process -----------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """How a recipe is trained by one rank here."""
    monkeypatch.setenv("PACELINE_STORE", str(tmp_path / "store"))

    def train(recipe, *, resume=False):
        recipe = recipe.with_settings(cluster={"workers": 1}, data={"split": "iid"})
        return train_rank(recipe, Place(rank=0, world=1), folder=tmp_path / "run", resume=resume)

    return train


def test_a_run_that_diverges_ends_and_says_so(alone, tmp_path):
    result = alone(paceline.Recipe(rounds=300).with_settings(strategy={"k": 1, "on": "ranks"}, optimizer={"lr": 1e6}))
    assert result.trace.diverged
    assert result.trace.ended == "diverged"
    assert result.rounds < 300
    assert read_journal(tmp_path / "run" / TRACE).records[-1].diverged


@pytest.mark.parametrize("name", ["fastest-k", "full"])
def test_one_rank_alone_is_a_run(alone, tmp_path, name):
    result = alone(paceline.Recipe(rounds=12).with_settings(strategy={"name": name, "k": 1, "on": "ranks"}))
    assert (result.strategy, result.rounds, result.trace.used) == (f"{name}@ranks", 12, 12)
    assert paceline.replay(tmp_path / "run").identical


# -- bad input ---------------------------------------------------------------------------------------------------------


def complaint(capsys, *arguments):
    assert main(list(map(str, arguments))) == 2
    return capsys.readouterr().err


def test_what_cannot_be_is_told_in_one_line(tmp_path, capsys, monkeypatch):
    on_ranks = ("--strategy", "lgc", "--on", "ranks")
    assert "lgc@ranks has no server: use `paceline train`" in complaint(capsys, "serve", *on_ranks)
    listening = complaint(capsys, "train", *on_ranks, "--listen", "127.0.0.1:1")
    assert "--listen is for a parameter server" in listening
    assert not (tmp_path / "new").exists()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    served = complaint(capsys, "train", "--out", tmp_path / "new")
    assert "with --on ranks full, fastest-k and lgc run under torchrun" in served
    assert "k must be between 1 and workers (k=7, workers=2)" in complaint(
        capsys, "train", *on_ranks, "--k", "7", "--out", tmp_path / "new"
    )
