"""Who may join a run on loopback without TLS: who can read what its user alone can read.

    server   RUN/workers.key                              mode 0600; a random key, a new one whenever a server starts,
                                                          and where its server listens
             /tmp/paceline-UID/127.0.0.1:29400 -> it      for workers that are given the address alone
    worker   shows "ID MAC(key, ID)" in its Hello         its own random ID: a token is of one worker, and for one seat

A worker that comes back shows its token again, and so takes its own seat and nobody else's. The key is in no argument,
message or log; a token is sent to the address alone at which the server of the key listens.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from paceline.drivers.served.security import AddressError, is_loopback, join_address, parse_address
from paceline.files import read_plain, replacing

KEY = "workers.key"
KEY_BYTES = 32
MOST_KEY_BYTES = 1_000
LINKS = Path("/tmp")  # not that of TMPDIR: server and worker may be of two shells


def links_of_user() -> Path:
    """Return the folder in which servers of this user say where their keys are; OSError if it is not theirs alone."""
    folder = LINKS / f"paceline-{os.geteuid()}"
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone")
    return folder


def token(key: bytes, name: str) -> str:
    """Return what a worker of this name shows: the name, and the proof that it has the key.

    >>> token(b"key", "7f")[:12]
    '7f 351252b18'
    """
    return f"{name} {hmac.new(key, _bytes_of(name), 'sha256').hexdigest()}"


def _bytes_of(shown: str) -> bytes:
    return shown.encode(errors="surrogatepass")  # a stranger's JSON may hold what is no text


class Guard:
    """The server's side: a key in the run's folder, and whether a token was made with it."""

    def __init__(self, folder: Path) -> None:
        self._path, self._key = folder.absolute() / KEY, secrets.token_bytes(KEY_BYTES)
        self._links, self._addresses, self._closed = list[Path](), list[str](), False
        self.write()

    def write(self) -> None:
        """Write the key, readable by this user alone from its first moment on; not any more, when it is closed."""
        if self._closed:
            return
        with replacing(self._path) as temporary:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w") as sink:
                if os.fstat(file).st_mode & 0o077:  # a file system without modes
                    raise AddressError(
                        f"{self._path.parent} keeps no file private, so that every user of this machine could join: "
                        "give another folder, keys (--tls), or --open if they may (in Python: open=True)"
                    )
                sink.write("\n".join([self._key.hex(), *self._addresses]))

    def link(self, addresses: Iterable[tuple[str, int]]) -> None:
        """Lead workers of this user that know an address alone to the key; OSError if there is no place to do so."""
        self._addresses = [join_address(host, port) for host, port in addresses]
        self.write()
        with suppress(FileExistsError):
            (LINKS / f"paceline-{os.geteuid()}").mkdir(mode=0o700)
        folder = links_of_user()
        for address in self._addresses:
            temporary = folder / f".{secrets.token_hex(8)}"
            temporary.symlink_to(self._path)
            temporary.replace(folder / address)
            self._links.append(folder / address)
        for old in folder.iterdir():
            with suppress(OSError):  # of which nothing can be known
                if not old.exists():  # of a server that was killed, and whose run is removed
                    old.unlink(missing_ok=True)

    def admits(self, shown: str) -> bool:
        """Return whether a token was made with the key."""
        name = shown.partition(" ")[0]
        return hmac.compare_digest(_bytes_of(shown), _bytes_of(token(self._key, name)))

    def close(self) -> None:
        """Remove the key, which the next server would not know, and what leads to it."""
        self._closed = True
        for place in self._links:
            with suppress(OSError):
                if place.readlink() == self._path:
                    place.unlink()
        self._path.unlink(missing_ok=True)


class Credential:
    """The worker's side: where it connects to, and the token that it shows there; `run` is the run's folder."""

    def __init__(self, address: str, run: str | Path | None) -> None:
        if run == "":
            raise ValueError("run is empty: give the folder of the run, or leave it out")
        self._address, self._run = address, None if run is None else Path(run)
        self._name = secrets.token_hex(8)
        self._last: tuple[str, bytes] | None = None  # the run's folder may be gone when the worker comes back

    def find(self) -> tuple[str, str]:
        """Return the address, and the token for the server there; "" if no key for it can be read."""
        for address, path in self._places():
            with suppress(FileNotFoundError):
                key, listening = self._read(path)
                self._last = address or self._meant(listening), key
                break
        if self._last is None:
            return self._address, ""
        address, key = self._last
        return address, token(key, self._name)

    def _read(self, path: Path) -> tuple[bytes, list[str]]:
        """Return the key in a file, and where its server listens."""
        try:
            first, *listening = read_plain(path, most_bytes=MOST_KEY_BYTES).decode("ascii").split("\n")
            return bytes.fromhex(first), listening
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            raise AddressError(
                f"{path} is no key that this user can read ({error}): the user who runs the server joins with it; for "
                "others start the server with --open (in Python open=True)"
            ) from error

    def _meant(self, listening: list[str]) -> str:
        """Return which of the server's addresses `localhost` is: another user may listen at the other one."""
        host, port = parse_address(self._address)
        if host != "localhost":
            return self._address
        known = [each for each in listening if parse_address(each)[1] == port]
        return known[0] if known else join_address("127.0.0.1", port)

    def _places(self) -> Iterator[tuple[str, Path]]:
        if self._run is not None:
            yield "", self._run / KEY
            return
        host, port = parse_address(self._address)
        if not is_loopback(host):
            return
        with suppress(OSError):
            for each in ("127.0.0.1", "::1") if host == "localhost" else (host,):
                address = join_address(each, port)
                yield address, links_of_user() / address
