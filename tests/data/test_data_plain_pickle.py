"""Pickles are read as data. Whatever they ask for, nothing runs."""

import io
import os
import pickle
import pickletools
import struct
import time
import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import DatasetError
from paceline.data.plain_pickle import read_plain_pickle

GLOBAL_ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
U1 = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


def python2_batch(labels: list[int], pixels: bytes, shape: tuple[int, int]) -> bytes:
    """The instructions Python 2 wrote into the published CIFAR-10 files, in their order."""
    size = b"".join(b"M" + struct.pack("<H", n) for n in shape) + b"\x86"
    return (
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05("
        + b"".join(b"K" + bytes([label]) for label in labels)
        + b"eU\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07"
        + b"cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\t"
        + b"(K\x01"
        + size
        + b"cnumpy\ndtype\nq\nU\x02u1K\x00K\x01\x87Rq\x0b"
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<i", len(pixels))
        + pixels
        + b"tb"
        + b"U\tfilenamesq\x0c](U\x05a.pngU\x05b.pngeu."
    )


def test_the_published_layout_is_read():
    batch = read_plain_pickle(python2_batch([6, 9], bytes(range(12)), (2, 6)))
    assert batch["labels"] == [6, 9]
    assert batch["filenames"] == [b"a.png", b"b.png"]
    assert batch["batch_label"] == b"training batch 1 of 5"
    assert batch["data"].tolist() == np.arange(12).reshape(2, 6).tolist()


def test_the_hand_made_batch_is_what_python_itself_reads():
    data = python2_batch([6, 9], bytes(range(12)), (2, 6))
    theirs = pickle.loads(data, encoding="bytes")  # noqa: S301 -- made three lines above
    assert theirs[b"data"].tolist() == read_plain_pickle(data)["data"].tolist()


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.tuples(inner, inner, inner, inner)
        | st.dictionaries(st.text() | st.integers(1 - 2**60, 2**60 - 1), inner)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(), plain), st.sampled_from([2, 3, 4]))
