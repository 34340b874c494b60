"""The keys of one run: made where the run was called, handed out by Ray, worthless when the run is over.

    caller (driver)        paceline-keys-x/  ca.key  ca.crt  server.*  worker.*       removed when the run is over
                                               │        │
                             stays, always ────┘        └──> server's actor:  ca.crt server.crt server.key
                                                        └──> each worker:     ca.crt worker.crt worker.key

A server that Ray starts again may be on another node, with another address; its new certificate is of the same CA.
On a node the files are there, in a folder that only their user can read, until the TLS context has been made of them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from paceline.drivers.served.keys import make_keys
from paceline.drivers.served.security import MOST_KEY_BYTES, Role, pair_paths
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


class RunAuthority:
    """The CA of one run, for as long as the `with` lasts.

    >>> with RunAuthority() as authority:
    ...     sorted(authority.server_keys("10.0.0.7").files), sorted(authority.worker_keys().files)
    (['ca.crt', 'server.crt', 'server.key'], ['ca.crt', 'worker.crt', 'worker.key'])
    """

    def __enter__(self) -> RunAuthority:
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-keys-"))  # mode 0700
        make_keys(self._folder, days=DAYS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def server_keys(self, host: str) -> SideKeys:
        """Return keys for a server at this host: a certificate that was for another is made anew."""
        for path in pair_paths(self._folder / "server"):
            path.unlink(missing_ok=True)
        make_keys(self._folder, hosts=[host], days=DAYS)
        return self._keys("server")

    def worker_keys(self) -> SideKeys:
        """Return the keys for workers; one certificate is good for all of them."""
        return self._keys("worker")

    def _keys(self, side: Role) -> SideKeys:
        paths = (self._folder / "ca.crt", *pair_paths(self._folder / side))
        return SideKeys(side=side, files={path.name: read_plain(path, most_bytes=MOST_KEY_BYTES) for path in paths})


class KeysOnNode:
    """Keys as files on a node, in a folder of their own that only this user can read, until `discard`."""

    def __init__(self, keys: SideKeys) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-keys-"))
        self.prefix = str(self._folder / keys.side)
        for name, content in keys.files.items():
            path = self._folder / name
            path.touch(mode=0o600)
            path.write_bytes(content)

    def discard(self) -> None:
        """Remove the files: whoever has made a TLS context of them needs them no more. Once more does no harm."""
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def keys_on_node(keys: SideKeys) -> Iterator[KeysOnNode]:
    """Write keys for the `with`.

    >>> with keys_on_node(SideKeys(side="worker", files={"worker.key": b"secret"})) as written:
    ...     oct(Path(written.prefix + ".key").stat().st_mode & 0o777)
    '0o600'
    """
    written = KeysOnNode(keys)
    try:
        yield written
    finally:
        written.discard()
