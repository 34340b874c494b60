"""Where a data set's files are looked for, and how missing ones are downloaded.

    root = directory given, else $PACELINE_DATA, else ~/.cache/paceline

    looked in:  root/<name>, then the folders other tools make, then root itself
    downloads:  root/<name>   (root itself if it is already called <name>)

The folder of the data set's own name comes first, because several data sets share a root and MNIST and
Fashion-MNIST share file names. A file is known before it is downloaded, by its size and its sum:

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
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paceline.data import Request
from paceline.data.reading import DatasetError
from paceline.files import replacing

VARIABLE = "PACELINE_DATA"
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Places:
    """The folders of one data set.

    >>> places = places_for("mnist", Request(directory=Path("/data")), subfolders=["MNIST/raw"])
    >>> [str(folder) for folder in places.folders]
    ['/data/mnist', '/data/mnist/MNIST/raw', '/data/MNIST/raw', '/data']
    """

    name: str
    root: Path
    target: Path
    folders: tuple[Path, ...]


def places_for(name: str, request: Request, *, subfolders: Sequence[str] = (), elsewhere: Sequence[str] = ()) -> Places:
    """Return the folders to look in; those `elsewhere` only if the caller named no directory.

    >>> places_for("mnist", Request(directory=Path("/data"))).target.as_posix()
    '/data/mnist'
    >>> places_for("mnist", Request(directory=Path("/data/mnist"))).target.as_posix()
    '/data/mnist'
    """
    root = _root(request)
    target = root if root.name == name else root / name
    inside = (folder / sub for folder in dict.fromkeys((target, root)) for sub in ("", *subfolders))
    folders = sorted(inside, key=lambda folder: folder == root)  # the root itself comes last
    if request.directory is None:
        folders += [Path(folder) for folder in elsewhere]
    return Places(name=name, root=root, target=target, folders=tuple(dict.fromkeys(folders)))


def _root(request: Request) -> Path:
    if request.directory is not None:
        return request.directory.expanduser()
    from_environment = os.environ.get(VARIABLE, "")
    return Path(from_environment or "~/.cache/paceline").expanduser()


def fetch(places: Places, files: Sequence[RemoteFile], request: Request, *, base: str, wanted: str) -> None:
    """Download what is missing into the data set's own folder, or say which files to put where.

    >>> nowhere = Request(directory=Path("/nowhere"), download=False)
    >>> fetch(places_for("mnist", nowhere), [], nowhere, base="", wanted="train-images-idx3-ubyte.gz")
    Traceback (most recent call last):
    paceline.data.reading.DatasetError: mnist is not in /nowhere: put train-images-idx3-ubyte.gz there
    """
    if not request.download:
        raise DatasetError(f"{places.name} is not in {places.root}: put {wanted} there")
    for file in files:
        try:
            download(file, base=request.mirror or base, folder=places.target)
        except DatasetError as error:
            raise DatasetError(
                f"{places.name} is not in {places.root} and cannot be fetched ({error}): put {wanted} there"
            ) from error


# -- downloads ---------------------------------------------------------------------------------------------------------


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
    """How long a server may take: without a byte, and in all.

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
    paceline.data.reading.DatasetError: ftp://example.org/labels.gz must begin with http:// or https://
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
