"""Jobs of a real Slurm: the scripts of docs/slurm.md, the state that Slurm shows of them, and what they leave."""

from __future__ import annotations

import json
import re

import pytest

from tests.docs.pages import blocks
from tests.integrations.slurm.cluster import SlurmCluster
from tests.waiting import until

pytestmark = pytest.mark.xdist_group("slurm")

RECIPE = """
rounds = {rounds}
[cluster]
workers = {workers}
[strategy]
name = "{strategy}"
[server]
checkpoint_every = 20
"""
LONG = 240
NET = """
import os
from pathlib import Path
from torch import nn

def net(input_shape, classes):
    if os.environ.get("FAILING", "none") == os.environ.get("SLURM_PROCID" if "SLURM_STEP_ID" in os.environ else ""):
        raise RuntimeError("this node has no licence")
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.fixture(scope="module")
def slurm():
    with SlurmCluster() as cluster:
        for name, strategy, workers, rounds in (
            ("my", "lgc", 4, 40),
            ("two", "full", 2, 40),
            ("long", "full", 2, LONG),
            ("endless", "full", 2, 1_000_000),
            ("hpsgd", "hpsgd", 2, 20),
        ):
            text = RECIPE.format(rounds=rounds, workers=workers, strategy=strategy)
            paced = "[delay]\ninject = true\n" if name == "long" else ""  # 70 ms for a round, however busy the machine
            (cluster.jobs / f"{name}.toml").write_text(text + paced)
        (cluster.jobs / "my_models.py").write_text(NET)
        yield cluster


@pytest.fixture(autouse=True)
def left_clean(slurm):
    """After each test no process of a job runs, and no key is on the disk."""
    yield
    slurm.cancel_all()
    until(lambda: not slurm.processes(of_jobs=True), "processes to end", log=lambda: str(slurm.processes(of_jobs=True)))
    assert not list((slurm.place / "tmp").glob("paceline*"))
    assert not [path for path in slurm.jobs.rglob("*") if path.suffix in (".key", ".crt")]


def printed(slurm, *words):
    """Return the job that the command prints on a login node."""
    return slurm.run("paceline", "train", *words, "--on", "slurm")


def steps_in(folder):
    trace = folder / "trace.jsonl"
    return trace.read_text().count('"kind":"stepped"') if trace.exists() else 0


def test_the_page_has_three_scripts():
    assert [script.splitlines()[-1].split()[0] for script in blocks("slurm.md", "bash")] == ["exec", "srun", "-m"]


def test_the_pages_job_and_one_on_other_nodes_complete_and_replay(slurm):
    first = slurm.submit(blocks("slurm.md", "bash")[0], name="first")
    script = printed(slurm, "two.toml", "--out", "runs/two")
    second = slurm.submit(script, "--nodelist=node[4-5]", "--nodes=2", name="second")
    assert slurm.ended(first, "first") == "COMPLETED", slurm.output("first")
    assert slurm.ended(second, "second") == "COMPLETED", slurm.output("second")
    assert "server at 10.99.0.1:" in slurm.output("first")
    assert "server at 10.99.0.4:" in slurm.output("second")  # other nodes, other keys
    for folder, workers, rounds in (("runs/mine", 4, 40), ("runs/two", 2, 40)):
        results = json.loads((slurm.jobs / folder / "results.json").read_text())
        assert (slurm.jobs / folder / "report.html").stat().st_size > 100_000
        assert results["recipe"]["cluster"]["workers"] == workers
        assert steps_in(slurm.jobs / folder) == rounds
    replayed = json.loads(slurm.run("paceline", "replay", "runs/mine", "--json"))
    assert (replayed["identical"], replayed["steps"]) == (True, 40)


TRAIN = """
import torch
import paceline

torch.distributed.init_process_group("gloo")
torch.manual_seed(torch.distributed.get_rank())
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with paceline.HPSGD(model, optimizer) as sync:
    for _ in range(20):
        inputs = torch.randn(16, 8)
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.flush()
    print("rank", torch.distributed.get_rank(), "has", float(model.weight.sum()), flush=True)
