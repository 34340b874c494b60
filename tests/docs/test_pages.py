"""The code on the pages runs: on two ranks where it belongs into a launch, else in a process of its own.

A block is run by the test that its mark names (tests/docs/pages.py); tests/docs/page_jobs.py has what ranks do with it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch.distributed as dist

from paceline import Race, Recipe
from tests import warm
from tests.distributed.ranks import Ranks
from tests.docs.pages import ROOT, blocks_run_by
from tests.launches import free_port

HERE = "tests/docs/test_pages.py"
SMALL = 'rounds = 6\n[cluster]\nworkers = 2\n[strategy]\nname = "full"\n'


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("ranks"), 2, "tests.docs.page_jobs") as both:
        yield both


def learned(answers):
    """Check that the loss fell on every rank, and that all have come to the same model."""
    assert all(answer["after"] < answer["before"] for answer in answers)
    assert answers[0]["parameters"] == answers[1]["parameters"]


def test_first_blocks(ranks):  # README.md
    for answers in zip(*ranks.do("first_blocks"), strict=True):
        learned(answers)


def test_balance(ranks):  # balance.md
    answers = ranks.do("balance")
    for answer in answers:
        before, after, *others, last = answer["losses"]
        assert before > after > min(others), "the first block trains, and so do those with tokens"
        assert last == others[-1], "the block that keeps and loads states trains nothing"
    assert answers[0]["parameters"] == answers[1]["parameters"]
    assert answers[0]["state"] == answers[1]["state"]
    assert answers[0]["state"]["sampler"]["epoch"] == 4


def test_averaging(ranks):  # averaging.md
    learned(ranks.do("averaging"))


def test_shares_by_speed(ranks):  # guides/mixed-machines.md
    answers = ranks.do("shares_by_speed")
    assert [answer["samples"] for answer in answers] == [64, 32]
    assert [answer["steps"] for answer in answers] == [8, 4]
    assert all(answer["distance"] < 1e-5 < 0.01 < answer["moved"] for answer in answers), "every sample weighs the same"


def test_shares_in_rounds(ranks):  # guides/mixed-machines.md
    learned(ranks.do("shares_in_rounds"))


def test_rounds(ranks, tmp_path):  # rounds.md
    answers = ranks.do("rounds", folder=str(tmp_path))
    learned(answers)
    for answer in answers:
        assert answer["saved"] == answer["loaded"]
        assert answer["versions"][0] == answer["versions"][1] > 0


def test_ranks_of_a_second_life(tmp_path):  # rounds.md
    """A launch's store, in which a rank of the first life has left word, and two ranks that come after it."""
    (code,) = blocks_run_by("rounds.md", f"{HERE}::test_ranks_of_a_second_life")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    total = "total = torch.ones(1)\ndist.all_reduce(total)\nprint(rank, world, int(total))\n"
    (tmp_path / "script.py").write_text(f"import os, torch, torch.distributed as dist\n{code}{total}", encoding="utf-8")
    launched = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    both = [
        warm.Popen(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            env=os.environ | launched | {"RANK": rank, "TORCHELASTIC_RESTART_COUNT": "1"},
            stdout=subprocess.PIPE,
            text=True,
            finalized=False,
        )
        for rank in "01"
    ]
    assert [process.communicate(timeout=60)[0].split() for process in both] == [["0", "2", "2"], ["1", "2", "2"]]


def test_codecs(ranks):  # codecs.md
    answers = ranks.do("codecs")
    learned(answers)
    assert all(payload < gradient / 4 for payload, gradient in (answer["sizes"] for answer in answers))


def test_codecs_with_a_scaler(ranks):  # codecs.md
    answers = ranks.do("codecs_with_a_scaler")
    learned(answers)
    assert [(answer["scale"], answer["skipped"]) for answer in answers] == [(32768.0, 1)] * 2


