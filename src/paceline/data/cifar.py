"""CIFAR-10 in both layouts its authors publish, as files or still in their archive.

    binary   data_batch_1.bin ... 5.bin, test_batch.bin    1 label byte and 3,072 pixel bytes, repeated
    python   data_batch_1 ... 5, test_batch                a pickled dict: data [n, 3072] and labels

Pixels are planes of 32 x 32: all of red, all of green, all of blue. The pickles are read as plain data
(see plain_pickle): they cannot run anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.data import Request
from paceline.data.download import Places, RemoteFile, fetch, places_for
from paceline.data.plain_pickle import read_plain_pickle
from paceline.data.reading import DatasetError, naming, read_file, read_members
from paceline.data.samples import Dataset, Pixels, from_pixels

BASE = "https://www.cs.toronto.edu/~kriz/"
_PIXEL_BYTES = 3 * 32 * 32
_LARGEST_FILE_BYTES = 1 << 26  # twice a real batch
_LARGEST_ARCHIVE_BYTES = 1 << 29


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way the data set is published: its files, its archive, and how a file is decoded.

    >>> BINARY.names
    ('data_batch_1.bin', ..., 'data_batch_5.bin', 'test_batch.bin')
    """

    names: tuple[str, ...]
    folder: str
    archive: RemoteFile
    decode: Callable[[bytes], Pixels]


def decode_binary(data: bytes) -> Pixels:
    """Return the images and labels of one binary batch.

    >>> decode_binary(bytes([7]) + bytes(3072)).labels.tolist()
    [7]
    """
    record_bytes = 1 + _PIXEL_BYTES
    if not data or len(data) % record_bytes:
        raise DatasetError(f"it has {len(data)} bytes, which is no whole number of {record_bytes}-byte images")
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, record_bytes)
    return Pixels(images=records[:, 1:].reshape(-1, 3, 32, 32), labels=records[:, 0])


def decode_python(data: bytes) -> Pixels:
    """Return the images and labels of one pickled batch.

    >>> import pickle
    >>> batch = {"data": np.zeros((2, 3072), np.uint8), "labels": [3, 4]}
    >>> decode_python(pickle.dumps(batch, protocol=2)).labels.tolist()
    [3, 4]
    """
    batch = read_plain_pickle(data)
    images, labels = batch.get("data"), batch.get("labels")
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (_PIXEL_BYTES,):
        raise DatasetError(f"its 'data' is no array of bytes [n, {_PIXEL_BYTES}]")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise DatasetError("its 'labels' are no list of numbers between 0 and 9")
    if len(labels) != len(images):
        raise DatasetError(f"it has {len(images)} images and {len(labels)} labels")
    return Pixels(images=images.reshape(-1, 3, 32, 32), labels=np.array(labels, dtype=np.int64))


_BATCHES = (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch")

BINARY = Layout(
    names=tuple(f"{name}.bin" for name in _BATCHES),
    folder="cifar-10-batches-bin",
    archive=RemoteFile(name="cifar-10-binary.tar.gz", payload_bytes=170052171, md5="c32a1d4ab5d03f1284b67883e8d87530"),
    decode=decode_binary,
)
PYTHON = Layout(
    names=_BATCHES,
    folder="cifar-10-batches-py",
    archive=RemoteFile(name="cifar-10-python.tar.gz", payload_bytes=170498071, md5="c58f30108f718f92721af3b95e74349a"),
    decode=decode_python,
)


def load_cifar10(request: Request, *, archive: RemoteFile = BINARY.archive) -> Dataset:
    """Load photographs of ten kinds of things, 50,000 and 10,000, 32x32 pixels in colour.

    >>> load_cifar10(Request(directory=Path("/nowhere"), download=False))
    Traceback (most recent call last):
    paceline.data.reading.DatasetError: cifar10 is not in /nowhere: put cifar-10-binary.tar.gz (or ...) there
    """
    places = places_for("cifar10", request, subfolders=(BINARY.folder, PYTHON.folder))
    batches = _find(places)
    if batches is None:
        wanted = f"{archive.name} (or {BINARY.names[0]} ... {BINARY.names[-1]})"
        fetch(places, [archive], request, base=BASE, wanted=wanted)
        batches = _from_archive(BINARY, places.target / archive.name)
    train = Pixels(
        images=np.concatenate([batch.images for batch in batches[:-1]]),
        labels=np.concatenate([batch.labels for batch in batches[:-1]]),
    )
    return from_pixels("cifar10", train, batches[-1], classes=10)


def _find(places: Places) -> list[Pixels] | None:
    """Return the batches of the first layout that is whole: files before archives, binary before python."""
    for folder in places.folders:
        for layout in (BINARY, PYTHON):
            paths = [folder / name for name in layout.names]
            if all(path.is_file() for path in paths):
                return [_from_file(layout, path) for path in paths]
    for folder in places.folders:
        for layout in (BINARY, PYTHON):
            if (folder / layout.archive.name).is_file():
                return _from_archive(layout, folder / layout.archive.name)
    return None


def _from_file(layout: Layout, path: Path) -> Pixels:
    data = read_file(path, largest_bytes=_LARGEST_FILE_BYTES)
    with naming(path):
        return layout.decode(data)


def _from_archive(layout: Layout, path: Path) -> list[Pixels]:
    members = read_members(
        path, layout.names, largest_member_bytes=_LARGEST_FILE_BYTES, largest_bytes=_LARGEST_ARCHIVE_BYTES
    )
    batches = []
    for name in layout.names:
        with naming(path / name):
            batches.append(layout.decode(members[name]))
    return batches