"""


def test_the_guides_job_runs_a_script_of_ones_own_on_two_nodes(slurm):
    (script,) = blocks("guides/clusters.md", "bash")
    (slurm.jobs / "train.py").write_text(TRAIN)
    job = slurm.submit(script, name="own")
    assert slurm.ended(job, "own") == "COMPLETED", slurm.output("own")
    sums = dict(re.findall(r"rank (\d) has ([-\d.e]+)", slurm.output("own")))
    assert sorted(sums) == ["0", "1"]
    assert sums["0"] == sums["1"]
    assert abs(float(sums["0"]) - 8) < 2  # they learn weights of one each


def test_a_job_that_cannot_be_is_refused_before_it_starts(slurm):
    few = slurm.submit("#!/bin/bash\nexec paceline train my.toml --on slurm --out runs/few", "--ntasks=3", name="few")
    wrong = slurm.submit(
        "#!/bin/bash\nexec paceline train two.toml --strategy fastest-k --k 3 --on slurm --out runs/wrong", "--ntasks=3"
    )
    assert slurm.ended(few, "few") == "FAILED"
    assert "3 tasks, one for the server and 2 for workers, and the recipe has 4 workers" in slurm.output("few")
    assert "--ntasks=5, or give --workers 2" in slurm.output("few")
    assert slurm.ended(wrong) == "FAILED"
    assert "error" in slurm.output()
    assert not (slurm.jobs / "runs/few").exists()
    assert not (slurm.jobs / "runs/wrong").exists()


def test_a_job_fails_with_its_workers_and_with_its_server(slurm):
    code = "from my_models import net\n"
    (slurm.jobs / "all_fail.py").write_text(f"import os\n{code}os.environ.update(FAILING=os.environ['SLURM_PROCID'])\n")
    script = printed(slurm, "two.toml", "--out", "runs/failing", "--model", "all_fail:net")
    failing = slurm.submit(script, "--nodes=3", name="failing")
    endless = slurm.submit(printed(slurm, "endless.toml", "--out", "runs/killed"), name="killed")
    folder, output = slurm.jobs / "runs/killed", lambda: slurm.output("killed")
    until(lambda: steps_in(folder) > 20, "steps", seconds=200, log=output)
    slurm.kill("paceline.slurm.worker")  # of two workers one: the other goes on
    until(lambda: "Killed" in output(), "srun to tell of the worker", seconds=120, log=output)
    killed = steps_in(folder)
    until(lambda: steps_in(folder) > killed + 20, "steps without the worker", seconds=120, log=output)
    slurm.kill("train endless.toml")
    assert slurm.ended(endless, "killed") == "FAILED", slurm.output("killed")
    assert slurm.ended(failing, "failing") == "FAILED", slurm.output("failing")
    told = r"worker 1: RuntimeError: this node has no licence \(raised [^()]*my_models\.py, line 8\) \(on node3\)"
    assert re.search(told, slurm.output("failing")), slurm.output("failing")
    assert "go on with: paceline train --resume runs/failing --model all_fail:net --on slurm" in slurm.output("failing")


def test_a_job_that_is_started_again_or_stopped_goes_on(slurm):
    folder = slurm.jobs / "runs/long"
    output = lambda: slurm.output("long")  # noqa: E731
    job = slurm.submit(printed(slurm, "long.toml", "--out", "runs/long"), name="long")
    until(lambda: steps_in(folder) > 5, "steps", seconds=200, log=output)
    slurm.run("scontrol", "requeue", job)
    until(lambda: slurm.facts(job)["JobState"] == "PENDING", "the job to wait again", seconds=120, log=output)
    before = steps_in(folder)
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm would wait for two minutes
    assert 5 < before < LONG
    until(lambda: steps_in(folder) > before + 5, "steps after the restart", seconds=200, log=output)
    assert f"job {job} was started again (1): it goes on with runs/long" in output()
    slurm.run("scancel", "--batch", "--signal=TERM", job)  # as --signal=B:TERM@60 does
    assert slurm.ended(job, "long") == "FAILED"
    assert slurm.facts(job)["ExitCode"] == "130:0"
    again = "paceline train --resume runs/long --on slurm"
    assert f"stopped by SIGTERM; go on with: {again}" in output()
    third = slurm.submit(slurm.run(*again.split()), name="third")
    assert slurm.ended(third, "third") == "COMPLETED", slurm.output("third")
    replayed = json.loads(slurm.run("paceline", "replay", "runs/long", "--json"))
    assert (replayed["identical"], replayed["steps"]) == (True, LONG)


def test_ranks_run_by_one_command_by_srun_and_by_torchrun_and_one_that_fails_fails_its_job(slurm):
    script = printed(slurm, "hpsgd.toml", "--model", "my_models:net", "--out", "runs/rank")
    failing = slurm.submit(script, "--nodes=2", name="rank", more={"FAILING": "1"})
    _, typed, torchrun = blocks("slurm.md", "bash")
    scripts = {"ranks": printed(slurm, "hpsgd.toml", "--out", "runs/ranks"), "typed": typed, "torchrun": torchrun}
    jobs = {name: slurm.submit(script, "--nodes=2", name=name) for name, script in scripts.items()}
    for name, job in jobs.items():
        assert slurm.ended(job, name) == "COMPLETED", slurm.output(name)
        results = json.loads((slurm.jobs / "runs" / name / "results.json").read_text())
        assert results["recipe"]["cluster"]["workers"] == 2
        assert (slurm.jobs / "runs" / name / "rank-1").is_dir()
    assert slurm.ended(failing, "rank") == "FAILED", slurm.output("rank")
    assert "this node has no licence" in slurm.output("rank")


def test_a_shell_of_salloc_on_a_login_node_trains_on_the_jobs_nodes(slurm):
    words = ["paceline", "train", "two.toml", "--on", "slurm", "--rounds", "5", "--out", "runs/shell"]
    slurm.run("salloc", "--ntasks=3", *words, seconds=250)
    assert steps_in(slurm.jobs / "runs/shell") == 5
