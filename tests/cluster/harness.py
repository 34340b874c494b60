"""Real processes for tests: a server, workers, and ways to hurt them. Every wait has a deadline.

with Cluster(tmp_path, workers=4, k=3) as cluster:     # `paceline serve` and four workers, on loopback
    cluster.until_round(10)
    cluster.kill_worker(2)
    cluster.until_round(cluster.round + 10)
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from paceline.traces.checked_lines import checksum_of
from paceline.traces.journal import Arrived, StepRecord, WorkerJoined, WorkerLeft, record_from
from tests import warm
from tests.waiting import DEADLINE_SECONDS, until

PACELINE = [sys.executable, "-m", "paceline"]


class Cluster:
    """`paceline serve` and workers on this machine. `settings` are options of the recipe, without dashes in front."""

    def __init__(self, folder, *, workers=4, strategy="lgc", k=3, rounds=100_000, start=None, settings=(), serve=()):
        self.folder, self.run = Path(folder), Path(folder) / "run"
        self.workers, self.start = workers, workers if start is None else start
        self._packs = []
        self._port = None
        self._read_bytes, self._checksum, self._records = 0, 0, []
        self._log_path = self.folder / "server.log"
        self._options = [
            "--workers", str(workers), "--strategy", strategy, "--k", str(k), "--rounds", str(rounds),
            "--split", "iid", "--server.silence-seconds", "3", "--server.gather-seconds", "60", "--target-loss", "none",
        ]  # fmt: skip
        for setting in settings:
            self._options += [f"--{setting[0]}", str(setting[1])]
        self._serve = list(serve)
        self.server = None

    def __enter__(self):
        pack = self.prepare_workers(range(self.start)) if self.start else None  # it loads torch while the server does
        self.start_server()
        if pack is not None:
            self.let_join(pack)
        return self

    def __exit__(self, *error):
        for process in [self.server, *self._packs]:
            end(process)
        for pid in set(self.pids.values()) - {os.getpid()}:  # some tests are workers themselves
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # -- processes ---------------------------------------------------------------------------------------------

    def start_server(self, *, resume=False):
        """Start the server, the first time on a free port and later on the same one."""
        listen = ["--listen", f"127.0.0.1:{self._port or 0}"]
        what = ["--resume", str(self.run)] if resume else ["--out", str(self.run), *self._options]
        before = self.log.count("server at") if self._log_path.exists() else 0
        with self._log_path.open("ab") as log:
            self.server = warm.Popen([*PACELINE, "serve", *listen, *what, *self._serve], stdout=log, stderr=log)

        def opened():
            assert self.server.poll() is None, f"the server ended with {self.server.poll()}:\n{self.log}"
            found = re.findall(r"server at 127\.0\.0\.1:(\d+)", self.log)
            return int(found[-1]) if len(found) > before else None

        self._port = self.until(opened, "the server opens")

    @property
    def address(self):
        return f"127.0.0.1:{self._port}"

    def add_workers(self, numbers):
        """Start workers with these numbers, forked from one process."""
        self.let_join(self.prepare_workers(numbers))

    def prepare_workers(self, numbers):
        """Start workers that wait for `let_join`: they have loaded torch by then."""
        numbers = ",".join(map(str, numbers))
        pack = warm.Popen(
            [sys.executable, "-m", "paceline.runs.local_workers", "--numbers", numbers],
            stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, finalized=False,
        )  # fmt: skip
        self._packs.append(pack)
        return pack

    def let_join(self, pack):
        """Tell workers that wait where the server is."""
        pack.stdin.write(f"{self.address}\n".encode())
        pack.stdin.close()

    def kill_worker(self, number):
        """kill -9."""
        os.kill(self.pids[number], signal.SIGKILL)

    def signal_worker(self, number, signum):
        os.kill(self.pids[number], signum)

    def kill_server(self):
        self.server.kill()
        self.server.wait(10)

    # -- what is seen ------------------------------------------------------------------------------------------

    @property
    def log(self):
        return self._log_path.read_text() if self._log_path.exists() else ""

    @property
    def records(self):
        """All whole records of the trace; each line is read once."""
        path = self.run / "trace.jsonl"
        if path.exists():
            with path.open("rb") as lines:
                lines.seek(self._read_bytes)
                while (line := lines.readline()).endswith(b"\n"):
                    self._records.append(record_from(line, self._checksum))
                    self._checksum = checksum_of(line)
                    self._read_bytes += len(line)
        return tuple(self._records)

    def events(self, kind):
        """The records of one kind."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def round(self):
        """Steps the model has taken, as the trace says."""
        steps = [record.version + 1 for record in self.records if isinstance(record, StepRecord)]
        return steps[-1] if steps else 0

    @property
    def pids(self):
        """Process ids of the workers, by number: the newest that joined under it."""
        found = {}
        for record in self.records:
            if isinstance(record, WorkerJoined):
                found[record.worker] = int(record.host.rpartition("pid ")[2])
        return found

    @property
    def alive(self):
        """The workers that take part, as the trace says."""
        members = set()
        for record in self.records:
            if isinstance(record, WorkerJoined):
                members.add(record.worker)
            elif isinstance(record, WorkerLeft):
                members.discard(record.worker)
        return members

    def until(self, happened, what, *, seconds=DEADLINE_SECONDS):
        """Wait for something, and return it; the server's log is in the failure."""
        return until(happened, what, seconds=seconds, log=lambda: self.log)

    def until_round(self, number, *, seconds=DEADLINE_SECONDS):
        self.until(lambda: self.round >= number, f"round {number}", seconds=seconds)

    def until_goes_on(self, rounds=5, *, seconds=DEADLINE_SECONDS):
        """Training goes on, from where it is now."""
        self.until_round(self.round + rounds, seconds=seconds)

    def until_log(self, pattern, *, seconds=DEADLINE_SECONDS):
        """A line of the server's log matches; returns it."""

        def line():
            return next((text for text in self.log.splitlines() if re.search(pattern, text)), None)

        return self.until(line, f"a line like {pattern!r}", seconds=seconds)

    def until_alive(self, numbers, *, seconds=DEADLINE_SECONDS):
        self.until(lambda: self.alive == set(numbers), f"alive: {sorted(numbers)}", seconds=seconds)

    def stop(self, *, seconds=DEADLINE_SECONDS):
        """SIGTERM, and wait for the end; returns the exit code."""
        self.server.terminate()
        return self.server.wait(seconds)

    def delivered(self, worker, *, since=0):
        """Gradients of a worker that have arrived at a version not below `since`."""
        return sum(
            arrival.worker == worker and arrival.version >= since
            for record in self.events(StepRecord | Arrived)
            for arrival in record.arrivals
        )

    def until_delivers(self, worker, *, seconds=DEADLINE_SECONDS):
        """A worker's gradients come in, from now on."""
        since = self.round
        self.until(lambda: self.delivered(worker, since=since), f"worker {worker} delivers", seconds=seconds)

    def replay(self):
        """What `paceline replay` says of the run."""
        command, settings = [*PACELINE, "replay", str(self.run), "--json"], {"capture_output": True, "text": True}
        found = warm.run(command, timeout=300, finalized=False, **settings)
        assert found.stdout, found.stderr
        return json.loads(found.stdout)


def end(process):
    """End a process that a test started."""
    if process is not None and process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)
