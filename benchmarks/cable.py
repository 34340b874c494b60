"""Hosts and the cables between them: network namespaces of this machine. Needs root and iproute2.

Cable   two hosts, joined
Star    one host in the middle, and others that each have a cable of their own to it
"""

from __future__ import annotations

import os
import shutil
import subprocess

ADDRESSES = "10.77.0.1", "10.77.0.2"
RATE = "200mbit"


def why_not() -> str | None:
    """Why two hosts cannot be had here; None if they can."""
    if os.geteuid() != 0:
        return "two hosts: making network namespaces needs root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "two hosts: ip and tc (iproute2) are needed"
    name = f"pl{os.getpid()}x"
    made = _command("ip", "netns", "add", name)
    _command("ip", "netns", "del", name)
    return f"two hosts: no network namespace can be made ({made.stderr.strip()})" if made.returncode else None


class Cable:
    """Two namespaces joined by a pair of interfaces, each of which sends at most at the rate."""

    def __init__(self, rate: str = RATE) -> None:
        number = os.getpid()
        self.hosts = f"pl{number}a", f"pl{number}b"
        self.interfaces = f"pv{number}a", f"pv{number}b"
        self._shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")

    def __enter__(self) -> Cable:
        try:
            for host in self.hosts:
                _do("ip", "netns", "add", host)
            first, second = self.interfaces
            _do("ip", "link", "add", first, "type", "veth", "peer", "name", second)
            for host, interface, address in zip(self.hosts, self.interfaces, ADDRESSES, strict=True):
                _do("ip", "link", "set", interface, "netns", host)
                _do("ip", "-n", host, "addr", "add", f"{address}/24", "dev", interface)
                _do("ip", "-n", host, "link", "set", "lo", "up")
                _do("ip", "-n", host, "link", "set", interface, "up")
                _do("tc", "-n", host, "qdisc", "add", "dev", interface, *self._shape)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for host, interface in zip(self.hosts, self.interfaces, strict=True):
            _command("ip", "link", "del", interface)  # one that never got into its namespace
            _command("ip", "netns", "del", host)

    def bytes_at_first(self) -> tuple[int, int]:
        """What the first host's interface has sent and received so far, by its own count."""
        folder = f"/sys/class/net/{self.interfaces[0]}/statistics"
        counts = ("ip", "netns", "exec", self.hosts[0], "cat", f"{folder}/tx_bytes", f"{folder}/rx_bytes")
        sent, received = _command(*counts).stdout.split()
        return int(sent), int(received)

    def cut(self) -> None:
        """Let nothing through any more."""
        _do("ip", "-n", self.hosts[0], "link", "set", self.interfaces[0], "down")

    def mend(self) -> None:
        """Let all through again."""
        _do("ip", "-n", self.hosts[0], "link", "set", self.interfaces[0], "up")


class Star:
    """A namespace in the middle, `hub`, and one for every spoke; both ends of each cable send at most at the rate.

    A queue holds what takes a second to send, as those of slow links do.
    """

    def __init__(self, spokes: int, rate: str) -> None:
        number = os.getpid()
        self.hub = f"pl{number}h"
        self.spokes = [f"pl{number}s{spoke}" for spoke in range(spokes)]
        self._shape = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "1000ms")

    def hub_address(self, spoke: int) -> str:
        """Where a spoke finds the hub."""
        return f"10.78.{spoke}.1"

    def _interfaces(self, spoke: int) -> tuple[str, str]:
        return f"ph{os.getpid()}x{spoke}", f"ps{os.getpid()}x{spoke}"

    def __enter__(self) -> Star:
        try:
            for host in (self.hub, *self.spokes):
                _do("ip", "netns", "add", host)
                _do("ip", "-n", host, "link", "set", "lo", "up")
            for number, host in enumerate(self.spokes):
                near, far = self._interfaces(number)
                _do("ip", "link", "add", near, "type", "veth", "peer", "name", far)
                addresses = self.hub_address(number), f"10.78.{number}.2"
                for each, end, address in zip((self.hub, host), (near, far), addresses, strict=True):
                    _do("ip", "link", "set", end, "netns", each)
                    _do("ip", "-n", each, "addr", "add", f"{address}/24", "dev", end)
                    _do("ip", "-n", each, "link", "set", end, "up")
                    _do("tc", "-n", each, "qdisc", "add", "dev", end, *self._shape)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for number in range(len(self.spokes)):
            _command("ip", "link", "del", self._interfaces(number)[0])  # one that never got into its namespace
        for host in (self.hub, *self.spokes):
            _command("ip", "netns", "del", host)

    def bytes_at_hub(self, spoke: int) -> tuple[int, int]:
        """What the hub's end of a cable has sent and received so far, by its own count."""
        folder = f"/sys/class/net/{self._interfaces(spoke)[0]}/statistics"
        counts = _command("ip", "netns", "exec", self.hub, "cat", f"{folder}/tx_bytes", f"{folder}/rx_bytes")
        sent, received = counts.stdout.split()
        return int(sent), int(received)


def _command(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


def _do(*command: str) -> None:
    done = _command(*command)
    if done.returncode:
        raise ValueError(f"{' '.join(command)}: {done.stderr.strip()}")
