"""The scripts of examples/, run as a user runs them: `python examples/NAME.py ...`, or the same on several ranks.

    texts = run("infobatch.py", "--epochs", "2")
    texts = run("hpsgd_torchrun.py", "--epochs", "2", ranks=2)     # what each rank printed, by rank

Ranks have the environment that torchrun gives them. Each is forked from a process that has loaded torch (`tests.warm`).
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path

from tests import warm
from tests.launches import free_port, place, run_all

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SECONDS = 120.0  # of one launch: two of them are within the time that a test has


def run(name, *arguments, ranks=None, folder=None, ends_with=0, network=None):
    """Run a script to its end, in `folder` or one of its own; return what each process printed, stderr included.

    `network` is the name of a network namespace in which the processes are.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-example-") as own:
        port, starts = free_port(), []
        logs = [Path(own, f"rank-{rank}.log") for rank in range(ranks or 1)]
        for rank, log in enumerate(logs):
            launched = {} if ranks is None else place(rank, ranks, port)
            words = {"log": log, "folder": folder or own, "environment": launched, "network": network}
            starts.append(functools.partial(start, name, *arguments, **words))
        processes = run_all(starts, SECONDS)
        texts = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    ended = [process.returncode for process in processes]
    last_lines = "\n".join(text[-4000:] for text in texts)
    assert ended == [ends_with] * len(ended), f"{name} ended with {ended}:\n{last_lines}"
    return texts


def start(name, *arguments, log, folder, environment=None, network=None):
    """Start a script; what it prints goes to the file `log`."""
    place = ["ip", "netns", "exec", network] if network is not None else []
    command = [*place, sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | (environment or {})
    with Path(log).open("wb") as out:
        return warm.Popen(command, cwd=folder, env=settings, stdout=out, stderr=out, finalized=False)
