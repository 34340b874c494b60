"""CIFAR-10 and CIFAR-100 in both layouts their authors publish, as files or still in their archive.

    CIFAR-10    binary   data_batch_1.bin ... 5.bin, test_batch.bin    1 label byte and 3,072 pixel bytes, repeated
                python   data_batch_1 ... 5, test_batch                a pickled dict: data [n, 3072] and labels
    CIFAR-100   binary   train.bin, test.bin                           2 label bytes, the kind of class and the class
                python   train, test                                   data and fine_labels (coarse_labels are not read)

Pixels are planes of 32 x 32: all of red, all of green, all of blue. The pickles are read as plain data
(see plain_pickle): they cannot run anything.

Copies of CIFAR-10 go round whose images were compressed as JPEG on the way, or changed otherwise. A whole set of
training images whose mean is not that of the published ones is loaded, and says so in its `remark`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
_LARGEST_FILE_BYTES_100 = 1 << 28  # nearly twice the real training images
_LARGEST_ARCHIVE_BYTES = 1 << 29


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way a data set is published: its files, its archive, and how a file is decoded; the last file is the test.

    >>> BINARY.names
    ('data_batch_1.bin', ..., 'data_batch_5.bin', 'test_batch.bin')
    """

    names: tuple[str, ...]
    folder: str
    archive: RemoteFile
    decode: Callable[[bytes], Pixels]
    largest_file_bytes: int = _LARGEST_FILE_BYTES


def decode_binary(data: bytes, *, label_bytes: int = 1) -> Pixels:
    """Return the images and labels of one binary batch; of several label bytes, the last counts.

    >>> decode_binary(bytes([7]) + bytes(3072)).labels.tolist()
    [7]
    >>> decode_binary(bytes([7, 49]) + bytes(3072), label_bytes=2).labels.tolist()
    [49]
    """
    record_bytes = label_bytes + _PIXEL_BYTES
    if not data or len(data) % record_bytes:
        raise DatasetError(f"it has {len(data)} bytes, which is no whole number of {record_bytes}-byte images")
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, record_bytes)
    return Pixels(images=records[:, label_bytes:].reshape(-1, 3, 32, 32), labels=records[:, label_bytes - 1])


def decode_python(data: bytes, *, key: str = "labels", classes: int = 10) -> Pixels:
    """Return the images and labels of one pickled batch.

    >>> import pickle
    >>> batch = {"data": np.zeros((2, 3072), np.uint8), "labels": [3, 4]}
    >>> decode_python(pickle.dumps(batch, protocol=2)).labels.tolist()
    [3, 4]
    """
    batch = read_plain_pickle(data)
    images, labels = batch.get("data"), batch.get(key)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (_PIXEL_BYTES,):
        raise DatasetError(f"its 'data' is no array of bytes [n, {_PIXEL_BYTES}]")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < classes for label in labels):
        raise DatasetError(f"its '{key}' are no list of numbers between 0 and {classes - 1}")
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


BINARY_100 = Layout(
    names=("train.bin", "test.bin"),
    folder="cifar-100-binary",
    archive=RemoteFile(name="cifar-100-binary.tar.gz", payload_bytes=168513733, md5="03b5dce01913d631647c71ecec9e9cb8"),
    decode=partial(decode_binary, label_bytes=2),
    largest_file_bytes=_LARGEST_FILE_BYTES_100,
)
PYTHON_100 = Layout(
    names=("train", "test"),
    folder="cifar-100-python",
    archive=RemoteFile(name="cifar-100-python.tar.gz", payload_bytes=169001437, md5="eb9058c3a382ffc7106e4002c42a8d85"),
    decode=partial(decode_python, key="fine_labels", classes=100),
    largest_file_bytes=_LARGEST_FILE_BYTES_100,
)

PUBLISHED_TRAINING_IMAGES = 50_000
PUBLISHED_MEAN = (0.49139968, 0.48215841, 0.44653091)  # of red, green and blue, where white is 1
_MEAN_TOLERANCE = 5e-6  # others print the mean with errors of 4e-7; a copy that went through JPEG was 1.5e-4 away


