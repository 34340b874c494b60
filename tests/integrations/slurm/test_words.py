"""What `train --on slurm` prints and passes on, without a Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta

import pytest

from paceline.cli import on_slurm
from paceline.cli.cluster import TrainOptions, check_resume_alone, names_given
from paceline.cli.main import COMMANDS
from paceline.cli.on_slurm import typed_words
from paceline.drivers.ranks.checkpoints import RankCheckpoints
from paceline.drivers.ranks.launch import Place
from paceline.drivers.ranks.rendezvous import keep_store, meet, open_store
from paceline.recipes import Recipe
from paceline.runs.ranks import write_recipe
from paceline.slurm.allocation import Allocation, SlurmError, allocation_in
from paceline.slurm.ranks import take_place
from paceline.slurm.requeue import began_here, claim
from paceline.traces.journal import TRACE
from paceline.traces.run_folder import FolderTakenError
from tests import warm

OUTSIDE = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
TYPED = [
    ["my.toml", "--on", "slurm", "--workers", "4", "--k", "3", "--out", "runs/mine"],
    ["--on", "slurm", "--resume", "runs/mine", "--rounds", "640", "--json", "--debug"],
    ["my.toml", "--on=slurm", "--inject-delays", "--listen", "node1-ib:0", "--log", "tensorboard"],
]


@pytest.mark.parametrize("typed", TYPED, ids=" ".join)
def test_the_words_of_a_command_mean_the_same_when_they_are_passed_on(typed):
    options, overrides = COMMANDS["train"].parse(typed)
    without = {name: text for name, text in overrides.items() if name != "strategy.on"}
    words = typed_words(options, without)
    assert words[0] == "train"
    assert COMMANDS["train"].parse(words[1:]) == (options, overrides)


def test_a_login_node_needs_no_torch_to_print_a_job(tmp_path):
    check = (
        "import sys; from paceline.cli.main import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules; "
        "sys.exit(code)"
    )
    words = ["train", "--strategy", "hpsgd", "--workers", "3", "--on", "slurm", "--out", "runs/my run"]
    command = [sys.executable, "-c", check, *words]
    done = subprocess.run(command, cwd=tmp_path, env=OUTSIDE, check=True, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert "#SBATCH --ntasks=3            # 3 ranks" in lines
    assert next(line for line in lines if "--signal" in line).endswith("go on from the last checkpoint before")
    assert lines[-1].startswith(f"exec {sys.executable} -m paceline train --on slurm --out 'runs/my run'")
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_that_cannot_be_is_refused_on_the_login_node():
    words = ["train", "--on", "slurm", "--strategy", "fastest-k", "--workers", "2", "--k", "3"]
    command = [sys.executable, "-m", "paceline", *words]
    done = warm.run(command, env=OUTSIDE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "k must be between 1 and workers" in done.stderr


def test_variables_that_are_not_as_slurm_sets_them_are_refused(monkeypatch):
    with pytest.raises(SlurmError, match="leave out --on slurm"):
        take_place({"RANK": "0", "SLURM_STEP_ID": "0"})
    with pytest.raises(SlurmError, match="SLURM_PROCID"):
        take_place({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"})
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SlurmError, match="there is no scontrol here"):
        allocation_in({"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[1-2]"})
    with pytest.raises(SlurmError, match="must name the job's nodes"):
        allocation_in({"SLURM_JOB_ID": "17"})


def start_ranks(monkeypatch, job, folder):
    """Be the launcher of a job of two ranks up to where srun would start them, and return what it would be told."""
    told = []
    monkeypatch.setattr(on_slurm, "allocation_in", lambda environment: job)
    monkeypatch.setattr(on_slurm, "launch_ranks", lambda *words, **more: told.append((words, more)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--on", "slurm", "--strategy", "hpsgd", "--workers", "2", "--out", str(folder)]
    options, overrides = COMMANDS["train"].parse(words)
    on_slurm.train(options, {name: text for name, text in overrides.items() if name != "strategy.on"})
    return told[0]


def test_a_job_that_is_refused_leaves_the_run_of_another_to_the_other(tmp_path, monkeypatch):
    first = Allocation(job="17", nodes=("node1",), tasks=(2,), cpus_per_task=1, here="node1")
    start_ranks(monkeypatch, first, tmp_path)
    RankCheckpoints(tmp_path, 0).claim("its launch")
    with pytest.raises(FolderTakenError, match="holds a run"):
        start_ranks(monkeypatch, replace(first, job="18"), tmp_path)
    assert began_here(tmp_path, replace(first, restarts=1))
    assert not began_here(tmp_path, replace(first, job="18", restarts=1))


def test_a_job_of_ranks_that_is_started_again_is_the_same_launch_and_may_begin_anew(tmp_path, monkeypatch):
    job = Allocation(job="17", nodes=("node1",), tasks=(2,), cpus_per_task=1, here="node1")
    assert start_ranks(monkeypatch, job, tmp_path)[1] == {"launch": ""}
    write_recipe(Recipe().with_strategy("hpsgd"), tmp_path)
    RankCheckpoints(tmp_path, 1).claim("its launch")  # the job died before rank 0 had written anything
    (words, _, _), more = start_ranks(monkeypatch, replace(job, restarts=1), tmp_path)
    assert more == {"launch": "its launch"}
    assert words[words.index("--out") + 1] == str(tmp_path)
    assert "--resume" not in words  # which refuses ranks that have not all written a checkpoint
    kept = keep_store(60.0, launch=more["launch"])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    store = open_store(where, Place(rank=0, world=1), timedelta(seconds=60))
    assert meet(store, 0, 1, timeout_seconds=60.0).launch == "its launch"


def test_a_server_that_is_started_again_is_given_its_code_and_paths_again(tmp_path):
    job = Allocation(job="17", nodes=("node1",), tasks=(2,), cpus_per_task=1, here="node1", restarts=1)
    claim(tmp_path, job)
    (tmp_path / TRACE).write_text("")
    named = {"model.name": "my:net", "data.name": "my:data", "model.loss": "my:loss", "data.directory": "/data"}
    named |= {"delay.file": "/data/delays.json"}
    delays = {"delay.name": "recorded", "delay.inject": "true"}
    options, again = on_slurm._with_folder(TrainOptions(out=str(tmp_path)), named | delays, job)
    assert (options.out, options.resume) == ("", str(tmp_path))
    assert again == named
    check_resume_alone(options, again)
    given = names_given(again)
    assert [given.model, given.data, given.loss, given.data_directory, given.delay_file] == list(named.values())
