"""Hosts and the cables between them: network namespaces of this machine. Needs root and iproute2.

    Cable    two hosts, joined
    Star     one host in the middle, and others that each have a cable of their own to it
    Switch   hosts that each have a cable of their own to one switch, and reach each other through it

Within `with` the hosts are there, and afterwards none is. Both ends of a cable send at most at its rate.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

ADDRESSES = "10.77.0.1", "10.77.0.2"
RATE = "200mbit"
LEAST_BUCKET_BYTES = 16_384


class End(NamedTuple):
    """An end of a cable: in which host, by which interface, and with which address; a switch's socket has none."""

    host: str
    interface: str
    address: str = ""


def why_not() -> str | None:
    """Return why hosts cannot be had here; None if they can."""
    if os.geteuid() != 0:
        return "two hosts: making network namespaces needs root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "two hosts: ip and tc (iproute2) are needed"
    name = f"pl{os.getpid()}x"
    made = _command("ip", "netns", "add", name)
    _command("ip", "netns", "del", name)
    return f"two hosts: no network namespace can be made ({made.stderr.strip()})" if made.returncode else None


Own = TypeVar("Own", bound="Network")


class Network:
    """Hosts with these names and cables; each end is shaped as tc is told, if it is told."""

    def __init__(self, names: Sequence[str], cables: Sequence[tuple[End, End]], shape: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self.cables = tuple(cables)
        self._shape = tuple(shape)

    def __enter__(self: Own) -> Own:
        try:
            for name in self.names:
                _do("ip", "netns", "add", name)
                _do("ip", "-n", name, "link", "set", "lo", "up")
            self._begin()
            for one, other in self.cables:
                _do("ip", "link", "add", one.interface, "type", "veth", "peer", "name", other.interface)
                for end in (one, other):
                    _do("ip", "link", "set", end.interface, "netns", end.host)
                    self._connect(end)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for one, other in self.cables:  # those that never got into their namespaces
            _command("ip", "link", "del", one.interface)
            _command("ip", "link", "del", other.interface)
        for name in self.names:
            _command("ip", "netns", "del", name)

    def _begin(self) -> None:
        """Make what the cables are plugged into."""

    def _connect(self, end: End) -> None:
        _do("ip", "-n", end.host, "addr", "add", f"{end.address}/24", "dev", end.interface)
        _do("ip", "-n", end.host, "link", "set", end.interface, "up")
        if self._shape:
            _do("tc", "-n", end.host, "qdisc", "add", "dev", end.interface, "root", "tbf", *self._shape)

    @staticmethod
    def bytes_at(end: End) -> tuple[int, int]:
        """Return what an interface has sent and received so far, by its own count."""
        folder = f"/sys/class/net/{end.interface}/statistics"
        counts = _command("ip", "netns", "exec", end.host, "cat", f"{folder}/tx_bytes", f"{folder}/rx_bytes")
        sent, received = counts.stdout.split()
        return int(sent), int(received)


class Cable(Network):
    """Two hosts joined by a pair of interfaces."""

    def __init__(self, rate: str = RATE) -> None:
        number = os.getpid()
        self.hosts = f"pl{number}a", f"pl{number}b"
        self.interfaces = f"pv{number}a", f"pv{number}b"
        first, second = map(End, self.hosts, self.interfaces, ADDRESSES)
        super().__init__(self.hosts, [(first, second)], ("rate", rate, "burst", "256kb", "latency", "50ms"))

    def bytes_at_first(self) -> tuple[int, int]:
        """Return what the first host has sent and received."""
        return self.bytes_at(self.cables[0][0])

    def cut(self) -> None:
        """Let nothing through any more."""
        _do("ip", "-n", self.hosts[0], "link", "set", self.interfaces[0], "down")

    def mend(self) -> None:
        """Let all through again."""
        _do("ip", "-n", self.hosts[0], "link", "set", self.interfaces[0], "up")


class Star(Network):
    """A host in the middle, `hub`, and one for every spoke.

    A queue holds what takes a second to send, as those of slow links do.
    """

    def __init__(self, spokes: int, rate: str) -> None:
        number = os.getpid()
        self.hub = f"pl{number}h"
        self.spokes = [f"pl{number}s{spoke}" for spoke in range(spokes)]
        cables = [
            (End(self.hub, f"ph{number}x{spoke}", self.hub_address(spoke)),
             End(host, f"ps{number}x{spoke}", f"10.78.{spoke}.2"))
            for spoke, host in enumerate(self.spokes)
        ]  # fmt: skip
        super().__init__([self.hub, *self.spokes], cables, ("rate", rate, "burst", "16kb", "latency", "1000ms"))

    @staticmethod
    def hub_address(spoke: int) -> str:
        """Return where a spoke finds the hub."""
        return f"10.78.{spoke}.1"

    def bytes_at_hub(self, spoke: int) -> tuple[int, int]:
        """Return what the hub's end of a cable has sent and received."""
        return self.bytes_at(self.cables[spoke][0])


class Switch(Network):
    """Hosts on one switch, a bridge in a namespace of its own.

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
        cables = [
            (End(host, interface, f"10.79.0.{1 + place}"), End(self._switch, f"pw{self.number}x{place}"))
            for place, (host, interface) in enumerate(zip(self.hosts, self.interfaces, strict=True))
        ]
        super().__init__([self._switch, *self.hosts], cables)

    def _begin(self) -> None:
        _do("ip", "-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        _do("ip", "-n", self._switch, "link", "set", "bridge0", "up")

    def _connect(self, end: End) -> None:
        if end.address:
            super()._connect(end)
        else:
            _do("ip", "-n", end.host, "link", "set", end.interface, "master", "bridge0", "up")

    def shape(self, bits_per_second: float, *, only: int | None = None) -> None:
        """Set the rate of all cables, or of one host's, both ways; what is on its way stays so."""
        bucket = max(LEAST_BUCKET_BYTES, round(bits_per_second / 8 / 1000))
        shape = ("root", "tbf", "rate", f"{bits_per_second:.0f}bit", "burst", f"{bucket}b", "latency", "200ms")
        for cable in self.cables if only is None else (self.cables[only],):
            for end in cable:
                _do("ip", "-n", end.host, "link", "set", end.interface, "gso_max_size", str(min(bucket // 2, 65536)))
                _do("tc", "-n", end.host, "qdisc", "replace", "dev", end.interface, *shape)


def _command(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


def _do(*command: str) -> None:
    done = _command(*command)
    if done.returncode:
        raise ValueError(f"{' '.join(command)}: {done.stderr.strip()}")
