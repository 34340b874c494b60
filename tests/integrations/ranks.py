"""Ranks of a launch, as torchrun starts them, each a script of a framework; and the bytes that passed between them.

    with Network() as network:
        found = launch("tests.integrations.huggingface.job", {"part": "averaging"}, world=2, network=network)
        network.sent_bytes()                    # by the interface's own count

A script is a module with `def job(**settings)`, which returns what JSON can hold. Every launch is of new processes,
which are forked from one that has loaded torch and the frameworks.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import warm
from tests.launches import free_port, place, run_all

ROOT = Path(__file__).parents[2]
JOB_SECONDS = 120.0
MAIN = "import sys; from tests.integrations.ranks import be; be(*sys.argv[1:])"


class Network:
    """A network namespace with nothing but a loopback interface, which counts what passes through it."""

    count = 0

    def __init__(self):
        Network.count += 1
        self.name = f"pi{os.getpid()}x{Network.count}"

    def __enter__(self):
        if os.geteuid() or not shutil.which("ip"):
            pytest.skip("bytes on an interface: a network namespace needs root and ip (iproute2)")
        subprocess.run(["ip", "netns", "add", self.name], check=True)
        subprocess.run(["ip", "-n", self.name, "link", "set", "lo", "up"], check=True)
        return self

    def __exit__(self, *error):
        subprocess.run(["ip", "netns", "del", self.name], check=False)

    def sent_bytes(self):
        command = ["ip", "netns", "exec", self.name, "cat", "/sys/class/net/lo/statistics/tx_bytes"]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


class JobError(Exception):
    """What a rank raised, or printed before it ended, by rank."""


def launch(module, settings=None, *, world=2, network=None, seconds=JOB_SECONDS, environment=None, check=True):
    """Run `module.job(**settings)` on every rank; return what each returned, in the order of the ranks.

    Where a rank fails, JobError has the last lines of each; with `check=False` its JobError stands in its place.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as folder:
        logs = [Path(folder, f"rank-{rank}.log") for rank in range(world)]
        found = [Path(folder, f"rank-{rank}.json") for rank in range(world)]
        port = free_port() if network is None else 29500  # nobody else is in a namespace
        where = ["ip", "netns", "exec", network.name] if network is not None else []

        def start(rank):
            command = [*where, sys.executable, "-c", MAIN, module, json.dumps(settings or {}), str(found[rank])]
            env = os.environ | place(rank, world, port) | (environment or {})
            with logs[rank].open("wb") as log:
                return warm.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, finalized=False)

        processes = run_all([functools.partial(start, rank) for rank in range(world)], seconds)
        answers = [_answer(*each) for each in zip(range(world), found, logs, processes, strict=True)]
    failed = [each for each in answers if isinstance(each, JobError)]
    if failed and check:
        raise JobError("\n".join(map(str, failed)))
    return answers


def _answer(rank, found, log, process):
    if process.returncode == 0 and found.exists():
        return json.loads(found.read_text(encoding="utf-8"))
    last_lines = log.read_text(encoding="utf-8", errors="replace")[-6000:]
    return JobError(f"rank {rank} ended with {process.returncode}:\n{last_lines}")


def be(module, settings, found):
    """Be a rank: run the job, and leave what it returned."""
    import importlib

    import torch

    torch.set_num_threads(1)
    answer = importlib.import_module(module).job(**json.loads(settings))
    Path(found).write_text(json.dumps(answer), encoding="utf-8")