def test_plain_data_comes_back_as_it_was(value, protocol):
    assert read_plain_pickle(pickle.dumps(value, protocol=protocol)) == value


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("kind", ["u1", "<i4", ">i4", "<f8", "i8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_come_back_as_they_were(protocol, kind, order):
    array = np.asarray(np.arange(12).reshape(3, 4), dtype=kind, order=order)
    again = read_plain_pickle(pickle.dumps({"data": array}, protocol=protocol))["data"]
    assert again.dtype == array.dtype
    assert again.tolist() == array.tolist()


class Calls:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def hostile(marker: str) -> dict[str, bytes]:
    command = f"touch {marker}"
    code = f"open({marker!r}, 'w')"
    text = marker.encode()
    arrays = np.array([Calls(os.system, command)], dtype=object)
    return {
        "os.system": pickle.dumps({"data": Calls(os.system, command)}),
        "os.system, protocol 0": pickle.dumps({"data": Calls(os.system, command)}, protocol=0),
        "os.system, protocol 2": pickle.dumps({"data": Calls(os.system, command)}, protocol=2),
        "eval": pickle.dumps({"data": Calls(eval, code)}),
        "exec": pickle.dumps({"data": Calls(exec, code)}, protocol=2),
        "getattr": pickle.dumps({"data": Calls(getattr, "", "join")}),
        "open": pickle.dumps({"data": Calls(io.open, marker, "w")}, protocol=2),
        "object array": pickle.dumps({"data": arrays}, protocol=2),
        "object array, protocol 5": pickle.dumps({"data": arrays}, protocol=5),
        "plain object array": pickle.dumps({"data": np.array([None, "x"], dtype=object)}, protocol=2),
        "structured array": pickle.dumps({"data": np.zeros(2, dtype=[("a", "u1")])}, protocol=2),
        "instance": b"(S'" + text + b"'\nios\nmkdir\n.",
        "obj": b"(cos\nmkdir\nX" + struct.pack("<I", len(text)) + text + b"o.",
        "newobj": b"\x80\x02cos\nmkdir\nX" + struct.pack("<I", len(text)) + text + b"\x85\x81.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x06systemX" + struct.pack("<I", len(text)) + text + b"\x93\x85R.",
        "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__init__\x93.",
        "extension registry": b"\x80\x02\x82\x01.",
        "persistent id": b"Pos.system\n.",
        "reduce with a string": b"\x80\x02X\x09\x00\x00\x00os.systemX\x02\x00\x00\x00id\x85R.",
        "reduce with another class": GLOBAL_ARRAY.replace(b"cnumpy\nndarray\n", b"cnumpy\ndtype\n") + b".",
        "bytes with a size": b"c__builtin__\nbytes\nJ\xff\xff\xff\x7f\x85R.",
        "reduce ndarray itself": b"cnumpy\nndarray\nM\xff\xffM\xff\xffM\xff\xff\x87\x85R.",
        "reconstruct with huge dims": GLOBAL_ARRAY.replace(b"K\x00\x85", b"J\xff\xff\xff\x7f\x85") + b".",
        "build a dict": b"}}U\x01aK\x01sb.",
        "other codec": b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86R.",
    }


def test_hostile_pickles_are_refused_and_leave_nothing_behind(tmp_path):
    for name, data in hostile(str(tmp_path / "ran")).items():
        with pytest.raises(DatasetError) as caught:
            read_plain_pickle(data)
        assert "\n" not in str(caught.value), name
        assert len(str(caught.value)) < 250, name
        assert list(tmp_path.iterdir()) == [], name


def test_the_hostile_pickles_do_run_in_pythons_own_reader(tmp_path):
    """Else the test above would prove nothing."""
    marker = tmp_path / "ran"
    pickle.loads(hostile(str(marker))["eval"])["data"].close()  # noqa: S301 -- to show what it does
    assert marker.exists()


def test_the_refusal_names_the_name():
    with pytest.raises(DatasetError, match="'builtins eval'"):
        read_plain_pickle(pickle.dumps({"data": Calls(eval, "1")}))
    with pytest.raises(DatasetError, match="collections OrderedDict"):
        read_plain_pickle(pickle.dumps(OrderedDict(a=1)))


def array_pickle(shape: bytes, data: bytes) -> bytes:
    raw = b"T" + struct.pack("<i", len(data)) + data
    return b"\x80\x02}U\x04data" + GLOBAL_ARRAY + b"(K\x01" + shape + U1 + b"\x89" + raw + b"tbs."


@pytest.mark.parametrize(
    "shape",
    [
        b"J\xff\xff\xff\x7f\x85",  # larger than the file
        b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86",
        b"\x8a\xff" + b"\x7f" * 255 + b"\x85",  # 2,000 bits
        b"J\xff\xff\xff\xff\x85",  # -1
        b"K\x00J\xff\xff\xff\x7f\x86",  # nothing, times much
        b"K\x03\x85",  # smaller than its bytes
        b")",
        b"\x88K\x04\x86",  # True x 4
        b"(K\x01K\x01K\x01K\x01K\x01K\x01K\x04t",
    ],
)
def test_shapes_that_do_not_fit_the_bytes_are_refused_before_memory_is_asked_for(shape):
    assert read_plain_pickle(array_pickle(b"K\x04\x85", b"abcd"))["data"].tolist() == [97, 98, 99, 100]
    tracemalloc.start()
    with pytest.raises(DatasetError, match="array"):
        read_plain_pickle(array_pickle(shape, b"abcd"))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_an_array_that_is_never_filled_or_filled_twice_is_refused():
    with pytest.raises(DatasetError, match="never filled"):
        read_plain_pickle(b"\x80\x02}U\x04data" + GLOBAL_ARRAY + b"s.")
    fill = b"(K\x01K\x01\x85" + U1 + b"\x89U\x01atb"
    with pytest.raises(DatasetError, match="does not fit"):
        read_plain_pickle(b"\x80\x02}U\x04data" + GLOBAL_ARRAY + fill + fill + b"s.")


def test_every_truncation_is_refused():
    whole = python2_batch([6, 9], bytes(12), (2, 6))
    for length in range(len(whole)):
        with pytest.raises(DatasetError):
            read_plain_pickle(whole[:length])


def test_deep_nesting_ends_in_a_value_or_an_error_not_a_crash():
    depth = 60_000
    assert "a" in read_plain_pickle(b"\x80\x02}U\x01a" + b"]" * depth + b"a" * (depth - 1) + b"s.")
    assert "a" in read_plain_pickle(b"\x80\x02}U\x01a)" + b"\x85" * depth + b"s.")


def test_parts_shared_a_billion_times_cost_nothing():
    """Each tuple holds the one before twice: 2**60 leaves if anyone walked or hashed it."""
    laughs = b")q\x00" + b"".join(b"h%c\x68%c\x86q%c" % (i, i, i + 1) for i in range(60))
    began = time.monotonic()
    for data in (
        b"\x80\x02}" + laughs + b"K\x01s.",  # as a key
        b"\x80\x04\x8c\x02os" + laughs + b"\x93.",  # as a name
        b"\x80\x02" + laughs + b".",
    ):
        with pytest.raises(DatasetError):
            read_plain_pickle(data)
    assert time.monotonic() - began < 5


def test_too_many_instructions_are_refused(monkeypatch):
    """Each costs a byte in the file and a hundred in memory."""
    monkeypatch.setattr("paceline.data.plain_pickle.LARGEST_INSTRUCTIONS", 1000)
    with pytest.raises(DatasetError, match="more than 1000 instructions"):
        read_plain_pickle(b"\x80\x02" + b"]" * 1100 + b".")


def is_dict_or_refused(data: bytes) -> bool:
    try:
        return isinstance(read_plain_pickle(data), dict)
    except DatasetError as error:
        return "\n" not in str(error)


opcodes = st.sampled_from([code.code.encode("latin-1") for code in pickletools.opcodes])


@settings(deadline=None, max_examples=400)
@given(st.lists(opcodes | st.binary(max_size=4) | st.sampled_from([GLOBAL_ARRAY, U1]), max_size=30))
def test_any_instructions_are_a_dict_or_a_dataset_error(parts):
    assert is_dict_or_refused(b"".join(parts) + b".")


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_damaged_batch_is_a_dict_or_a_dataset_error(data):
    damaged = bytearray(python2_batch([6, 9], bytes(12), (2, 6)))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    assert is_dict_or_refused(bytes(damaged))


def test_whole_numbers_that_could_all_hash_alike_are_no_keys():
    with pytest.raises(DatasetError, match="keys"):
        read_plain_pickle(pickle.dumps({2**61 - 1: 0, 2 * (2**61 - 1): 0}))


def test_a_text_encoded_again_and_again_is_refused():
    """A megabyte of instructions that encode one remembered text made gigabytes of bytes."""
    copies = pickle.dumps({"data": ["x" * 1000]}, protocol=2)
    encode = b"c_codecs\nencode\n"
    text = b"X" + (1000).to_bytes(4, "little") + b"x" * 1000 + b"q\x00"
    repeated = b"".join(encode + b"(h\x00X\x06\x00\x00\x00latin1tR" for _ in range(50))
    hostile = b"\x80\x02}X\x01\x00\x00\x00a](" + text + repeated + b"es."
    assert read_plain_pickle(copies) == {"data": ["x" * 1000]}
    with pytest.raises(DatasetError, match="more bytes than it holds"):
        read_plain_pickle(hostile)