def load_cifar10(request: Request, *, archive: RemoteFile = BINARY.archive) -> Dataset:
    """Load photographs of ten kinds of things, 50,000 and 10,000, 32x32 pixels in colour.

    >>> load_cifar10(Request(directory=Path("/nowhere"), download=False))
    Traceback (most recent call last):
    paceline.data.reading.DatasetError: cifar10 is not in /nowhere: put cifar-10-binary.tar.gz (or ...) there
    """
    train, test = _load("cifar10", (BINARY, PYTHON), archive, request)
    return replace(from_pixels("cifar10", train, test, classes=10), remark=remark_on(train))


def load_cifar100(request: Request, *, archive: RemoteFile = BINARY_100.archive) -> Dataset:
    """Load photographs of a hundred kinds of things, 50,000 and 10,000, 32x32 pixels in colour.

    >>> load_cifar100(Request(directory=Path("/nowhere"), download=False))
    Traceback (most recent call last):
    paceline.data.reading.DatasetError: cifar100 is not in /nowhere: put cifar-100-binary.tar.gz (or ...) there
    """
    train, test = _load("cifar100", (BINARY_100, PYTHON_100), archive, request)
    return from_pixels("cifar100", train, test, classes=100)


def remark_on(train: Pixels, *, expected: int = PUBLISHED_TRAINING_IMAGES) -> str:
    """Return what results on these images of CIFAR-10 should say; nothing, if they are as published or are fewer.

    >>> grey = Pixels(images=np.full((2, 3, 32, 32), 128, np.uint8), labels=np.zeros(2, np.uint8))
    >>> remark_on(grey), remark_on(grey, expected=2)[:64]
    ('', 'These CIFAR-10 images are not those of the published release: th')
    """
    if len(train.images) != expected:
        return ""
    sums = [sum(int(part.sum(dtype=np.int64)) for part in np.array_split(train.images[:, c], 50)) for c in range(3)]
    mean = [each / (255 * train.images[:, 0].size) for each in sums]
    if all(abs(ours - theirs) <= _MEAN_TOLERANCE for ours, theirs in zip(mean, PUBLISHED_MEAN, strict=True)):
        return ""
    found, published = (", ".join(f"{each:.5f}" for each in means) for means in (mean, PUBLISHED_MEAN))
    return (
        "These CIFAR-10 images are not those of the published release: their mean is "
        f"{found}, that of the published ones {published} (they were compressed again, or changed); figures may differ."
    )


def _load(name: str, layouts: Sequence[Layout], archive: RemoteFile, request: Request) -> tuple[Pixels, Pixels]:
    """Return training and test images of the first layout that is whole; `archive` is the first one's, if none is."""
    first = layouts[0]
    places = places_for(name, request, subfolders=tuple(layout.folder for layout in layouts))
    batches = _find(places, layouts)
    if batches is None:
        wanted = f"{archive.name} (or {first.names[0]} ... {first.names[-1]})"
        fetch(places, [archive], request, base=BASE, wanted=wanted)
        batches = _from_archive(first, places.target / archive.name)
    train = Pixels(
        images=np.concatenate([batch.images for batch in batches[:-1]]),
        labels=np.concatenate([batch.labels for batch in batches[:-1]]),
    )
    return train, batches[-1]


def _find(places: Places, layouts: Sequence[Layout]) -> list[Pixels] | None:
    """Return the batches of the first layout that is whole: files before archives, then in the order of layouts."""
    for folder in places.folders:
        for layout in layouts:
            paths = [folder / name for name in layout.names]
            if all(path.is_file() for path in paths):
                return [_from_file(layout, path) for path in paths]
    for folder in places.folders:
        for layout in layouts:
            if (folder / layout.archive.name).is_file():
                return _from_archive(layout, folder / layout.archive.name)
    return None


def _from_file(layout: Layout, path: Path) -> Pixels:
    data = read_file(path, largest_bytes=layout.largest_file_bytes)
    with naming(path):
        return layout.decode(data)


def _from_archive(layout: Layout, path: Path) -> list[Pixels]:
    members = read_members(
        path, layout.names, largest_member_bytes=layout.largest_file_bytes, largest_bytes=_LARGEST_ARCHIVE_BYTES
    )
    batches = []
    for name in layout.names:
        with naming(path / name):
            batches.append(layout.decode(members[name]))
    return batches