def test_slow_network(ranks):  # guides/slow-network.md
    answers = ranks.do("slow_network")
    learned(answers)
    assert [answer["steps"] for answer in answers] == [[8, 5]] * 2


def test_large_batches(ranks):  # large-batches.md
    answers = ranks.do("large_batches")
    assert all(whole["after"] < whole["before"] for whole, _, _ in answers)  # each rank for itself
    learned([wrapped for _, wrapped, _ in answers])
    assert [counted for _, _, counted in answers] == [{"moved": True}] * 2


def test_pipelines(ranks, tmp_path):  # pipeline.md
    for answer in ranks.do("pipelines", folder=str(tmp_path)):
        first, last = answer["losses"]
        assert last < first
        assert answer["norm"] > 0
        assert answer["stages"] == [2, 2]
    assert (tmp_path / "model.pt").is_file()


def test_pruning(ranks):  # pruning.md
    for answer in ranks.do("pruning"):
        assert answer["after"] < answer["before"]


def test_server_and_worker(ranks, tmp_path):  # cluster.md
    script(["-m", "paceline", "keys", "keys", "--hosts", "127.0.0.1"], tmp_path)
    server, worker = ranks.do("server_and_worker", folder=str(tmp_path), port=free_port())
    assert worker["after"] < worker["before"]
    assert server["after"] != server["before"]
    assert (tmp_path / "runs/mine/report.html").is_file()


def script(arguments, folder):
    """Run Python in a folder; return what it printed."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    ran = warm.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        finalized=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_training_in_a_script(tmp_path):  # cluster.md, loggers.md
    (code,) = blocks_run_by("cluster.md", f"{HERE}::test_training_in_a_script")
    (own_log,) = blocks_run_by("loggers.md", f"{HERE}::test_training_in_a_script")
    (tmp_path / "my.toml").write_text(SMALL, encoding="utf-8")
    (tmp_path / "my_logs.py").write_text(own_log, encoding="utf-8")
    told = "import json\nprint(json.dumps([trained.result.rounds, trained.outcome.finished, str(trained.folder)]))\n"
    (tmp_path / "script.py").write_text(f"import paceline\n{code}{told}", encoding="utf-8")
    assert json.loads(script(["script.py"], tmp_path).splitlines()[-1]) == [6, True, "runs/mine"]
    script(["-m", "paceline", "train", "my.toml", "--log", "my_logs:log", "--out", "runs/logged"], tmp_path)
    logged = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text(encoding="utf-8").splitlines()]
    assert logged[-1]["step"] == 6
    assert logged[-1]["paceline/workers"] == 2


def test_data_of_ones_own(tmp_path):  # data.md
    (code,) = blocks_run_by("data.md", f"{HERE}::test_data_of_ones_own")
    (tmp_path / "my_data.py").write_text(code, encoding="utf-8")
    command = [
        "-m",
        "paceline",
        "race",
        "--data",
        "my_data:load",
        "--strategies",
        "full,lgc",
        "--rounds",
        "3",
        "--json",
    ]
    results = json.loads(script(command, tmp_path))["results"]
    assert [result["rounds"] for result in results] == [3, 3]


def test_reports(tmp_path, monkeypatch, capsys):  # report.md
    simulated, real = blocks_run_by("report.md", f"{HERE}::test_reports")
    monkeypatch.chdir(tmp_path)
    race = Race(Recipe(rounds=3), strategies=["full", "lgc"])
    for _ in race:
        pass
    names = {"race": race}
    exec(compile(simulated, "report.md", "exec"), names)
    assert re.search(r"full +3 .*\n.*lgc +3 ", capsys.readouterr().out)
    page = (tmp_path / "report.html").read_bytes()
    assert b"ten workers, three classes each" in page
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/train").symlink_to(next((ROOT / "tests/golden").rglob("trace.jsonl")).parent)
    exec(compile(real, "report.md", "exec"), names)
    assert (tmp_path / "report.html").read_bytes() != page
