"""The idx format of MNIST and its relatives, read with care.

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
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.errors import DatasetError
from paceline.data.reading import Readable, naming, read_up_to

LARGEST_BYTES = 1 << 28  # five times the largest file of the MNIST family


def read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """The array in an idx file, plain or compressed (.gz).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "labels"
    ...     _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
    ...     read_idx(path, dimensions=1).tolist()
    [7, 8, 9]
    """
    with naming(path):
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as unpacked:
                return _read(unpacked, dimensions, file_bytes=None)
        with path.open("rb") as plain:
            return _read(plain, dimensions, file_bytes=os.fstat(plain.fileno()).st_size)


def _read(stream: Readable, dimensions: int, *, file_bytes: int | None) -> NDArray[np.uint8]:
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
