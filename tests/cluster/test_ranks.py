"""`paceline train` where workers average among themselves: real ranks, started here and by torchrun, through deaths."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import paceline
from paceline.cli.main import main
from paceline.drivers.ranks.checkpoints import RankCheckpoints
from paceline.traces.recorded_run import read_run
from paceline.traces.step_times import read_all_times
from tests import warm
from tests.launches import free_port
from tests.waiting import until

STARTS_WITHIN_SECONDS = 120.0
ENDS_WITHIN_SECONDS = 120.0
NAMED_WITHIN_SECONDS = 30.0
RECIPE = """
rounds = 60
evaluate_every = 15
[data]
split = "iid"
[cluster]
workers = 2
[delay]
name = "shifted-exponential"
shift_seconds = 0.02
mean_seconds = 0.0
inject = true
[strategy]
name = "hpsgd"
[server]
checkpoint_every = 10
silence_seconds = 4
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "hpsgd.toml"
    path.write_text(RECIPE)
    return path


def started(*command, tmp_path, from_nothing=False):
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    log = (tmp_path / "said.txt").open("ab")
    command = [sys.executable, "-m", *map(str, command)]
    settings = {"env": environment, "cwd": tmp_path, "stdout": log, "stderr": log}
    return subprocess.Popen(command, **settings) if from_nothing else warm.Popen(command, nursing=True, **settings)


def said(tmp_path):
    return (tmp_path / "said.txt").read_text(errors="replace")


