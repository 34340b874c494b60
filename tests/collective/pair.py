"""Two processes that train together, and do what a test tells them: a name and settings go in, what it found comes out.

    the test  --  {"job": "train", "codec": "qsgd"}  ->  both processes, on stdin
              <-  {"result": {...}} or {"error": ...}  --  each of them, on stdout

Starting torch takes seconds, so one pair serves many tests.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_SECONDS, JOB_SECONDS = 60.0, 60.0


class JobError(Exception):
    """What a job raised, with its trace back."""


class Pair:
    """Two ranks on gloo, on the loopback."""

    def __init__(self, folder):
        self._folder = Path(folder)
        self._ranks = []
        self._unread = [b"", b""]
        self._lost = False  # a rank that has missed its time would answer a later question with an earlier answer

    def __enter__(self):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for rank in range(2):
            command = [sys.executable, "-m", "tests.collective.rank", str(self._folder / "store"), str(rank)]
            with (self._folder / f"rank-{rank}.log").open("wb") as log:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
                self._ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))
        self._answers((0, 1), START_SECONDS)
        return self

    def __exit__(self, *error):
        for rank in self._ranks:
            rank.kill()
            rank.wait(10)
            rank.stdin.close()
            rank.stdout.close()

    def do(self, job, *, ranks=(0, 1), seconds=JOB_SECONDS, **settings):
        """Let the ranks do a job; what each of them returned."""
        assert not self._lost, "the pair has not answered an earlier job"
        for rank in ranks:
            self._ranks[rank].stdin.write(json.dumps({"job": job, **settings}).encode() + b"\n")
            self._ranks[rank].stdin.flush()
        return self._answers(ranks, seconds)

    def kill(self, rank):
        """kill -9."""
        self._ranks[rank].kill()
        self._ranks[rank].wait(10)

    def _answers(self, ranks, seconds):
        deadline = time.monotonic() + seconds
        self._lost = True
        answers = [json.loads(self._line(rank, deadline)) for rank in ranks]
        self._lost = False
        errors = [f"rank {rank}: {answer['error']}" for rank, answer in zip(ranks, answers, strict=True)
                  if "error" in answer]  # fmt: skip
        if errors:
            raise JobError("\n".join(errors))
        return [answer["result"] for answer in answers]

    def _line(self, rank, deadline):
        """The next line that a rank says."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._ranks[rank].stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread[rank]:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise JobError(f"rank {rank} has not answered in time\n{self._log(rank)}")
                read = os.read(self._ranks[rank].stdout.fileno(), 1 << 16)
                if not read:
                    raise JobError(f"rank {rank} is gone\n{self._log(rank)}")
                self._unread[rank] += read
        line, _, self._unread[rank] = self._unread[rank].partition(b"\n")
        return line

    def _log(self, rank):
        return (self._folder / f"rank-{rank}.log").read_text(errors="replace")[-2000:]
