"""Two hosts and a cable between them: network namespaces of this machine, at 200 Mbit/s. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess

SERVER, WORKERS, PORT = "10.77.0.1", "10.77.0.2", 29400
SHAPE = ("root", "tbf", "rate", "200mbit", "burst", "256kb", "latency", "50ms")


def _run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=20)


def why_not():
    if os.geteuid() != 0:
        return "two hosts: making network namespaces needs root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "two hosts: ip and tc (iproute2) are needed"
    name = f"pl{os.getpid()}x"
    made = _run("ip", "netns", "add", name)
    _run("ip", "netns", "del", name)
    return f"two hosts: no network namespace can be made ({made.stderr.strip()})" if made.returncode else None


class Cable:
    """Two namespaces joined by a pair of interfaces."""

    def __init__(self):
        number = os.getpid()
        self.server, self.workers = f"pl{number}s", f"pl{number}w"
        self._ends = {self.server: f"pv{number}s", self.workers: f"pv{number}w"}

    def __enter__(self):
        try:
            for host in self._ends:
                _do("ip", "netns", "add", host)
            names = list(self._ends.values())
            _do("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
            for (host, interface), address in zip(self._ends.items(), (SERVER, WORKERS), strict=True):
                _do("ip", "link", "set", interface, "netns", host)
                _do("ip", "-n", host, "addr", "add", f"{address}/24", "dev", interface)
                _do("ip", "-n", host, "link", "set", "lo", "up")
                _do("ip", "-n", host, "link", "set", interface, "up")
                _do("tc", "-n", host, "qdisc", "add", "dev", interface, *SHAPE)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        for host, interface in self._ends.items():
            _run("ip", "link", "del", interface)  # one that never got into its namespace
            _run("ip", "netns", "del", host)

    def bytes_at_server(self):
        """What the server's interface has sent and received so far, by its own count."""
        folder = f"/sys/class/net/{self._ends[self.server]}/statistics"
        counts = ("ip", "netns", "exec", self.server, "cat", f"{folder}/tx_bytes", f"{folder}/rx_bytes")
        sent, received = _run(*counts).stdout.split()
        return int(sent), int(received)

    def cut(self):
        _do("ip", "-n", self.server, "link", "set", self._ends[self.server], "down")

    def mend(self):
        _do("ip", "-n", self.server, "link", "set", self._ends[self.server], "up")


def _do(*command):
    done = _run(*command)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
