"""Fetching a file that is known beforehand: its size and its sum.

    bytes -> .<name>.<random>.part -> size and md5 agree? -> renamed to <name>
                                         no -> the part is removed, nothing else is touched

The rename is atomic, so several processes may fetch the same file at once: each writes its own part and
the last one wins with the same bytes. A server gets a bounded time to answer, to send each piece, and to
send the whole; it cannot make us keep more than the size we expect.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paceline.data.errors import DatasetError
from paceline.files import replacing

_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file as its publisher describes it.

    >>> RemoteFile(name="labels.gz", payload_bytes=4542, md5="ec29112dd5afa0611ce80d1b7f02629c").name
    'labels.gz'
    """

    name: str
    payload_bytes: int
    md5: str


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a server may take: silent at a time, and in all.

    >>> Patience().stall_seconds
    20.0
    """

    stall_seconds: float = 20.0
    total_seconds: float = 3600.0


def download(file: RemoteFile, *, base: str, folder: Path, patience: Patience | None = None) -> Path:
    """Fetch `base`/`file.name` into a folder, and return where it is.

    >>> labels = RemoteFile(name="labels.gz", payload_bytes=4542, md5="ec29112dd5afa0611ce80d1b7f02629c")
    >>> download(labels, base="ftp://example.org", folder=Path("/tmp"))
    Traceback (most recent call last):
    paceline.data.errors.DatasetError: ftp://example.org/labels.gz must begin with http:// or https://
    """
    address = f"{base.rstrip('/')}/{file.name}"
    if not address.startswith(("http://", "https://")):
        raise DatasetError(f"{address} must begin with http:// or https://")
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / file.name) as part:
            with part.open("xb") as sink:
                md5 = _receive(address, file, sink, patience or Patience())
            if md5 != file.md5:
                raise DatasetError(f"{address} has md5 {md5} where {file.md5} was expected; it was not kept")
    except DatasetError:
        raise
    except urllib.error.HTTPError as error:
        error.close()
        raise DatasetError(f"{address} answered {error.code} {error.reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise DatasetError(f"{address}: {_reason(error)}") from error
    finally:
        for made in missing:
            with contextlib.suppress(OSError):  # what we made and what stayed empty: a mistyped path leaves nothing
                made.rmdir()
    return folder / file.name


def _receive(address: str, file: RemoteFile, sink: BinaryIO, patience: Patience) -> str:
    """Copy the answer into a file, and return its md5."""
    from rich.console import Console
    from rich.progress import Progress

    deadline = time.monotonic() + patience.total_seconds
    md5 = hashlib.md5(usedforsecurity=False)
    received_bytes = 0
    with (
        urllib.request.urlopen(address, timeout=patience.stall_seconds) as answer,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        bar = progress.add_task(file.name, total=file.payload_bytes)
        # read1 returns what one receive brings, so a server that drips is held to the deadline too
        while piece := answer.read1(_CHUNK_BYTES):
            received_bytes += len(piece)
            if received_bytes > file.payload_bytes:
                raise DatasetError(f"{address} is longer than the {file.payload_bytes} bytes expected")
            if time.monotonic() > deadline:
                raise DatasetError(f"{address} took longer than {patience.total_seconds:g} s")
            md5.update(piece)
            sink.write(piece)
            progress.update(bar, completed=received_bytes)
    if received_bytes != file.payload_bytes:
        raise DatasetError(f"{address} ended after {received_bytes} of {file.payload_bytes} bytes")
    return md5.hexdigest()


def _reason(error: Exception) -> str:
    cause = getattr(error, "reason", error)  # URLError hides what happened one level down
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return " ".join(text.split())
