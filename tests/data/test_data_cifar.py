"""CIFAR in its shapes gives the same tensors; damaged and hostile files are refused; changed images are told."""

import gzip
import io
import os
import pickle
import tarfile
import tracemalloc

import numpy as np
import pytest
import torch

from paceline.data import DatasetError, Request, load_dataset
from paceline.data.cifar import (
    BINARY,
    BINARY_100,
    PUBLISHED_MEAN,
    PYTHON,
    PYTHON_100,
    load_cifar10,
    load_cifar100,
    remark_on,
)
from paceline.data.samples import Pixels

ROWS = 4


def batches() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    return {
        name: (random.integers(0, 256, (ROWS, 3072), dtype=np.uint8), random.integers(0, 10, ROWS))
        for name in PYTHON.names
    }


def binary_files() -> dict[str, bytes]:
    return {
        f"{name}.bin": np.concatenate([labels[:, None].astype(np.uint8), pixels], axis=1).tobytes()
        for name, (pixels, labels) in batches().items()
    }


def python_files() -> dict[str, bytes]:
    return {
        name: pickle.dumps({b"data": pixels, b"labels": labels.tolist()}, protocol=2)
        for name, (pixels, labels) in batches().items()
    }


def write_files(folder, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def archive_bytes(files: dict[str, bytes], inside: str = "cifar-10-batches-bin") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{inside}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


SHAPES = {
    "binary": lambda root: write_files(root, binary_files()),
    "binary, unpacked": lambda root: write_files(root / BINARY.folder, binary_files()),
    "binary, own folder": lambda root: write_files(root / "cifar10" / BINARY.folder, binary_files()),
    "binary, packed": lambda root: write_files(root, {BINARY.archive.name: archive_bytes(binary_files())}),
    "python": lambda root: write_files(root, python_files()),
    "python, unpacked": lambda root: write_files(root / PYTHON.folder, python_files()),
    "python, packed": lambda root: write_files(
        root / "cifar10", {PYTHON.archive.name: archive_bytes(python_files(), PYTHON.folder)}
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_samples(tmp_path, shape):
    SHAPES[shape](tmp_path)
    data = load_dataset("cifar10", directory=tmp_path, download=False)
    expected = batches()
    train = np.concatenate([expected[name][0] for name in PYTHON.names[:5]]).reshape(-1, 3, 32, 32)
    mean, deviation = train.mean((0, 2, 3), keepdims=True), train.std((0, 2, 3), keepdims=True)
    assert torch.allclose(data.train.inputs, torch.tensor((train - mean) / deviation).float(), atol=1e-5)
    test = (expected["test_batch"][0].reshape(-1, 3, 32, 32) - mean) / deviation
    assert torch.allclose(data.test.inputs, torch.tensor(test).float(), atol=1e-5)
    assert data.test.targets.tolist() == expected["test_batch"][1].tolist()
    assert (len(data.train), len(data.test), data.input_shape) == (5 * ROWS, ROWS, (3, 32, 32))


def test_a_missing_set_says_which_files_go_where(tmp_path):
    with pytest.raises(DatasetError) as caught:
        load_dataset("cifar10", directory=tmp_path, download=False)
    wanted = "cifar-10-binary.tar.gz (or data_batch_1.bin ... test_batch.bin)"
    assert str(caught.value) == f"cifar10 is not in {tmp_path}: put {wanted} there"


def test_a_missing_archive_is_downloaded_and_read(server, tmp_path):
    archive = server.publish(BINARY.archive.name, archive_bytes(binary_files()))
    data = load_cifar10(Request(directory=tmp_path, mirror=server.base), archive=archive)
    assert len(data.train) == 5 * ROWS
    assert [path.name for path in (tmp_path / "cifar10").iterdir()] == [BINARY.archive.name]


def refused(tmp_path) -> str:
    with pytest.raises(DatasetError) as caught:
        load_dataset("cifar10", directory=tmp_path, download=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no whole number of 3073-byte images"),
        (bytes(3072), "3072 bytes"),
        (bytes([10]) + bytes(3072), "between 0 and 9"),
        (bytes((1 << 26) + 1), "at most 67,108,864 are allowed"),
    ],
    ids=["empty", "cut off", "class 10", "too large"],
)
def test_damaged_binary_files_are_refused(tmp_path, content, says):
    write_files(tmp_path, {**binary_files(), "data_batch_3.bin": content})
    assert says in refused(tmp_path)


class Runs:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("packed", [False, True])
def test_a_hostile_python_batch_runs_nothing(tmp_path, packed):
    hostile = pickle.dumps({"data": Runs(f"touch {tmp_path}/ran"), "labels": []}, protocol=2)
    files = {**python_files(), "data_batch_2": hostile}
    write_files(tmp_path, {PYTHON.archive.name: archive_bytes(files, PYTHON.folder)} if packed else files)
    assert "'posix system'" in refused(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"labels": [1]}, "'data' is no array"),
        ({"data": [1, 2], "labels": [1]}, "'data' is no array"),
        ({"data": np.zeros((1, 3072)), "labels": [1]}, "'data' is no array of bytes"),
        ({"data": np.zeros((1, 3071), np.uint8), "labels": [1]}, "'data' is no array of bytes [n, 3072]"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, "2 images and 1 labels"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": ["1"]}, "'labels' are no list"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}, "'labels' are no list"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [True]}, "'labels' are no list"),
        ([1], "something else than a dict"),
    ],
    ids=["none", "list", "floats", "short", "one label too few", "text", "class 10", "truth", "no dict"],
)
def test_python_batches_that_hold_something_else_are_refused(tmp_path, batch, says):
    write_files(tmp_path, {**python_files(), "test_batch": pickle.dumps(batch, protocol=2)})
    assert says in refused(tmp_path)


