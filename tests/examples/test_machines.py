"""Machines that differ, and machines that go: the fastest K of a launch, and a parameter server whose workers die."""

from __future__ import annotations

import configparser
import inspect
import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.drivers.served.keys import make_keys
from paceline.runs.serving import serve
from tests.docs.pages import blocks_run_by
from tests.drivers.served.test_worker import batches, serving, work
from tests.examples.scripts import EXAMPLES, ROOT, run, start
from tests.launches import free_port
from tests.waiting import until

GUIDE = ROOT / "docs" / "guides/spot-machines.md"
HERE = "tests/examples/test_machines.py"
SECONDS = 240.0  # for all that one test waits for


def test_the_slow_ranks_are_late_instead_of_waited_for():
    # A block of a slow rank, 15 ms, ends before the next round of the first, 20 ms or more: on a busy machine too.
    first, *others = run("lgc_torchrun.py", "--epochs", 2, "--slow-ranks", 2, "--slower", 3, ranks=3)
    assert not any(re.search("Error|rounds", text) for text in others), "rank 0 alone prints"
    full, lgc = first.split("LGCSync")
    in_time, late = _counts(full)
    assert len(set(in_time)) == 1, "FullSync has everybody in every round"
    assert late == [0, 0, 0]
    rounds = in_time[0]
    in_time, late = _counts(lgc)
    assert sum(in_time) == rounds, "with two slow ranks of three, one closes a round"
    assert in_time[0] > max(in_time[1:])
    assert min(late[1:]) >= 5, "what the slow ranks did is used, a round later: in 29 rounds if nothing disturbs them"
    assert float(re.search(r"accuracy ([\d.]+)%", lgc)[1]) > 40


def test_the_slow_rank_is_dealt_less_instead_of_waited_for():
    first, *others = run("balance_ddp.py", "--epochs", 4, "--slower", 4, ranks=3)
    assert not any(re.search("Error|samples", text) for text in others), "rank 0 alone prints"
    paces = [int(pace.replace(",", "")) for pace in re.findall(r": ([\d,]+) samples a second", first)]
    assert len(paces) == 2
    assert paces[1] > 1.15 * paces[0], "the ideal is 2.25 times DDP's pace"
    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)%", first)]
    assert min(accuracies) > 80
    shares = [int(found) for found in re.findall(r"^ +\d +(\d+) +\d+ %", first, re.MULTILINE)]
    assert sum(shares) == 96
    assert shares[2] < min(shares[:2]) / 2


def test_a_killed_worker_is_replaced_and_all_rounds_are_done(tmp_path):
    make_keys(tmp_path / "keys")
    with _machines(tmp_path) as machines:
        server = machines.serve("--tls", "keys/server")
        killed, told = (machines.work("--tls", "keys/worker") for _ in range(2))
        machines.wait_for_round(20)
        killed.kill()
        told.send_signal(signal.SIGTERM)
        assert machines.end_of(told) == 1
        replacement = machines.work("--tls", "keys/worker")
        assert machines.end_of(replacement) == 0
        assert machines.end_of(server) == 0, machines.log(server)
    log = machines.log(server)
    assert "it left (SystemExit)" in log, "a worker that has notice says goodbye"
    assert len(re.findall(r"worker \d left: ", log)) == 2
    assert len(re.findall(r"worker \d joined ", log)) == 3
    assert float(re.search(r"all rounds are done; accuracy ([\d.]+)%", log)[1]) > 80
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert results["results"][0]["rounds"] == machines.rounds


def test_a_server_that_is_stopped_goes_on_elsewhere_with_the_workers_that_waited(tmp_path):
    """One command begins the run, goes on with a copy of its folder, and finds at last that nothing is left to do."""
    with _machines(tmp_path) as machines:
        server = machines.serve("--resume")
        workers = [machines.work() for _ in range(2)]
        machines.wait_for_round(20)
        server.send_signal(signal.SIGTERM)
        assert machines.end_of(server) == 1
        assert "stopped by SIGTERM" in machines.log(server)
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        server = machines.serve("--resume", out="copy")
        assert [machines.end_of(worker) for worker in workers] == [0, 0]
        assert machines.end_of(server) == 0, machines.log(server)
        again = machines.serve("--resume", out="copy")
        assert machines.end_of(again) == 0, machines.log(again)
    network = runpy.run_path(str(EXAMPLES / "parameter_server.py"))["network"]
    saved = torch.load(tmp_path / "run" / "model.pt")  # of the moment when it was stopped, as the checkpoint is
    assert _same(saved, _weights(tmp_path / "run", network))
    trained = torch.load(tmp_path / "copy" / "model.pt")
    assert not _same(saved, trained)
    assert _same(trained, _weights(tmp_path / "copy", network))
    accuracies = [re.search(r"all rounds are done; accuracy (.+)", machines.log(each))[1] for each in (server, again)]
    assert accuracies[0] == accuracies[1]


