"""A server, its workers and their bad guests as real processes, and what can be seen of them from outside."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORKERS = 6
SILENCE_SECONDS = 1.0
POLL_SECONDS = 0.02
OPEN_WITHIN_SECONDS = 90.0
RECIPE = {
    "workers": WORKERS,
    "strategy": "lgc",
    "k": "auto",
    "rounds": 10_000_000,
    "target-loss": "none",
    "evaluate-every": 100,
    "evaluation-samples": 200,
    "batch-size": 8,
    "blocks": 4,
    "persistence": 1,
    "delay.shift-seconds": 0.12,
    "delay.mean-seconds": 0.05,
    "inject-delays": "true",
    "checkpoint-every": 5,
    "server.silence-seconds": SILENCE_SECONDS,
    "server.gather-seconds": 3,
    "server.most-workers": 16,
}


class Failed(Exception):  # noqa: N818 - what happened
    """The soak is over: something is not as it must be, in one line."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a process holds."""

    rss_bytes: int
    threads: int
    files: int


def read_process(pid: int) -> Reading:
    """What a process holds now."""
    status = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    return Reading(
        rss_bytes=int(status["VmRSS"]) * 1024,
        threads=int(status["Threads"]),
        files=len(os.listdir(f"/proc/{pid}/fd")),
    )


def zombies_of(parents: set[int]) -> list[int]:
    """Processes that have ended and that one of these has not taken note of."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state == "Z" and int(parent) in parents:
                    found.append(int(folder.name))
    return found


class Tail:
    """What a trace says, read as it grows: steps taken in all (also those that became void), and who is in."""

    def __init__(self, path: Path) -> None:
        self.steps = self.refused = self.checkpoints = self.resumed = self.version = 0
        self.members: dict[int, int] = {}
        self._path, self._offset, self._rest = path, 0, b""

    def read(self) -> None:
        """Read on; half a line is left for later (a server that is killed leaves one, and the next cuts it off)."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._take(json.loads(line))

    @property
    def there(self) -> bool:
        """Whether the file has all that was read from it."""
        return self._path.exists() and self._path.stat().st_size >= self._offset

    def step_back(self) -> None:
        """Read on from the file's last whole line, if that is before the place that was read last."""
        data = self._path.read_bytes()
        self._offset = min(self._offset, data.rfind(b"\n") + 1)

    def _take(self, record: dict[str, Any]) -> None:
        match record["kind"]:
            case "stepped":
                self.steps, self.version = self.steps + 1, record["version"] + 1
            case "worker_joined":
                self.members[record["worker"]] = int(record["host"].rpartition("pid ")[2])
            case "worker_left":
                self.members.pop(record["worker"], None)
            case "refused":
                self.refused += 1
            case "checkpointed":
                self.checkpoints += 1
            case "resumed":
                self.resumed, self.members = self.resumed + 1, {}
            case "run_ended":
                self.members = {}