def test_archives_that_lack_or_repeat_a_member_are_refused(tmp_path):
    files = binary_files()
    del files["data_batch_4.bin"]
    write_files(tmp_path, {BINARY.archive.name: archive_bytes(files)})
    assert "it lacks data_batch_4.bin" in refused(tmp_path)
    twice = {**binary_files(), "again/data_batch_1.bin": b""}
    write_files(tmp_path, {BINARY.archive.name: archive_bytes(twice)})
    assert "data_batch_1.bin twice" in refused(tmp_path)


def test_members_that_point_elsewhere_write_nothing_and_links_are_not_followed(tmp_path):
    (tmp_path / "data").mkdir()
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(3073))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in {"../../escaped": b"x", "/tmp/escaped": b"x", **binary_files()}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if name == "data_batch_1.bin":
                member.type, member.linkname, member.size = tarfile.SYMTYPE, str(secret), 0
            archive.addfile(member, io.BytesIO(content))
    write_files(tmp_path / "data", {BINARY.archive.name: buffer.getvalue()})
    with pytest.raises(DatasetError, match=r"it lacks data_batch_1\.bin"):
        load_dataset("cifar10", directory=tmp_path / "data", download=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "secret"]


def test_archives_that_are_broken_or_large_are_refused(tmp_path):
    whole = archive_bytes(binary_files())
    many = archive_bytes({f"file{n}": b"" for n in range(200)})
    for content, says in (
        (b"", "cannot read"),
        (b"nothing of the kind", "ot a gzip"),
        (gzip.compress(b"no archive, but long enough to hold a header" * 40, mtime=0), "cannot read"),
        (whole[: len(whole) // 2], "cannot read"),
        (many, "more than the 100 members"),
    ):
        write_files(tmp_path, {BINARY.archive.name: content})
        assert says in refused(tmp_path)


def test_a_bomb_in_an_archive_takes_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.data.cifar._LARGEST_ARCHIVE_BYTES", 4 << 20)
    bomb = archive_bytes({"padding": bytes(16 << 20), **binary_files()})
    write_files(tmp_path, {BINARY.archive.name: bomb})
    tracemalloc.start()
    message = refused(tmp_path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "unpacks to more than the 4194304 bytes" in message
    assert peak_bytes < 8 << 20


def test_a_member_that_claims_to_be_huge_is_refused_before_it_is_read(tmp_path):
    member = tarfile.TarInfo("data_batch_1.bin")
    member.size = 10**12
    write_files(tmp_path, {BINARY.archive.name: gzip.compress(member.tobuf() + bytes(2048))})
    assert "has 1000000000000 bytes" in refused(tmp_path)


# -- a hundred classes -------------------------------------------------------------------------------------------------


def batches_100() -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    random = np.random.default_rng(1)
    return {
        name: (
            random.integers(0, 256, (rows, 3072), dtype=np.uint8),
            random.integers(0, 20, rows),
            np.arange(rows) * 99 // (rows - 1),
        )
        for name, rows in (("train", 3 * ROWS), ("test", ROWS))
    }


def binary_files_100() -> dict[str, bytes]:
    return {
        f"{name}.bin": np.concatenate([np.stack([coarse, fine], 1).astype(np.uint8), pixels], axis=1).tobytes()
        for name, (pixels, coarse, fine) in batches_100().items()
    }


def python_files_100() -> dict[str, bytes]:
    return {
        name: pickle.dumps(
            {
                b"filenames": [f"image_{index}.png".encode() for index in range(len(fine))],
                b"batch_label": b"training batch 1 of 1",
                b"fine_labels": fine.tolist(),
                b"coarse_labels": coarse.tolist(),
                b"data": pixels,
            },
            protocol=2,
        )
        for name, (pixels, coarse, fine) in batches_100().items()
    }


def packed_100(layout, files: dict[str, bytes]) -> dict[str, bytes]:
    return {layout.archive.name: archive_bytes(files, layout.folder)}


SHAPES_100 = {
    "binary": lambda root: write_files(root, binary_files_100()),
    "binary, unpacked": lambda root: write_files(root / BINARY_100.folder, binary_files_100()),
    "binary, packed": lambda root: write_files(root, packed_100(BINARY_100, binary_files_100())),
    "python, own folder": lambda root: write_files(root / "cifar100" / PYTHON_100.folder, python_files_100()),
    "python, packed": lambda root: write_files(root / "cifar100", packed_100(PYTHON_100, python_files_100())),
}


@pytest.mark.parametrize("shape", SHAPES_100)
def test_every_shape_gives_the_same_hundred_classes(tmp_path, shape):
    SHAPES_100[shape](tmp_path)
    data = load_dataset("cifar100", directory=tmp_path, download=False)
    pixels, _, fine = batches_100()["train"]
    train = pixels.reshape(-1, 3, 32, 32)
    mean, deviation = train.mean((0, 2, 3), keepdims=True), train.std((0, 2, 3), keepdims=True)
    assert torch.allclose(data.train.inputs, torch.tensor((train - mean) / deviation).float(), atol=1e-5)
    assert data.train.targets.tolist() == fine.tolist()
    assert data.test.targets.tolist() == [0, 33, 66, 99]
    assert (data.classes, len(data.test), data.input_shape, data.remark) == (100, ROWS, (3, 32, 32), "")


def test_the_two_sets_do_not_take_each_others_files(tmp_path):
    write_files(tmp_path, {**python_files(), BINARY.archive.name: archive_bytes(binary_files())})
    with pytest.raises(DatasetError) as caught:
        load_dataset("cifar100", directory=tmp_path, download=False)
    wanted = "cifar-100-binary.tar.gz (or train.bin ... test.bin)"
    assert str(caught.value) == f"cifar100 is not in {tmp_path}: put {wanted} there"


def test_a_missing_archive_of_a_hundred_classes_is_downloaded_and_read(server, tmp_path):
    archive = server.publish(BINARY_100.archive.name, archive_bytes(binary_files_100(), BINARY_100.folder))
    data = load_cifar100(Request(directory=tmp_path, mirror=server.base), archive=archive)
    assert len(data.train) == 3 * ROWS
    assert [path.name for path in (tmp_path / "cifar100").iterdir()] == [BINARY_100.archive.name]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"train.bin": b""}, "no whole number of 3074-byte images"),
        ({"train.bin": bytes(3073)}, "3073 bytes"),
        ({"test.bin": bytes([0, 100]) + bytes(3072)}, "between 0 and 99"),
    ],
    ids=["empty", "the other set's", "class 100"],
)
def test_damaged_binary_files_of_a_hundred_classes_are_refused(tmp_path, files, says):
    write_files(tmp_path, {**binary_files_100(), **files})
    with pytest.raises(DatasetError, match=says):
        load_dataset("cifar100", directory=tmp_path, download=False)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (
            {"data": np.zeros((1, 3072), np.uint8), "labels": [1]},
            "'fine_labels' are no list of numbers between 0 and 99",
        ),
        ({"data": np.zeros((1, 3072), np.uint8), "fine_labels": [100]}, "'fine_labels' are no list"),
        ({"data": np.zeros((1, 3072), np.uint8), "fine_labels": [1, 2]}, "1 images and 2 labels"),
    ],
    ids=["the other set's", "class 100", "one label too many"],
)
def test_python_files_of_a_hundred_classes_that_hold_something_else_are_refused(tmp_path, batch, says):
    write_files(tmp_path, {**python_files_100(), "train": pickle.dumps(batch, protocol=2)})
    with pytest.raises(DatasetError, match=says):
        load_dataset("cifar100", directory=tmp_path, download=False)


