"""The idx reader takes exactly what the header says, and nothing that lies."""

import gzip
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import DatasetError
from paceline.data.mnist import LARGEST_BYTES, read_idx
from tests.data.data_files import idx_bytes

GOOD = idx_bytes(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))


def read(tmp_path, data: bytes, *, dimensions: int = 3, compressed: bool = False) -> np.ndarray:
    path = tmp_path / ("values.gz" if compressed else "values")
    path.write_bytes(gzip.compress(data) if compressed else data)
    return read_idx(path, dimensions=dimensions)


@pytest.mark.parametrize("compressed", [False, True])
def test_values_come_back(tmp_path, compressed):
    values = read(tmp_path, GOOD, compressed=compressed)
    assert values.tolist() == np.arange(24).reshape(2, 3, 4).tolist()


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "missing"),
        (GOOD[:3], "00 00 08"),
        (GOOD[:9], "ends inside its header"),
        (GOOD[:-1], "40 bytes|39 bytes"),
        (GOOD + b"x", "bytes where its header says 40"),
        (b"\x00\x00\x0d" + GOOD[3:], "no idx file"),
        (b"\x00\x00\x08\x01" + GOOD[4:], "3 dimensions"),
        (b"\x00\x00\x08\x03" + struct.pack(">3I", 0, 3, 4), "0 x 3 x 4"),
        (b"\x00\x00\x08\x03" + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 4), str(LARGEST_BYTES)),
    ],
)
def test_a_file_that_lies_is_refused_in_one_line(tmp_path, data, says, compressed):
    with pytest.raises(DatasetError, match=says) as caught:
        read(tmp_path, data, compressed=compressed)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_header_that_claims_much_takes_little_memory(tmp_path):
    claims = b"\x00\x00\x08\x01" + struct.pack(">I", LARGEST_BYTES)
    for compressed in (False, True):
        tracemalloc.start()
        with pytest.raises(DatasetError):
            read(tmp_path, claims, dimensions=1, compressed=compressed)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 8 << 20


def test_a_bomb_is_opened_no_further_than_its_header_says(tmp_path):
    bomb = idx_bytes(np.zeros(100, dtype=np.uint8)) + bytes(64 << 20)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bomb, compresslevel=1))
    tracemalloc.start()
    with pytest.raises(DatasetError, match="more bytes where its header says 108"):
        read_idx(path, dimensions=1)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 << 20


PACKED = gzip.compress(GOOD, mtime=0)  # the time in the header would make test names that differ from second to second


@pytest.mark.parametrize(
    "data", [b"no gzip", PACKED[:-9], PACKED[:20] + b"\xff" * 30], ids=["no gzip", "cut short", "overwritten"]
)
def test_broken_compression_is_refused_in_one_line(tmp_path, data):
    path = tmp_path / "values.gz"
    path.write_bytes(data)
    with pytest.raises(DatasetError, match="cannot read"):
        read_idx(path, dimensions=3)


def test_a_missing_file_is_refused_in_one_line(tmp_path):
    with pytest.raises(DatasetError, match="No such file"):
        read_idx(tmp_path / "nothing", dimensions=1)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60), st.sampled_from([1, 3]))
def test_any_bytes_are_an_array_or_a_dataset_error(tmp_path_factory, data, dimensions):
    path = tmp_path_factory.getbasetemp() / "fuzz"
    path.write_bytes(b"\x00\x00\x08" + data)
    try:
        values = read_idx(path, dimensions=dimensions)
    except DatasetError:
        return
    assert values.ndim == dimensions
    assert values.size == len(data) - 1 - 4 * dimensions
