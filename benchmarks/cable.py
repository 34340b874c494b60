"""Hosts and the cables between them: network namespaces of this machine. Needs root and iproute2.

Cable    two hosts, joined
Star     one host in the middle, and others that each have a cable of their own to it
Switch   hosts that each have a cable of their own to one switch, and reach each other through it
"""

from __future__ import annotations

import os
import shutil
import subprocess

ADDRESSES = "10.77.0.1", "10.77.0.2"
RATE = "200mbit"
LEAST_BUCKET_BYTES = 16_384


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
            _plug(*zip(self.hosts, self.interfaces, strict=True))
            for host, interface, address in zip(self.hosts, self.interfaces, ADDRESSES, strict=True):
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
                ends = tuple(zip((self.hub, host), self._interfaces(number), strict=True))
                _plug(*ends)
                for (each, end), address in zip(ends, (self.hub_address(number), f"10.78.{number}.2"), strict=True):
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


class Switch:
    """Hosts on one switch, a bridge in a namespace of its own; both ends of each cable send at most at the rate.

        host 0 ---- rate ---- switch ---- rate ---- host 1
        host 2 ---- rate ----        ---- rate ---- host 3 ...

    The bucket of `tc tbf` holds a millisecond of the rate, so that next to nothing goes out faster, and packets are cut
    to half of it, so that the kernel need not cut them again; a queue holds what takes 200 ms to send, enough for all
    hosts that send to one at once.

    `number` tells switches apart. A process in one of the hosts that knows it makes the same object, and may `shape`.
    """

    def __init__(self, hosts: int, *, number: int | None = None) -> None:
        self.number = os.getpid() if number is None else number
        self.hosts = tuple(f"pl{self.number}n{host}" for host in range(hosts))
        self.interfaces = tuple(f"pn{self.number}x{host}" for host in range(hosts))
        self._switch = f"pl{self.number}w"
        self._sockets = tuple(f"pw{self.number}x{host}" for host in range(hosts))

    def __enter__(self) -> Switch:
        try:
            for host in (self._switch, *self.hosts):
                _do("ip", "netns", "add", host)
                _do("ip", "-n", host, "link", "set", "lo", "up")
            _do("ip", "-n", self._switch, "link", "add", "bridge0", "type", "bridge")
            _do("ip", "-n", self._switch, "link", "set", "bridge0", "up")
            for place, (host, interface, socket) in enumerate(self._cables()):
                _plug((host, interface), (self._switch, socket))
                _do("ip", "-n", host, "addr", "add", f"10.79.0.{1 + place}/24", "dev", interface)
                _do("ip", "-n", host, "link", "set", interface, "up")
                _do("ip", "-n", self._switch, "link", "set", socket, "master", "bridge0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for socket in self._sockets:
            _command("ip", "link", "del", socket)  # one that never got into its namespace
        for host in (self._switch, *self.hosts):
            _command("ip", "netns", "del", host)

    def shape(self, bits_per_second: float, *, only: int | None = None) -> None:
        """Set the rate of all cables, or of one host's, both ways; what is on its way stays so."""
        bucket = max(LEAST_BUCKET_BYTES, round(bits_per_second / 8 / 1000))
        shape = ("root", "tbf", "rate", f"{bits_per_second:.0f}bit", "burst", f"{bucket}b", "latency", "200ms")
        for place, (host, interface, socket) in enumerate(self._cables()):
            for each, end in ((host, interface), (self._switch, socket)) if only in (None, place) else ():
                _do("ip", "-n", each, "link", "set", end, "gso_max_size", str(min(bucket // 2, 65536)))
                _do("tc", "-n", each, "qdisc", "replace", "dev", end, *shape)

    def _cables(self) -> zip[tuple[str, str, str]]:
        return zip(self.hosts, self.interfaces, self._sockets, strict=True)


def _plug(first: tuple[str, str], second: tuple[str, str]) -> None:
    """Join two hosts by a pair of interfaces; both are (host, interface)."""
    _do("ip", "link", "add", first[1], "type", "veth", "peer", "name", second[1])
    for host, interface in (first, second):
        _do("ip", "link", "set", interface, "netns", host)


def _command(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


def _do(*command: str) -> None:
    done = _command(*command)
    if done.returncode:
        raise ValueError(f"{' '.join(command)}: {done.stderr.strip()}")