class Cluster:
    """The processes. `crew` are the good workers that live, each with its number's wish."""

    def __init__(self, folder: Path, dice: random.Random, log: Callable[[str], None]) -> None:
        self.folder, self.run = folder, folder / "run"
        self.tail = Tail(self.run / "trace.jsonl")
        self.crew: list[int] = []
        self.guests: set[int] = set()
        self.guest_codes: list[int] = []
        self.server: subprocess.Popen[bytes] | None = None
        self._dice, self._log, self._log_path = dice, log, folder / "server.log"
        self._port = 0
        self.ended_well = 0  # workers that were asked to leave, and ended with 0
        self._doomed: dict[int, int] = {}  # by process: the signal that ends it
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._told = b""
        self._ready = False
        self._ordered = 0
        with (folder / "workers.log").open("ab") as errors:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", "tests.long.soak_nursery"],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        os.set_blocking(self._out.fileno(), False)

    @property
    def _out(self) -> Any:
        return self._nursery.stdout

    @property
    def address(self) -> str:
        """Where the server listens."""
        return f"127.0.0.1:{self._port}"

    @property
    def server_pid(self) -> int:
        """The server's process."""
        assert self.server is not None
        return self.server.pid

    @property
    def to_come(self) -> int:
        """Workers that are there, or will be."""
        return len(self.crew) + self._ordered

    # -- the server --------------------------------------------------------------------------------------------

    def open_server(self, *, resume: bool = False) -> None:
        """Start it, and wait until it listens: the first time on a free port, later on the same one."""
        options = [f"--{name}={value}" for name, value in RECIPE.items()]
        what = ["--resume", str(self.run)] if resume else ["--out", str(self.run), *options]
        command = [sys.executable, "-m", "paceline", "serve", "--open", f"--listen={self.address}", *what]
        path = self._log_path
        if resume:
            self.tail.step_back()
        before = path.stat().st_size if path.exists() else 0
        with path.open("ab") as log:
            self.server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        def opened() -> bool:
            text = path.read_bytes()[before:].decode(errors="replace")
            found = re.search(r"server at 127\.0\.0\.1:(\d+)", text)
            if found is None and self.server is not None and self.server.poll() is not None:
                lines = text.strip().splitlines() or ["it said nothing"]
                raise Failed(f"the server did not start: {lines[-1]}")
            self._port = int(found[1]) if found else self._port
            return found is not None

        self.until(opened, "the server listens", seconds=OPEN_WITHIN_SECONDS)

    def refuses_to_resume(self) -> bool:
        """Start the server; whether it ended at once, with one line that says why."""
        before = self._log_path.stat().st_size
        try:
            self.open_server(resume=True)
        except Failed:
            code, said = self.server and self.server.poll(), self._log_path.read_bytes()[before:]
            if code not in (1, 2) or b"Traceback" in said:
                raise Failed(f"the server refused to resume with exit code {code} and not in one line") from None
            self._log(f"refused to resume: {said.decode(errors='replace').strip()[-300:]}")
            return True
        return False

    def close_server(self, signum: int, *, seconds: float = 60.0) -> int:
        """Signal it, and wait for its end; returns its exit code."""
        assert self.server is not None
        self.server.send_signal(signum)
        return self.until_server_ends("the server ends", seconds=seconds)

    def until_server_ends(self, what: str, *, seconds: float) -> int:
        """Wait for the server's end; returns its exit code."""
        server = self.server
        assert server is not None
        self.until(lambda: server.poll() is not None, what, seconds=seconds, server_may_end=True)
        self.tail.read()
        self.tail.members = {}
        return server.returncode

    # -- children ----------------------------------------------------------------------------------------------

    def order(self, kind: str, number: int | None = None, *, address: str = "") -> None:
        """Have a child forked; it is in `crew` or `guests` as soon as the nursery says so."""
        seed = self._dice.getrandbits(32)
        order = {"kind": kind, "address": address or self.address, "number": number, "seed": seed}
        assert self._nursery.stdin is not None
        self._nursery.stdin.write(json.dumps(order).encode() + b"\n")
        self._nursery.stdin.flush()

    def order_worker(self, number: int | None = None, *, after_seconds: float = 0.0) -> None:
        """Have a good worker started, now or later."""
        self._ordered += 1
        self.later(after_seconds, lambda: self.order("worker", number))

    def signal_worker(self, pid: int, signum: int) -> None:
        """Signal a good worker."""
        if signum in (signal.SIGKILL, signal.SIGTERM):
            self._doomed[pid] = signum
            self.crew.remove(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signum)

    def wake(self, pid: int) -> None:
        """SIGCONT, if it still lives."""
        if pid in self.crew or pid in self._doomed:
            os.kill(pid, signal.SIGCONT)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Do something when so much time has passed, while somebody waits for something else."""
        self._due.append((time.monotonic() + seconds, what))

    def poll(self) -> None:
        """See what has happened, and do what is due."""
        now = time.monotonic()
        due = [what for at, what in self._due if at <= now]
        self._due = [(at, what) for at, what in self._due if at > now]
        for what in due:
            what()
        self._told += self._out.read() or b""
        *lines, self._told = self._told.split(b"\n")
        for line in lines:
            self._hear(json.loads(line))
        if self._nursery.poll() is not None:
            raise Failed("the process that forks the workers has ended")
        self.tail.read()

    def _hear(self, told: dict[str, Any]) -> None:
        self._ready = self._ready or "ready" in told
        pid = told.get("started")
        if pid is not None and told["kind"] == "worker":
            self._ordered -= 1
            self.crew.append(pid)
        elif pid is not None:
            self.guests.add(pid)
        ended = told.get("ended")
        if ended is None:
            return
        self._log(f"process {ended} ended with {told['code']}")
        if ended in self.guests:
            self.guests.discard(ended)
            self.guest_codes.append(told["code"])
        signum = self._doomed.pop(ended, None)
        if signum == signal.SIGTERM:
            if told["code"]:
                raise Failed(f"worker process {ended} was asked to leave, and ended with {told['code']} (workers.log)")
            self.ended_well += 1
        if ended in self.crew:
            self.crew.remove(ended)
            raise Failed(f"worker process {ended} ended by itself with {told['code']} (see workers.log)")

    # -- waiting -----------------------------------------------------------------------------------------------

    def until(self, happened: Callable[[], bool], what: str, *, seconds: float, server_may_end: bool = False) -> None:
        """Wait for something to become true; Failed if it does not in time, or the server ends meanwhile."""
        deadline = time.monotonic() + seconds
        while True:
            self.poll()
            if happened():
                return
            if self.server is not None and self.server.poll() is not None and not server_may_end:
                raise Failed(f"the server ended by itself with {self.server.poll()} (see server.log)")
            if time.monotonic() > deadline:
                raise Failed(f"{what}: not within {seconds:g} s")
            time.sleep(POLL_SECONDS)

    def until_nursery(self) -> None:
        """Wait until children can be ordered."""
        self.until(lambda: self._ready, "workers can be forked", seconds=OPEN_WITHIN_SECONDS)

    def until_steps(self, more: int, *, seconds: float) -> None:
        """Training goes on."""
        wanted = self.tail.steps + more
        what = f"{more} more rounds (there are {len(self.tail.members)} workers in)"
        self.until(lambda: self.tail.steps >= wanted, what, seconds=seconds)

    @property
    def parents(self) -> set[int]:
        """Every process that may have children."""
        return {os.getpid(), self._nursery.pid, self.server_pid}

    def end(self) -> None:
        """End every process that was started here."""
        for pid in (*self.crew, *self.guests, *self._doomed):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in (self.server, self._nursery):
            if process is not None:
                with suppress(ProcessLookupError):
                    process.kill()
                process.wait(10)