def test_weights_are_read_from_a_checkpoint(tmp_path):
    """Also of a model with statistics, and with a part that is frozen."""

    def normalised():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        model[0].bias.requires_grad_(False)
        return model

    served, model = normalised(), normalised()
    with serving(served, tmp_path, rounds=3) as (address, ended), paceline.Worker(address, model) as worker:
        work(worker, model, batches(100))
    assert ended[0].finished
    found = _weights(tmp_path / "run", normalised)
    assert found["1.num_batches_tracked"] > 0
    assert _same(found, served.state_dict())
    assert not _same(found, normalised().state_dict())


def test_the_limits_of_the_guide_can_be_given(monkeypatch):
    (code,) = blocks_run_by("guides/spot-machines.md", f"{HERE}::test_the_limits_of_the_guide_can_be_given")
    given = {}
    monkeypatch.setattr(paceline, "serve", lambda *models, **settings: given.update(settings))
    exec(code, {"paceline": paceline, "model": None, "optimizer": None})
    assert (given["limits"].silence_seconds, given["limits"].gather_seconds) == (5, 20)
    assert given.keys() <= inspect.signature(serve).parameters.keys()


def test_the_loop_starts_a_worker_until_training_is_over(tmp_path):
    worker = 'python() { echo "$@" >> started; [ "$(wc -l < started)" = 3 ]; }; sleep() { :; }'  # two die, one ends
    subprocess.run(["bash", "-c", f"{worker}\n{_block('bash')}"], cwd=tmp_path, check=True, timeout=SECONDS)
    started = (tmp_path / "started").read_text(encoding="utf-8").splitlines()
    assert started == ["examples/worker.py ps.example.org:29400 --tls keys/worker"] * 3


def test_the_units_start_what_failed_again_with_options_that_it_has():
    started = []
    test = f"{HERE}::test_the_units_start_what_failed_again_with_options_that_it_has"
    for text in blocks_run_by("guides/spot-machines.md", test):
        unit = configparser.ConfigParser()
        unit.optionxform = str
        unit.read_string(text)
        assert unit["Service"]["Restart"] == "on-failure", "both end with 0 when training is over"
        _, script, *words = unit["Service"]["ExecStart"].split()
        known = re.findall(r'add_argument\("(--[a-z-]+)"', (ROOT / script).read_text(encoding="utf-8"))
        options = [word for word in words if word.startswith("--")]
        assert set(options) <= set(known)
        started.append((script, options))
    worker, server = started
    assert worker == ("examples/worker.py", ["--tls", "--patience-seconds"])
    assert server[0] == "examples/parameter_server.py"
    assert "--resume" in server[1], "without it the second start would be refused"


class Machines:
    """A server and its workers, each a process of its own, in one folder; the run is long enough to be disturbed."""

    rounds = 250

    def __init__(self, folder):
        self._folder, self._processes = folder, []
        self._address, self._deadline = f"127.0.0.1:{free_port()}", time.monotonic() + SECONDS

    def serve(self, *arguments, out="run"):
        out = self._folder / out
        return self._start(
            "parameter_server.py", "--listen", self._address, "--rounds", self.rounds, "--out", out, *arguments
        )

    def work(self, *arguments):
        return self._start("worker.py", self._address, *arguments)

    def _start(self, name, *arguments):
        log = self._folder / f"{len(self._processes)}.log"
        process = start(name, *arguments, log=log, folder=self._folder)
        self._processes.append((process, log))
        return process

    def log(self, process):
        return next(log for other, log in self._processes if other is process).read_text(encoding="utf-8")

    def end_of(self, process):
        """Wait for the end of a process, and return its exit code."""
        return process.wait(max(0.1, self._deadline - time.monotonic()))

    def wait_for_round(self, number):
        trace = self._folder / "run" / "trace.jsonl"
        until(
            lambda: trace.exists() and trace.read_text(encoding="utf-8").count('"stepped"') >= number,
            f"round {number}",
            seconds=self._deadline - time.monotonic(),
            log=lambda: "\n".join(self.log(process) for process, _ in self._processes),
        )

    def end(self):
        for process, _ in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(20)


@contextmanager
def _machines(folder):
    machines = Machines(folder)
    try:
        yield machines
    finally:
        machines.end()


def _block(language):
    return re.search(rf"```{language}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)[1]


def _weights(run, network):
    """Return the weights that the guide's script finds in the folder of a run, with a script's `network`."""
    (code,) = blocks_run_by("guides/spot-machines.md", f"{HERE}::test_weights_are_read_from_a_checkpoint")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        Path(folder, "runs").mkdir()
        Path(folder, "runs", "spot").symlink_to(run)
        patch.chdir(folder)
        patch.setitem(sys.modules, "parameter_server", types.SimpleNamespace(network=network))
        exec(code, {})
        return torch.load("model.pt")


def _same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _counts(text):
    found = re.findall(r"rank \d: (\d+) in time, (\d+) one round late", text)
    return [int(in_time) for in_time, _ in found], [int(late) for _, late in found]