def test_a_damaged_archive_of_a_hundred_classes_is_refused(tmp_path):
    for files, says in (({"train.bin": b""}, "it lacks test.bin"), ({"train": b""}, r"it lacks test.bin, train.bin")):
        write_files(tmp_path, packed_100(BINARY_100, files))
        with pytest.raises(DatasetError, match=says):
            load_dataset("cifar100", directory=tmp_path, download=False)
    hostile = pickle.dumps({"data": Runs(f"touch {tmp_path}/ran"), "fine_labels": []}, protocol=2)
    (tmp_path / BINARY_100.archive.name).unlink()
    write_files(tmp_path, packed_100(PYTHON_100, {**python_files_100(), "train": hostile}))
    with pytest.raises(DatasetError, match="'posix system'"):
        load_dataset("cifar100", directory=tmp_path, download=False)
    assert not (tmp_path / "ran").exists()


# -- images that are not those of the release --------------------------------------------------------------------------


def with_mean(mean: tuple[float, ...], count: int = 2000) -> Pixels:
    """Images of two neighbouring values whose mean is as near to the wanted one as bytes allow."""
    images = np.zeros((count, 3, 32, 32), np.uint8)
    for channel, wanted in enumerate(mean):
        total = round(wanted * 255 * count * 1024)
        plane = np.full(count * 1024, total // (count * 1024), np.uint8)
        plane[: total % (count * 1024)] += 1
        images[:, channel] = plane.reshape(count, 32, 32)
    return Pixels(images=images, labels=np.zeros(count, np.int64))


def test_images_of_the_published_mean_need_no_remark_and_others_get_one():
    red, green, blue = PUBLISHED_MEAN
    assert remark_on(with_mean(PUBLISHED_MEAN), expected=2000) == ""
    assert remark_on(with_mean((red + 4e-6, green - 4e-6, blue)), expected=2000) == ""
    for changed in ((red + 6e-6, green, blue), (red, green - 6e-6, blue), (red, green, blue + 1e-3)):
        assert "not those of the published release" in remark_on(with_mean(changed), expected=2000)
    assert "0.50000, 0.48216, 0.44653" in remark_on(with_mean((0.5, green, blue)), expected=2000)


def test_a_set_that_is_not_whole_gets_no_remark(tmp_path):
    assert remark_on(with_mean((0.5, 0.5, 0.5))) == ""
    write_files(tmp_path, binary_files())
    assert load_dataset("cifar10", directory=tmp_path, download=False).remark == ""


def test_a_whole_set_that_was_changed_is_loaded_with_its_remark(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.data.cifar.remark_on", lambda train: f"{len(train.images)} changed images")
    write_files(tmp_path, binary_files())
    assert load_dataset("cifar10", directory=tmp_path, download=False).remark == f"{5 * ROWS} changed images"
