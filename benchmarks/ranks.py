"""Ranks on the hosts of a cable or a switch, or on this machine, and the lines that rank 0 writes: no wait is for ever.

A rank is `python -m MODULE FOLDER RANK PLAN`; rank 0 appends a line of JSON to FOLDER/lanes-0.jsonl for every figure.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.cable import Cable, Switch
from benchmarks.output import progress_bar

ROOT = Path(__file__).parents[1]
LINE_SECONDS = 180.0


def measured(
    name: str,
    module: str,
    plan: str,
    labels: Sequence[str],
    cable: Cable | Switch | None,
    folder: Path,
    *,
    ranks_per_host: int = 1,
) -> list[dict[str, Any]]:
    """Start the ranks, host after host, and read a line of rank 0 for each of the labels; no rank outlives this.

    Without a cable this machine is the one host.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks_per_host * (1 if cable is None else len(cable.hosts))):
            command = [sys.executable, "-m", module, str(folder), str(rank), plan]
            interface = "lo"
            if cable is not None:
                command = ["ip", "netns", "exec", cable.hosts[rank // ranks_per_host], *command]
                interface = cable.interfaces[rank // ranks_per_host]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
            with (folder / f"rank-{rank}.log").open("wb") as log:
                ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        return _lines(name, labels, ranks, folder)
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait(20)


def _lines(
    name: str, labels: Sequence[str], ranks: Sequence[subprocess.Popen[bytes]], folder: Path
) -> list[dict[str, Any]]:
    """Wait for all lines; an error as soon as a rank ends badly or nothing comes any more."""
    found: list[dict[str, Any]] = []
    deadline = time.monotonic() + LINE_SECONDS
    with progress_bar() as progress:
        bar = progress.add_task(name, total=len(labels))
        while len(found) < len(labels):
            before = len(found)
            found = _read(folder / "lanes-0.jsonl")
            progress.update(
                bar, completed=len(found), description=f"{name}: {labels[min(len(found), len(labels) - 1)]}"
            )
            if len(found) > before:
                deadline = time.monotonic() + LINE_SECONDS
            bad = [rank for rank, process in enumerate(ranks) if process.poll()]
            if bad or time.monotonic() > deadline:
                log = (folder / f"rank-{bad[0] if bad else 0}.log").read_text(encoding="utf-8", errors="replace")
                missing = labels[min(len(found), len(labels) - 1)]
                raise ValueError(f"{name}: no figures for {missing!r}:\n{log[-2000:]}")
            time.sleep(0.1)
    return found


def _read(file: Path) -> list[dict[str, Any]]:
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def free_address() -> str:
    """Return an address of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let a SIGTERM end what is within as an exception does: namespaces outlive the process that made them."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
