"""Whole runs beside the one that is soaked, as the command line starts them: what a run's start and end must be.

    from start to end    a server and two workers: all end with 0, none by a signal
    extended             the same, and the finished run goes on for more rounds; its replay is identical
    into a full disk     a server whose disk cannot take the first checkpoint says so, and ends with 1

A process here is forked from one that has torch loaded, and ends as any Python process does: through the interpreter's
own end, where threads that still run would take it down.
"""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROUNDS = 3
ENDS_WITHIN_SECONDS = 60.0
SMALL_FILE_BYTES = 6000  # a trace's first line fits, a checkpoint does not
RECIPE = ("--workers", "2", "--strategy", "full", "--batch-size", "8", "--evaluation-samples", "100")
RECIPE += ("--split", "iid", "--target-loss", "none", "--rounds")


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process that was forked here, and the file that holds all it said."""

    pid: int
    log: Path

    @property
    def said(self) -> str:
        """What it has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def wait(self) -> int:
        """Return its exit code; one that takes too long is killed."""
        deadline = time.monotonic() + ENDS_WITHIN_SECONDS
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"{self.log.stem} did not end within {ENDS_WITHIN_SECONDS:g} s: {self.said}")
            time.sleep(0.02)


def start(arguments: Sequence[str], log: Path, *, most_file_bytes: int | None = None) -> Process:
    """Fork `paceline ARGUMENTS`; its files can have so many bytes at most."""
    pid = os.fork()
    if pid:
        return Process(pid=pid, log=log)
    from paceline.cli import main

    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if most_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_file_bytes, most_file_bytes))
    sys.exit(main(list(arguments)))  # not caught by anybody up to the interpreter's own end


def run_with_workers(arguments: Sequence[str], folder: Path) -> None:
    """A server and two workers from start to end; AssertionError if one does not end with 0."""
    server = start(["serve", "--listen", "127.0.0.1:0", *arguments], folder / "server.log")
    deadline = time.monotonic() + ENDS_WITHIN_SECONDS
    while not (found := re.search(r"server at (127\.0\.0\.1:\d+)", server.said)):
        ended = os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        listens = f"the server beside does not listen: {server.said}"
        assert ended is None, listens
        assert time.monotonic() < deadline, listens
        time.sleep(0.02)
    workers = [start(["work", found[1], "--threads", "1"], folder / f"worker-{n}.log") for n in range(2)]
    for process in (server, *workers):
        code = process.wait()
        assert code == 0, f"{process.log.stem} of a run beside ended with {code}: {process.said[-2000:]}"


def from_start_to_end(address: str, dice: random.Random, number: int | None) -> None:
    """A run of a few rounds."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-beside-"))
    run_with_workers(["--out", str(folder / "run"), *RECIPE, str(ROUNDS)], folder)
    shutil.rmtree(folder)


def extended(address: str, dice: random.Random, number: int | None) -> None:
    """A finished run that goes on for more rounds, and is replayed."""
    from paceline.runs.replaying import replay

    folder = Path(tempfile.mkdtemp(prefix="paceline-beside-"))
    run_with_workers(["--out", str(folder / "run"), *RECIPE, str(ROUNDS)], folder)
    (folder / "server.log").unlink()
    more = ROUNDS + dice.randint(1, 5)
    run_with_workers(["--resume", str(folder / "run"), "--rounds", str(more)], folder)
    verdict = replay(folder / "run")
    assert not verdict.difference, f"the replay of an extended run differs: {verdict.difference}"
    assert verdict.steps == more, f"an extended run has {verdict.steps} steps, and not {more}"
    shutil.rmtree(folder)


def into_a_full_disk(address: str, dice: random.Random, number: int | None) -> None:
    """A server that cannot write its first checkpoint."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-beside-"))
    arguments = ["serve", "--listen", "127.0.0.1:0", "--out", str(folder / "run"), *RECIPE, str(ROUNDS)]
    server = start(arguments, folder / "server.log", most_file_bytes=SMALL_FILE_BYTES)
    code = server.wait()
    said = server.said
    assert code == 1, f"a server with a full disk ended with {code}: {said[-2000:]}"
    assert "Traceback" not in said, f"a server with a full disk: {said[-2000:]}"
    assert "server at" not in said, f"a server with a full disk took workers in: {said[-2000:]}"
    shutil.rmtree(folder)
