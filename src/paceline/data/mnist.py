"""MNIST and Fashion-MNIST: four idx files each, under the same names.

An idx file:

    byte     0  1  2     3           4..             then
             0  0  type  dimensions  sizes (4 bytes  the values, last
                   (08 = bytes)      each, big end   dimension fastest
                                     first)

http://yann.lecun.com/exdb/mnist describes it. Only bytes are read here; the file must hold exactly what
its header says, neither a byte less nor more.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data import Request
from paceline.data.download import RemoteFile, fetch, places_for
from paceline.data.reading import DatasetError, Readable, naming, read_up_to
from paceline.data.samples import Dataset, Pixels, from_pixels
from paceline.files import open_plain

_SIDE = 28
LARGEST_BYTES = 1 << 28  # five times the largest file of the MNIST family


@dataclass(frozen=True, kw_only=True)
class IdxSource:
    """Where a data set of the family comes from, and how to recognise it.

    >>> [file.name for file in MNIST.files][:2]
    ['train-images-idx3-ubyte.gz', 'train-labels-idx1-ubyte.gz']
    """

    name: str
    base: str
    files: tuple[RemoteFile, ...]
    subfolders: tuple[str, ...]
    elsewhere: tuple[str, ...] = ()
    first_labels: tuple[int, ...]


def _four_files(*sizes_and_sums: tuple[int, str]) -> tuple[RemoteFile, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        RemoteFile(name=f"{name}-ubyte.gz", payload_bytes=payload_bytes, md5=md5)
        for name, (payload_bytes, md5) in zip(names, sizes_and_sums, strict=True)
    )


MNIST = IdxSource(
    name="mnist",
    base="https://ossci-datasets.s3.amazonaws.com/mnist/",
    files=_four_files(
        (9912422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        (28881, "d53e105ee54ea40749a09fcbcd1e9432"),
        (1648877, "9fb629c4189551a2d022fa330f9573f3"),
        (4542, "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    subfolders=("MNIST/raw", "raw"),
    first_labels=(5, 0, 4, 1, 9, 2, 1, 3, 1, 4),
)

FASHION_MNIST = IdxSource(
    name="fashion-mnist",
    base="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    files=_four_files(
        (26421880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        (29515, "25c81989df183df01b3e8a0aad5dffbe"),
        (4422102, "bef4ecab320f06d8554ea6380940ec79"),
        (5148, "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    subfolders=("FashionMNIST/raw", "raw", "fashion"),
    elsewhere=("/usr/share/datasets/fashion-mnist",),  # Debian's package dataset-fashion-mnist
    first_labels=(9, 0, 0, 3, 0, 2, 7, 2, 5, 5),
)


def load_mnist(request: Request) -> Dataset:
    """Load handwritten digits, 60,000 and 10,000, 28x28 pixels.

    >>> load_mnist(Request(directory=Path("/nowhere"), download=False))
    Traceback (most recent call last):
    paceline.data.reading.DatasetError: mnist is not in /nowhere: put train-images-idx3-ubyte.gz, ... there
    """
    return load_idx_dataset(MNIST, request)


def load_fashion_mnist(request: Request) -> Dataset:
    """Load pieces of clothing, 60,000 and 10,000, 28x28 pixels.

    >>> load_fashion_mnist(Request(directory=Path("/nowhere"), download=False))
    Traceback (most recent call last):
    paceline.data.reading.DatasetError: fashion-mnist is not in /nowhere: put train-images... there
    """
    return load_idx_dataset(FASHION_MNIST, request)


def load_idx_dataset(source: IdxSource, request: Request) -> Dataset:
    """Find, or else fetch, and read the four files of one source.

    >>> load_idx_dataset(MNIST, Request(directory=Path("/nowhere"), download=False))
    Traceback (most recent call last):
    paceline.data.reading.DatasetError: mnist is not in /nowhere: put ...
    """
    places = places_for(source.name, request, subfolders=source.subfolders, elsewhere=source.elsewhere)
    paths = _find(source, places.folders)
    if paths is None:
        missing = [file for file in source.files if _present(places.target, file) is None]
        names = ", ".join(file.name for file in missing)
        fetch(places, missing, request, base=source.base, wanted=f"{names} (or the same without .gz)")
        paths = [_present(places.target, file) or places.target / file.name for file in source.files]
    train, test = _read_pixels(paths[0], paths[1]), _read_pixels(paths[2], paths[3])
    _refuse_the_sibling(source, train, paths[1])
    return from_pixels(source.name, train, test, classes=10)


def _find(source: IdxSource, folders: Sequence[Path]) -> list[Path] | None:
    """Return the four files of the first folder that has all of them."""
    for folder in folders:
        paths = [path for file in source.files if (path := _present(folder, file)) is not None]
        if len(paths) == len(source.files):
            return paths
    return None


def _present(folder: Path, file: RemoteFile) -> Path | None:
    for path in (folder / file.name.removesuffix(".gz"), folder / file.name):
        if path.is_file():
            return path
    return None


def _read_pixels(images: Path, labels: Path) -> Pixels:
    pixels = read_idx(images, dimensions=3)
    if pixels.shape[1:] != (_SIDE, _SIDE):
        size = " x ".join(map(str, pixels.shape[1:]))
        raise DatasetError(f"cannot read {images}: its images must be {_SIDE} x {_SIDE} pixels (they are {size})")
    return Pixels(images=pixels[:, None], labels=read_idx(labels, dimensions=1))


def _refuse_the_sibling(source: IdxSource, train: Pixels, labels: Path) -> None:
    """Refuse the other data set of the family: both share file names, and their labels begin differently."""
    begins = tuple(train.labels[:10].tolist())
    for other in (MNIST, FASHION_MNIST):
        if other.name != source.name and begins == other.first_labels:
            raise DatasetError(
                f"{labels.parent} holds {other.name}, not {source.name}: "
                f"put each in a folder of its own name, such as {labels.parent / source.name}"
            )


# -- idx files ---------------------------------------------------------------------------------------------------------


def read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """Return the array in an idx file, plain or compressed (.gz).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "labels"
    ...     _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
    ...     read_idx(path, dimensions=1).tolist()
    [7, 8, 9]
    """
    with naming(path), open_plain(path, most_bytes=2 * LARGEST_BYTES) as plain:
        if path.suffix == ".gz":
            with gzip.open(plain, "rb") as unpacked:
                return _read_array(unpacked, dimensions, file_bytes=None)
        return _read_array(plain, dimensions, file_bytes=os.fstat(plain.fileno()).st_size)


def _read_array(stream: Readable, dimensions: int, *, file_bytes: int | None) -> NDArray[np.uint8]:
    magic = read_up_to(stream, 4)
    if magic != bytes([0, 0, 8, dimensions]):
        raise DatasetError(
            f"its first bytes are {magic.hex(' ') or 'missing'}, not 00 00 08 {dimensions:02x}: "
            f"it is no idx file of bytes with {dimensions} dimensions"
        )
    header = read_up_to(stream, 4 * dimensions)
    if len(header) < 4 * dimensions:
        raise DatasetError(f"it ends inside its header, after {4 + len(header)} bytes")
    shape = struct.unpack(f">{dimensions}I", header)
    value_bytes = math.prod(shape)
    if not 1 <= value_bytes <= LARGEST_BYTES:
        raise DatasetError(
            f"its header says {' x '.join(map(str, shape))} = {value_bytes} bytes; "
            f"between 1 and {LARGEST_BYTES} are accepted"
        )
    expected = 4 + 4 * dimensions + value_bytes
    if file_bytes is not None and file_bytes != expected:
        raise DatasetError(f"it has {file_bytes} bytes where its header says {expected}")
    values = read_up_to(stream, value_bytes + 1)  # one more, to see that there is no more
    if len(values) != value_bytes:
        found = "more" if len(values) > value_bytes else str(4 + 4 * dimensions + len(values))
        raise DatasetError(f"it unpacks to {found} bytes where its header says {expected}")
    return np.frombuffer(values, dtype=np.uint8).reshape(shape)
