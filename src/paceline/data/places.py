"""Where a data set's files are looked for, where downloads go, and what to say when there are none.

    root = directory given, else $PACELINE_DATA, else ~/.cache/paceline

    looked in:  root/<name>, then the folders other tools make, then root itself
    downloads:  root/<name>   (root itself if it is already called <name>)

The folder of the data set's own name comes first, because several data sets share a root and MNIST and
Fashion-MNIST share file names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.data.download import RemoteFile, download
from paceline.data.errors import DatasetError
from paceline.data.request import Request

VARIABLE = "PACELINE_DATA"


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
    """The folders to look in; those `elsewhere` only if the caller named no directory.

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
    paceline.data.errors.DatasetError: mnist is not in /nowhere: put train-images-idx3-ubyte.gz there
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
