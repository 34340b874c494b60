"""Reading files that may be damaged or hostile: never more than a bound, and errors that name the file.

A file's own word about its size is checked against what is there before memory is asked for, and a
compressed file is opened only as far as the bound: a bomb of a few kilobytes ends in an error.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from paceline.data.errors import DatasetError

_CHUNK_BYTES = 1 << 20
_FAILURES = (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, OverflowError, RecursionError)


class Readable(Protocol):
    """Anything bytes can be read from.

    >>> import io
    >>> stream: Readable = io.BytesIO(b"abc")
    """

    def read(self, count: int, /) -> bytes:
        """At most `count` bytes, none at the end."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong while reading a file into one line that names the file.

    >>> with naming(Path("/data/labels.gz")):
    ...     raise EOFError("Compressed file ended early")
    Traceback (most recent call last):
    paceline.data.errors.DatasetError: cannot read /data/labels.gz: Compressed file ended early
    """
    try:
        yield
    except _FAILURES as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DatasetError(f"cannot read {path}: {' '.join(reason.split())}") from error


def read_up_to(stream: Readable, count: int) -> bytes:
    """`count` bytes, or fewer where the stream ends; memory grows with what arrives, not with `count`.

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
    """The whole of a file that must not be larger than the bound.

    >>> read_file(Path(__file__), largest_bytes=10)
    Traceback (most recent call last):
    paceline.data.errors.DatasetError: cannot read ...: it is larger than the 10 bytes expected at most
    """
    with naming(path), path.open("rb") as stream:
        data = read_up_to(stream, largest_bytes + 1)
        if len(data) > largest_bytes:
            raise DatasetError(f"it is larger than the {largest_bytes} bytes expected at most")
        return data


class BoundedReader:
    """A stream that refuses to give more than a number of bytes in all.

    >>> import io
    >>> reader = BoundedReader(io.BytesIO(b"abcdef"), largest_bytes=5)
    >>> reader.read(4)
    b'abcd'
    >>> reader.read(4)
    Traceback (most recent call last):
    paceline.data.errors.DatasetError: it unpacks to more than the 5 bytes expected at most
    """

    def __init__(self, stream: Readable, *, largest_bytes: int) -> None:
        self._stream = stream
        self._largest_bytes = largest_bytes
        self._left_bytes = largest_bytes

    def read(self, count: int, /) -> bytes:
        """At most `count` bytes; an error once the bound is passed."""
        part = self._stream.read(min(max(count, 0), self._left_bytes + 1, _CHUNK_BYTES))
        self._left_bytes -= len(part)
        if self._left_bytes < 0:
            raise DatasetError(f"it unpacks to more than the {self._largest_bytes} bytes expected at most")
        return part
