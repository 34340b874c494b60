"""The scripts of examples/, run as a user runs them: `python examples/NAME.py ...`, or the same on several ranks.

    texts = run("infobatch.py", "--epochs", "2")
    texts = run("hpsgd_torchrun.py", "--steps", "20", ranks=2)     # what each rank printed, by rank

Ranks have the environment that torchrun gives them. Each is forked from a process that has loaded torch (`tests.warm`).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import warm

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SECONDS = 150.0


def run(name, *arguments, ranks=None, folder=None, environment=None, seconds=SECONDS, network=None):
    """Run a script to its end, in `folder` or one of its own; return what each process printed, stderr included.

    `network` is the name of a network namespace in which the processes are.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-example-") as own:
        port = _free_port()
        processes, logs = [], []
        try:
            for rank in range(ranks or 1):
                logs.append(Path(own, f"rank-{rank}.log"))
                place = {} if ranks is None else _place(rank, ranks, port)
                processes.append(
                    start(
                        name,
                        *arguments,
                        log=logs[-1],
                        folder=folder or own,
                        environment=place | (environment or {}),
                        network=network,
                    )
                )
            deadline = time.monotonic() + seconds
            for process in processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait(20)
        texts = [log.read_text(errors="replace") for log in logs]
    ended = [process.returncode for process in processes]
    assert ended == [0] * len(ended), f"{name} ended with {ended}:\n" + "\n".join(text[-4000:] for text in texts)
    return texts


def start(name, *arguments, log, folder, environment=None, network=None):
    """Start a script; what it prints goes to the file `log`."""
    place = ["ip", "netns", "exec", network] if network is not None else []
    command = [*place, sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | (environment or {})
    with Path(log).open("wb") as out:
        return warm.Popen(command, cwd=folder, env=settings, stdout=out, stderr=out, finalized=False)


def _place(rank, world, port):
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    return {name: str(number) for name, number in numbers.items()} | where


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
