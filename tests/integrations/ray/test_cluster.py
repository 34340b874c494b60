"""Runs on a real Ray cluster: whoever is lost is started again, all rounds are done, and the record replays."""

from __future__ import annotations

import contextlib
import json
import os
import signal

import pytest

import paceline
from paceline.runs.cluster import WorkerOptions
from paceline.traces.journal import TRACE
from paceline.traces.journal_files import read_journal
from tests.integrations.ray.cluster import END_SECONDS
from tests.waiting import until

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

GATED = "tests.integrations.ray.gated:loss"
TRAIN = ["-m", "paceline", "train", "--on", "ray", "--workers", "2", "--data.split", "iid", "--loss"]


def close_gate(cluster):
    with contextlib.suppress(FileNotFoundError):
        cluster.gate.unlink()


def check_replays(cluster, name, rounds, monkeypatch, loss=GATED):
    cluster.gate.touch()
    monkeypatch.setenv("PACELINE_GATE", str(cluster.gate))
    verdict = paceline.replay(cluster.folder / name, WorkerOptions(loss=loss))
    assert verdict.identical, verdict
    assert verdict.steps - verdict.redone == rounds


def checkpoints(cluster, name):
    return sorted(int(path.name.split("-")[1]) for path in (cluster.folder / name).glob("checkpoint-*"))


def resume(name, *more):
    return ["-m", "paceline", "train", "--resume", name, "--on", "ray", "--loss", GATED, *more]


def nothing_runs(cluster):
    return not cluster.processes("ray::ServerActor") and not cluster.processes("paceline worker")


def test_a_run_survives_a_worker_a_node_and_its_caller_and_a_new_node_gets_work(cluster, monkeypatch):
    close_gate(cluster)
    # Two CPUs for a worker: of all nodes, only those that are started here have them, one for each worker.
    cluster.add("c", cpus=2)
    cluster.add("d", cpus=2)
    large = ["--ray-cpus-per-worker", "2"]
    caller = cluster.caller(
        [*TRAIN, GATED, *large, "--rounds", "100", "--out", "lost", "--server.checkpoint-every", "3"]
    )
    lines = max(caller.wait_for("worker 0 joined"), caller.wait_for("worker 1 joined"))
    assert [node for node in ("c", "d") if f"runs on {cluster.addresses[node]}\n" in caller.text] == ["c", "d"]

    os.kill(cluster.processes("paceline worker 0")[0], signal.SIGKILL)
    lines = caller.wait_for("worker 0 has ended (its process died): it is started again", after=lines)
    lines = caller.wait_for("worker 0 joined", after=lines)

    cluster.kill("d")
    lines = caller.wait_for("has ended (its node is gone): it is started again", after=lines)
    cluster.add("e", cpus=2)
    lines = caller.wait_for(f"runs on {cluster.addresses['e']}", after=lines)
    caller.wait_for("joined", after=lines)

    until(lambda: max(checkpoints(cluster, "lost"), default=0) >= 3, "checkpoint 3", seconds=END_SECONDS)
    caller.process.kill()  # nobody says goodbye
    caller.end()
    until(lambda: nothing_runs(cluster), "nothing runs", seconds=END_SECONDS)
    cluster.gate.touch()
    code, text = cluster.run(resume("lost", *large))
    assert code == 0, text
    assert "goes on from checkpoint" in text
    assert "report: lost/report.html" in text
    check_replays(cluster, "lost", 100, monkeypatch)
    kinds = [type(record).__name__ for record in read_journal(cluster.folder / "lost" / TRACE).records]
    assert kinds.count("WorkerJoined") >= 5  # the last before the caller was killed may not have been copied
    assert kinds.count("WorkerLeft") >= 2
    assert not list(cluster.folder.glob("lost/.writing-*"))
    until(lambda: nothing_runs(cluster), "nothing runs", seconds=END_SECONDS)
    # What was killed has left no key, and its folder was removed by the next server on that node.
    assert not list(cluster.temporary.glob("paceline-*"))


def test_a_run_goes_on_when_its_server_is_lost_and_stops_when_it_is_asked_to(cluster, monkeypatch):
    close_gate(cluster)
    (cluster.folder / "code").mkdir()
    (cluster.folder / "code" / "sent_by_ray.py").write_text("from tests.integrations.ray.gated import loss\n")
    own = ["sent_by_ray:loss", "--ray-working-dir", "code"]
    often = ["--rounds", "1000", "--server.checkpoint-every", "3"]
    caller = cluster.caller([*TRAIN, *own, *often, "--out", "served", "--json"])
    caller.wait_for("worker 0 joined")
    until(lambda: max(checkpoints(cluster, "served"), default=0) >= 3, "checkpoint 3", seconds=END_SECONDS)
    os.kill(cluster.processes("ray::ServerActor")[0], signal.SIGKILL)
    lines = caller.wait_for("the server is lost")
    lines = caller.wait_for("goes on from checkpoint", after=lines)
    caller.wait_for("worker 0 joined", after=lines)
    before = max(checkpoints(cluster, "served"))
    until(lambda: max(checkpoints(cluster, "served")) > before, "another checkpoint", seconds=END_SECONDS)

    caller.process.send_signal(signal.SIGINT)
    assert caller.end() == 130
    again = "go on with: paceline train --resume served --loss sent_by_ray:loss --on ray --ray-working-dir code"
    assert again in caller.text
    rounds = max(checkpoints(cluster, "served"))
    assert json.loads((cluster.folder / "served" / "results.json").read_text())["results"][0]["rounds"] == rounds
    monkeypatch.syspath_prepend(cluster.folder / "code")
    check_replays(cluster, "served", rounds, monkeypatch, loss="sent_by_ray:loss")
    until(lambda: nothing_runs(cluster), "nothing runs", seconds=END_SECONDS)


def test_scripts(cluster):
    """The page's scripts, the same bits as on one machine, and what is refused: one process, connected once."""
    code, text = cluster.run(["-m", "tests.integrations.ray.scripts"])
    assert code == 0, text
    found = json.loads(next(line for line in text.splitlines() if line.startswith("found ")).removeprefix("found "))
    assert found["page"] == [[40, True], [30, True]]
    assert found["same"] is True
    assert "each demands CPU 64" in found["resources"]
    assert "127.0.0.1 CPU 2" in found["resources"]
    assert "workers failed 3 times without a round in between, the last one with" in found["failing"]
    assert "no data here" in found["failing"]
    assert "was not found" in found["code"]
    assert "--ray-working-dir" in found["code"]
    assert found["folders"] == ["failing", "here", "on-ray", "own", "room"]  # what has begun can be gone on with