def ranks_of(process):
    """The processes it has started, in that order; but for the one that it has them from."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in found if Path(f"/proc/{pid}/comm").read_bytes().strip() != warm.NAME]


def wait_for_checkpoints(process, folder, tmp_path, ranks=2):
    until(
        lambda: all(list((folder / f"rank-{rank}").glob("checkpoint-*[0-9]")) for rank in range(ranks)),
        "a checkpoint of each rank",
        seconds=STARTS_WITHIN_SECONDS,
        process=process,
        log=lambda: said(tmp_path),
    )


def ended(process, tmp_path, within=ENDS_WITHIN_SECONDS):
    try:
        return process.wait(within)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(said(tmp_path)) from None


def check_story(folder):
    """All rounds are done, and what was measured is there from the first life on, nothing twice."""
    (result,) = json.loads((folder / "results.json").read_text())["results"]
    assert result["rounds"] >= 60
    keeper = RankCheckpoints(folder, rank=0)
    story = keeper.read(keeper.held()[0])["story"]
    rounds = [round_ for round_, *_ in story["evaluations"]]
    assert len(rounds) > 2
    assert rounds[0] == 0
    assert rounds == sorted(set(rounds))


def test_a_rank_that_dies_is_named_and_the_run_goes_on_and_replays_to_the_last_bit(recipe, tmp_path):
    """With all that ranks and owners of shards hold back, through two lives."""
    folder = tmp_path / "run"
    encoded = ("--workers", "3", "--codec", "one-bit", "--codec.plan", "two-step")
    run = started("paceline", "train", recipe, *encoded, "--out", folder, tmp_path=tmp_path)
    try:
        wait_for_checkpoints(run, folder, tmp_path, ranks=3)
        os.kill(ranks_of(run)[1], signal.SIGKILL)
        assert ended(run, tmp_path, within=NAMED_WITHIN_SECONDS) == 1
    finally:
        run.kill()
    assert "rank 1 was ended by SIGKILL" in said(tmp_path)
    assert "rank 1 is gone" in said(tmp_path)  # what rank 0 found out by itself
    assert f"paceline train --resume {folder}" in said(tmp_path)
    again = started("paceline", "train", "--resume", folder, tmp_path=tmp_path, from_nothing=True)
    assert ended(again, tmp_path) == 0, said(tmp_path)
    check_story(folder)
    assert paceline.replay(folder).identical
    windows = read_run(folder).trace.works
    for rank, times in read_all_times(folder)["rank"].items():
        versions = [step.version for step in times.steps]  # each step is in the window of an average of this rank
        assert versions == sorted(versions)
        assert set(versions) <= {work.version for work in windows if work.worker == rank}
        assert len(set(versions)) > 1
        steps = [step.step for step in times.steps]
        killed_in = {restart - 1 for restart in times.restarts}  # its checkpoint was written, and its times were not
        assert steps == sorted(set(steps)), rank
        assert set(range(steps[-1] + 1)) - set(steps) <= killed_in, rank
        assert all(step.computing_seconds + step.wait_seconds <= step.seconds + 5e-6 for step in times.steps)
        assert times.ended.reason == "all rounds are done"
    keeper = RankCheckpoints(folder, rank=1)
    memory = keeper.read(keeper.held()[0])["sync"]["codec"]
    assert memory["owned"].abs().max() > 0
    assert memory["owned"].numel() < memory["residual"].numel()


def test_torchrun_starts_the_ranks_again_and_they_go_on_from_the_last_checkpoint(recipe, tmp_path):
    folder = tmp_path / "run"
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    run = started(*launch, "-m", "paceline", "train", recipe, "--out", folder, tmp_path=tmp_path)
    try:
        wait_for_checkpoints(run, folder, tmp_path)
        os.kill(ranks_of(run)[1], signal.SIGKILL)
        assert ended(run, tmp_path) == 0, said(tmp_path)
    finally:
        run.kill()
    check_story(folder)


def test_a_machine_that_is_lost_is_replaced_and_all_go_on_from_the_last_checkpoint(recipe, tmp_path):
    """Two launchers, as on two machines, by the lines of docs/guides/spot-machines.md; one dies with its rank."""
    folder = tmp_path / "run"
    port = free_port()
    many = ("torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
    where = ("--rdzv-backend", "c10d", "--rdzv-id", "mine", "--rdzv-endpoint", f"127.0.0.1:{port}")
    launch = (*many, *where, "-m", "paceline", "train")
    running = []
    try:
        for life in ([recipe, "--out", folder], ["--resume", folder]):
            running = [started(*launch, *life, tmp_path=tmp_path)]
            wait_until_listening(port, tmp_path)  # the first launcher holds the store
            running.append(started(*launch, *life, tmp_path=tmp_path))
            if "--out" in life:
                wait_for_checkpoints(running[0], folder, tmp_path)
                for pid in [*ranks_of(running[1]), running[1].pid]:
                    os.kill(pid, signal.SIGKILL)
                assert ended(running[0], tmp_path) == 1  # it names who is gone, and waits for nobody
        assert [ended(process, tmp_path) for process in running] == [0, 0], said(tmp_path)
    finally:
        for process in running:
            process.kill()
    assert "is gone" in said(tmp_path)
    check_story(folder)


def wait_until_listening(port, tmp_path):
    def listens():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    until(listens, "the launcher listens", seconds=STARTS_WITHIN_SECONDS, log=lambda: said(tmp_path))


def test_who_is_told_to_go_ends_its_ranks_first(recipe, tmp_path, monkeypatch, capsys):
    class Told:
        """Ranks that are waited for when SIGTERM comes."""

        def __init__(self, be_rank, world, *, logs):
            pass

        def wait(self, *, pause):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(ENDS_WITHIN_SECONDS)  # the handler interrupts it

    monkeypatch.setattr("paceline.drivers.ranks.launch.LocalRanks", Told)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 130
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "stopped" in capsys.readouterr().err


def complaint(capsys, *arguments):
    assert main(list(map(str, arguments))) == 2
    return capsys.readouterr().err


def test_what_cannot_be_is_told_in_one_line(recipe, tmp_path, capsys, monkeypatch):
    assert "averaging has no server" in complaint(capsys, "serve", recipe)
    assert "--listen is for a parameter server" in complaint(capsys, "train", recipe, "--listen", "127.0.0.1:1")
    assert "rebase needs overlap" in complaint(capsys, "train", recipe, "--strategy", "bmuf", "--rebase", "true")
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert "give --out" in complaint(capsys, "train", recipe)
    assert "run it without torchrun" in complaint(capsys, "train", "--out", tmp_path / "new")
    monkeypatch.setenv("RANK", "2")
    assert "RANK must be between 0 and WORLD_SIZE - 1" in complaint(capsys, "train", recipe, "--out", tmp_path / "new")


def test_a_folder_that_holds_a_run_is_refused_in_every_life_of_a_launch(recipe, tmp_path, capsys, monkeypatch):
    """The first life refused it, torchrun started the ranks again, and the second went on with the wrong model."""
    old = tmp_path / "old"
    RankCheckpoints(old, rank=0).keep(1, {"recipe": {}})
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "PACELINE_STORE": str(tmp_path / "store")}.items():
        monkeypatch.setenv(name, value)
    for restarts in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        said = complaint(capsys, "train", recipe, "--out", old)
        assert f"{old} holds a run" in said
        assert f"or go on with it: --resume {old}" in said
        assert [path.name for path in old.iterdir()] == ["rank-0"]  # no recipe.json that would be another run's
