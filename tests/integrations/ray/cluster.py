"""A real Ray cluster of several raylets on this machine, in a network namespace of its own.

    with RayCluster(nodes={"head": 1, "a": 1}) as cluster:
        cluster.run(["-m", "paceline", "train", "--on", "ray", ...])      a caller, in the same namespace
        cluster.add("b", cpus=1); cluster.kill("a")                       a node joins; one dies, with its processes

Every node has an address of its own (127.0.0.1, 127.0.0.2, ...), so a server can be reached at its node's alone.
Outside of a namespace `ray.init` rewrites such addresses to that of the network card, and hangs. `be_host` is the
process that starts the raylets; it takes commands on stdin, and ends with its stdin.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.integrations.ranks import ROOT, Network

HOST = "from tests.integrations.ray.cluster import be_host; be_host()"
START_SECONDS = 120.0
STORE_BYTES = 80 * 2**20
END_SECONDS = 240.0
SYSTEM = {
    "health_check_initial_delay_ms": 2000,  # a lost node is noticed soon
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "worker_niceness": 0,  # at Ray's own 15, a run beside other tests gets what they leave: a tenth of a processor
}


class RayCluster:
    """The cluster, for the `with`; `folder` is where its callers work."""

    def __init__(self, nodes):
        self._nodes, self._network, self._lines = dict(nodes), Network(), queue.Queue()
        self.addresses, self.address = {}, ""

    def __enter__(self):
        with contextlib.ExitStack() as ending:  # what was begun is ended as well where a node does not come up
            ending.enter_context(self._network)
            self.folder = self._made(ending, "paceline-on-ray-")
            self._sessions = self._made(ending, "ray-")  # a short name: sockets are there, and may have 107 letters
            self.gate, self.temporary = self.folder / "gate", self.folder / "temporary"
            self.temporary.mkdir()
            self._host = self.start(["-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            ending.callback(self._end_processes)
            threading.Thread(target=self._read, daemon=True).start()
            for name, cpus in self._nodes.items():
                self.add(name, cpus=cpus)
            self._ending = ending.pop_all()
        return self

    def __exit__(self, *error):
        self._ending.close()

    @staticmethod
    def _made(ending, prefix):
        return Path(ending.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)))

    def _end_processes(self):
        with contextlib.suppress(OSError):
            self._host.stdin.close()
        try:
            self._host.wait(30)
        except subprocess.TimeoutExpired:
            self._host.kill()
        inside = subprocess.run(
            ["ip", "netns", "pids", self._network.name], capture_output=True, text=True, check=False
        )
        for pid in inside.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _read(self):
        for line in self._host.stdout:
            if line.startswith("answer "):
                self._lines.put(json.loads(line.removeprefix("answer ")))

    def _ask(self, **command):
        self._host.stdin.write(json.dumps(command) + "\n")
        self._host.stdin.flush()
        return self._lines.get(timeout=START_SECONDS)

    def add(self, name, *, cpus):
        """Start a node with so many CPUs; it has joined when this returns."""
        found = self._ask(do="add", name=name, cpus=cpus)
        self.address, self.addresses[name] = found["cluster"], found["address"]

    def kill(self, name):
        """Kill a node: its raylet and every process of it."""
        self._ask(do="kill", name=name)

    @property
    def environment(self):
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        own = {
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "disabled",
            "PACELINE_GATE": str(self.gate),
        }
        own |= {"TMPDIR": str(self.temporary), "RAY_TMPDIR": str(self._sessions)}
        own |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "TERM": "dumb"}
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
        return inherited | own | ({"RAY_ADDRESS": self.address} if self.address else {})

    def start(self, arguments, **options):
        """Start python with these arguments in the cluster's namespace."""
        command = ["ip", "netns", "exec", self._network.name, sys.executable, *arguments]
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, text=True, **options)

    def caller(self, arguments):
        """Start a caller whose stdout and stderr are read as they come."""
        return Caller(self.start(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))

    def run(self, arguments, *, seconds=END_SECONDS):
        """Run a caller to its end; return its exit code and all that it printed."""
        caller = self.caller(arguments)
        return caller.end(seconds), caller.text

    def processes(self, title):
        """Return the processes of the namespace whose title has these words, with their node's address."""
        inside = subprocess.run(["ip", "netns", "pids", self._network.name], capture_output=True, text=True, check=True)
        found = []
        for pid in map(int, inside.stdout.split()):
            with contextlib.suppress(OSError):
                if title in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                    found.append(pid)
        return found


class Caller:
    """A process whose lines can be waited for."""

    def __init__(self, process):
        self.process, self._lines, self._more = process, [], threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self._more:
                self._lines.append(line)
                self._more.notify_all()
        with self._more:
            self._lines.append("")
            self._more.notify_all()

    @property
    def text(self):
        return "".join(self._lines)

    def wait_for(self, words, *, after=0, seconds=END_SECONDS):
        """Wait for a line with these words, the first after so many lines; return the number of lines up to it."""
        deadline = time.monotonic() + seconds
        with self._more:
            while True:
                for number in range(after, len(self._lines)):
                    if words in self._lines[number]:
                        return number + 1
                over = self._lines[-1:] == [""]
                if over or not self._more.wait(max(0.0, deadline - time.monotonic())):
                    raise AssertionError(
                        f"{words!r} did not come {'at all' if over else f'in {seconds:g} s'}:\n{self.text}"
                    )

    def end(self, seconds=END_SECONDS):
        """Wait for the end and return the exit code; a process that does not end is killed, and that is an error."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it did not end within {seconds:g} s:\n{self.text}") from None
        self._reader.join(10)
        return code


# -- the process that has the raylets ----------------------------------------------------------------------------------


def be_host():
    """Start and kill nodes as stdin says; end them all when it ends."""
    import psutil
    from ray.cluster_utils import Cluster

    cluster, nodes, count = None, {}, 0
    try:
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "add":
                count += 1
                address = f"127.0.0.{count}"
                settings = {"num_cpus": command["cpus"], "node_ip_address": address, "object_store_memory": STORE_BYTES}
                if cluster is None:
                    head = settings | {"include_dashboard": False, "_system_config": SYSTEM}
                    cluster = Cluster(initialize_head=True, head_node_args=head)
                    nodes[command["name"]] = cluster.head_node
                else:
                    nodes[command["name"]] = cluster.add_node(**settings)
                answer = {"cluster": cluster.address, "address": address}
            else:
                raylet = nodes.pop(command["name"]).all_processes["raylet"][0].process
                tree = [psutil.Process(raylet.pid), *psutil.Process(raylet.pid).children(recursive=True)]
                for process in tree:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                answer = {}
            print("answer " + json.dumps(answer), flush=True)
    finally:
        if cluster is not None:
            cluster.shutdown()
