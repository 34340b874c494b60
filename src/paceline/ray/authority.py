"""The keys of one run: made where the run was called, handed out by Ray, worthless when the run is over.

    caller (driver)      ca.key  ca.crt  server.*  worker.*       in memory; as files only while they are made
                           │        │
         stays, always ────┘        ├──> server's actor:  ca.crt server.crt server.key
                                    └──> each worker:     ca.crt worker.crt worker.key

A server that is started again may be on another node, with another address; its new certificate is of the same CA. TLS
takes keys from files alone, so on a node they are files for the moment in which its TLS context is made of them, in a
folder that nobody but their user can read. A process that is killed leaves no key behind.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.drivers.served.keys import make_keys
from paceline.drivers.served.security import (
    MOST_KEY_BYTES,
    Role,
    Tls,
    pair_paths,
    server_credentials,
    worker_credentials,
)
from paceline.files import read_plain

DAYS = 365  # of a run, at the most


@dataclass(frozen=True, kw_only=True)
class SideKeys:
    """The files of one side of TLS, by name; they are never printed.

    >>> SideKeys(side="worker", files={"worker.key": b"secret"})
    SideKeys(side='worker')
    """

    side: Role
    files: dict[str, bytes] = field(repr=False)

    def context(self) -> Tls:
        """Return the TLS context that is made of these keys."""
        with tempfile.TemporaryDirectory(prefix="paceline-keys-") as folder:  # mode 0700
            _write(Path(folder), self.files)
            make = server_credentials if self.side == "server" else worker_credentials
            return make(Path(folder, self.side))


class RunAuthority:
    """The CA of one run.

    >>> authority = RunAuthority()
    >>> sorted(authority.server_keys("10.0.0.7").files), sorted(authority.worker_keys().files)
    (['ca.crt', 'server.crt', 'server.key'], ['ca.crt', 'worker.crt', 'worker.key'])
    """

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._make(hosts=())

    def server_keys(self, host: str) -> SideKeys:
        """Return keys for a server at this host, by which it is known to workers."""
        self._files = {name: content for name, content in self._files.items() if not name.startswith("server.")}
        self._make(hosts=[host])
        return self._keys("server")

    def worker_keys(self) -> SideKeys:
        """Return the keys for workers; one certificate is good for all of them."""
        return self._keys("worker")

    def _make(self, *, hosts: list[str] | tuple[()]) -> None:
        """Make the files that are missing."""
        with tempfile.TemporaryDirectory(prefix="paceline-keys-") as folder:
            _write(Path(folder), self._files)
            for path in make_keys(Path(folder), hosts=hosts, days=DAYS):
                self._files[path.name] = read_plain(path, most_bytes=MOST_KEY_BYTES)

    def _keys(self, side: Role) -> SideKeys:
        names = ["ca.crt", *(path.name for path in pair_paths(Path(side)))]
        return SideKeys(side=side, files={name: self._files[name] for name in names})


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.touch(mode=0o600)
        path.write_bytes(content)
