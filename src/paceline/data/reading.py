"""Reading files that may be damaged or hostile: never more than a bound, and errors that name the file.

A file's own word about its size is checked against what is there before memory is asked for, and a
compressed file is opened only as far as the bound: a bomb of a few kilobytes ends in an error. Members of an
archive are read into memory: nothing is written to disk, so no member's path can lead anywhere, and links and
devices are passed over.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Protocol, cast

from paceline.errors import PacelineError
from paceline.files import open_plain, read_plain

LARGEST_MEMBERS = 100
_CHUNK_BYTES = 1 << 20
_FAILURES = (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, OverflowError, RecursionError)


class DatasetError(PacelineError, ValueError):
    """A data set's files are missing, cannot be fetched, or are not what they should be.

    >>> raise DatasetError("mnist is not in /data: put train-images-idx3-ubyte.gz there")
    Traceback (most recent call last):
    paceline.data.reading.DatasetError: mnist is not in /data: put train-images-idx3-ubyte.gz there
    """


class Readable(Protocol):
    """Anything that bytes can be read from.

    >>> import io
    >>> stream: Readable = io.BytesIO(b"abc")
    """

    def read(self, count: int, /) -> bytes:
        """Return at most `count` bytes, none at the end."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong while reading a file into one line that names the file.

    >>> with naming(Path("/data/labels.gz")):
    ...     raise EOFError("Compressed file ended early")
    Traceback (most recent call last):
    paceline.data.reading.DatasetError: cannot read /data/labels.gz: Compressed file ended early
    """
    try:
        yield
    except _FAILURES as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DatasetError(f"cannot read {path}: {' '.join(reason.split())}") from error


def read_up_to(stream: Readable, count: int) -> bytes:
    """Return `count` bytes, or fewer where the stream ends; memory grows with what arrives, not with `count`.

    >>> import io
    >>> read_up_to(io.BytesIO(b"abcdef"), 4), read_up_to(io.BytesIO(b"abc"), 10**15)
    (b'abcd', b'abc')
    """
    parts = bytearray()
    while len(parts) < count:
        part = stream.read(min(_CHUNK_BYTES, count - len(parts)))
        if not part:
            break
        parts += part
    return bytes(parts)


def read_file(path: Path, *, largest_bytes: int) -> bytes:
    """Return the whole of a file, which must not be larger than the bound.

    >>> read_file(Path(__file__), largest_bytes=10)
    Traceback (most recent call last):
    paceline.data.reading.DatasetError: cannot read ...: it has ... bytes; at most 10 are allowed
    """
    with naming(path):
        return read_plain(path, most_bytes=largest_bytes)


class BoundedReader:
    """A stream that refuses to give more than a number of bytes in all.

    >>> import io
    >>> reader = BoundedReader(io.BytesIO(b"abcdef"), largest_bytes=5)
    >>> reader.read(4)
    b'abcd'
    >>> reader.read(4)
    Traceback (most recent call last):
    paceline.data.reading.DatasetError: it unpacks to more than the 5 bytes expected at most
    """

    def __init__(self, stream: Readable, *, largest_bytes: int) -> None:
        self._stream = stream
        self._largest_bytes = largest_bytes
        self._left_bytes = largest_bytes

    def read(self, count: int, /) -> bytes:
        """Return at most `count` bytes; an error once the bound is passed."""
        part = self._stream.read(min(max(count, 0), self._left_bytes + 1, _CHUNK_BYTES))
        self._left_bytes -= len(part)
        if self._left_bytes < 0:
            raise DatasetError(f"it unpacks to more than the {self._largest_bytes} bytes expected at most")
        return part


def read_members(
    path: Path, names: Collection[str], *, largest_member_bytes: int, largest_bytes: int
) -> dict[str, bytes]:
    """Return the contents of those files of a .tar.gz whose last path component is among `names`; all must be there.

    >>> read_members(Path("/nowhere.tar.gz"), ["a"], largest_member_bytes=10, largest_bytes=100)
    Traceback (most recent call last):
    paceline.data.reading.DatasetError: cannot read /nowhere.tar.gz: No such file or directory
    """
    found: dict[str, bytes] = {}
    with naming(path), open_plain(path, most_bytes=largest_bytes) as packed, gzip.open(packed, "rb") as unpacked:
        bounded = cast(IO[bytes], BoundedReader(unpacked, largest_bytes=largest_bytes))
        with tarfile.open(fileobj=bounded, mode="r|") as archive:
            for count, member in enumerate(archive, start=1):
                if count > LARGEST_MEMBERS:
                    raise DatasetError(f"it has more than the {LARGEST_MEMBERS} members expected at most")
                name = PurePosixPath(member.name).name
                if member.isreg() and name in names:
                    _add(found, name, archive, member, largest_member_bytes)
        missing = sorted(set(names) - set(found))
        if missing:
            raise DatasetError(f"it lacks {', '.join(missing)}")
    return found


def _add(
    found: dict[str, bytes], name: str, archive: tarfile.TarFile, member: tarfile.TarInfo, largest_bytes: int
) -> None:
    if name in found:
        raise DatasetError(f"it holds {name} twice")
    if member.size > largest_bytes:
        raise DatasetError(f"{name} in it has {member.size} bytes; at most {largest_bytes} are accepted")
    stream = archive.extractfile(member)
    found[name] = b"" if stream is None else read_up_to(stream, largest_bytes)
    if len(found[name]) != member.size:
        raise DatasetError(f"it ends inside {name}, after {len(found[name])} of {member.size} bytes")
