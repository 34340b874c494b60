"""A codec on a real wire, between two hosts: it trains as well, and its bytes are those of the interface."""

from __future__ import annotations

import json
import subprocess

import pytest

from paceline import Recipe, simulate
from tests.cluster.cable import PORT, SERVER, Cable, why_not
from tests.cluster.harness import PACELINE, end

pytestmark = pytest.mark.xdist_group("two_hosts")  # they have the same addresses

WORKERS, ROUNDS = 2, 60
SETTINGS = {"cluster.workers": WORKERS, "strategy.name": "full", "data.split": "iid", "rounds": ROUNDS, "seed": 3}


@pytest.fixture
def cable():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Cable() as cable:
        yield cable


def test_qsgd_trains_as_well_and_counts_the_bytes_that_the_interface_counts(tmp_path, cable):
    options = [part for name, value in SETTINGS.items() for part in (f"--{name}", str(value))]
    serve = ["serve", "--listen", f"{SERVER}:{PORT}", "--insecure", "--out", str(tmp_path / "run"), "--json"]
    work = ["ip", "netns", "exec", cable.workers, *PACELINE, "work", f"{SERVER}:{PORT}", "--threads", "1"]
    command = ["ip", "netns", "exec", cable.server, *PACELINE, *serve, "--codec.name", "qsgd", *options]
    sent_before, received_before = cable.bytes_at_server()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    workers = [subprocess.Popen(work, stderr=subprocess.DEVNULL) for _ in range(WORKERS)]
    try:
        told, errors = server.communicate(timeout=120)
        assert server.returncode == 0, errors
        assert [worker.wait(20) for worker in workers] == [0, 0]
    finally:
        for process in (server, *workers):
            end(process)
    sent, received = cable.bytes_at_server()

    steps = [json.loads(line) for line in (tmp_path / "run" / "trace.jsonl").read_text().splitlines()]
    counted = [sum(step.get(f"{which}_bytes", 0) for step in steps) for which in ("sent", "received")]
    assert counted[0] == pytest.approx(sent - sent_before, rel=0.03)
    assert counted[1] == pytest.approx(received - received_before, rel=0.03)
    sections = {"cluster": {"workers": WORKERS}, "strategy": {"name": "full"}, "data": {"split": "iid"}}
    exact = simulate(Recipe(rounds=ROUNDS, seed=SETTINGS["seed"]).with_settings(**sections))
    assert max(counted) < max(exact.trace.sent_bytes, exact.trace.received_bytes) / 6
    assert json.loads(told)["results"][0]["loss"] == pytest.approx(exact.loss, rel=0.05)
