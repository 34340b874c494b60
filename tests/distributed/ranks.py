"""A few processes that train together, and do what a test tells them.

A name and settings go in, what it found comes out:

    the test  --  {"job": "train", "codec": "qsgd"}  ->  all processes, on stdin
              <-  {"result": {...}} or {"error": ...}  --  each of them, on stdout

Starting torch takes seconds, so one group of processes serves many tests.
"""

from __future__ import annotations

import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests import warm
from tests.waiting import until

ROOT = Path(__file__).parents[2]
START_SECONDS, JOB_SECONDS = 60.0, 60.0


class JobError(Exception):
    """What a job raised, with its trace back."""


class Ranks:
    """Some ranks on gloo, on the loopback; `jobs` names the module of what they can be told to do."""

    def __init__(self, folder, world, jobs):
        self._folder = Path(folder)
        self._world, self._jobs = world, jobs
        self._unread = [b""] * world
        self._lost = False  # a rank that has missed its time would answer a later question with an earlier answer

    def __enter__(self):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        questions, answers = ([os.pipe() for _ in range(self._world)] for _ in range(2))
        self._questions, self._answers = [ends[1] for ends in questions], [ends[0] for ends in answers]
        theirs = [[asked[0], told[1]] for asked, told in zip(questions, answers, strict=True)]
        given = list(itertools.chain(*theirs))
        command = [sys.executable, "-m", "tests.distributed.rank", str(self._folder), self._jobs, json.dumps(theirs)]
        with (self._folder / "start.log").open("wb") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "pass_fds": given}
            self._parent = warm.Popen(command, cwd=ROOT, env=environment, finalized=False, **pipes)
        for end in given:
            os.close(end)
        self.answers(range(self._world), START_SECONDS)
        self._pids = json.loads(self._parent.stdout.readline())
        return self

    def __exit__(self, *error):
        self._parent.stdin.close()  # it ends the ranks, and itself
        try:
            self._parent.wait(20)
        except subprocess.TimeoutExpired:
            self._parent.kill()
            self._parent.wait(10)
        self._parent.stdout.close()
        for end in (*self._questions, *self._answers):
            os.close(end)

    def do(self, job, *, ranks=None, seconds=JOB_SECONDS, **settings):
        """Let the ranks do a job; what each of them returned."""
        self.tell(job, ranks=ranks, **settings)
        return self.answers(ranks, seconds)

    def tell(self, job, *, ranks=None, **settings):
        """Let the ranks begin a job; `answers` has what they return."""
        assert not self._lost, "the ranks have not answered an earlier job"
        for rank in range(self._world) if ranks is None else ranks:
            os.write(self._questions[rank], json.dumps({"job": job, **settings}).encode() + b"\n")

    def kill(self, rank):
        """kill -9; when this returns, the rank and its connections are no more."""
        os.kill(self._pids[rank], signal.SIGKILL)
        stat = Path(f"/proc/{self._pids[rank]}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", f"rank {rank} is dead")

    def freeze(self, rank):
        """kill -STOP; `thaw` lets it go on."""
        os.kill(self._pids[rank], signal.SIGSTOP)

    def thaw(self, rank):
        """kill -CONT."""
        os.kill(self._pids[rank], signal.SIGCONT)

    def answers(self, ranks=None, seconds=JOB_SECONDS):
        """What these ranks return from the job that they were told to do."""
        ranks = range(self._world) if ranks is None else ranks
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
            selector.register(self._answers[rank], selectors.EVENT_READ)
            while b"\n" not in self._unread[rank]:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise JobError(f"rank {rank} has not answered in time\n{self._log(rank)}")
                read = os.read(self._answers[rank], 1 << 16)
                if not read:
                    raise JobError(f"rank {rank} is gone\n{self._log(rank)}")
                self._unread[rank] += read
        line, _, self._unread[rank] = self._unread[rank].partition(b"\n")
        return line

    def _log(self, rank):
        logs = [self._folder / name for name in ("start.log", f"rank-{rank}.log")]
        return "".join(log.read_text(errors="replace")[-2000:] for log in logs if log.exists())
