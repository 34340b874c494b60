"""MNIST and its sibling: found where people put them, fetched where missing, told apart."""

import gzip
import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.data import DatasetError, Request, load_dataset
from paceline.data.mnist import FASHION_MNIST, MNIST, load_idx_dataset
from tests.data.data_files import idx_bytes, write_idx_dataset

LABELS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


@pytest.mark.parametrize("place", ["", "mnist", "MNIST/raw", "raw", "mnist/MNIST/raw"])
@pytest.mark.parametrize(("opened", "suffix"), [(open, ""), (gzip.open, ".gz")])
def test_files_are_found_plain_or_compressed(tmp_path, place, opened, suffix):
    write_idx_dataset(tmp_path / place, labels=LABELS, opened=opened, suffix=suffix)
    data = load_dataset("mnist", directory=tmp_path, download=False)
    assert (data.name, data.classes, data.input_shape) == ("mnist", 10, (1, 28, 28))
    assert data.train.targets.tolist() == LABELS
    assert abs(float(data.train.inputs.mean())) < 1e-6
    assert float(data.train.inputs.std(correction=0)) == pytest.approx(1, abs=1e-6)


def test_the_environment_names_the_root(tmp_path, monkeypatch):
    write_idx_dataset(tmp_path / "fashion-mnist", labels=LABELS)
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    assert len(load_dataset("fashion-mnist", download=False).test) == len(LABELS)


def test_the_cache_in_the_home_folder_is_the_last_resort(tmp_path):
    write_idx_dataset(tmp_path / "home" / ".cache" / "paceline" / "mnist", labels=LABELS)
    assert len(load_dataset("mnist", download=False).test) == len(LABELS)


def test_a_folder_of_its_own_comes_before_files_that_lie_around(tmp_path):
    write_idx_dataset(tmp_path, labels=[1] * 11)
    write_idx_dataset(tmp_path / "mnist", labels=LABELS)
    assert load_dataset("mnist", directory=tmp_path, download=False).train.targets.tolist() == LABELS


def test_fashion_mnist_is_not_mistaken_for_mnist(tmp_path):
    """They share file names: a user with both in one folder trained on the wrong one without a word."""
    write_idx_dataset(tmp_path, labels=[*FASHION_MNIST.first_labels, 1])
    assert len(load_dataset("fashion-mnist", directory=tmp_path, download=False).train) == 11
    with pytest.raises(DatasetError, match="holds fashion-mnist, not mnist"):
        load_dataset("mnist", directory=tmp_path, download=False)


def test_a_missing_set_says_which_files_go_where(tmp_path):
    with pytest.raises(DatasetError) as caught:
        load_dataset("mnist", directory=tmp_path, download=False)
    assert str(caught.value) == (
        f"mnist is not in {tmp_path}: put train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, "
        "t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz (or the same without .gz) there"
    )


def test_only_the_missing_file_is_asked_for(tmp_path):
    write_idx_dataset(tmp_path / "mnist", labels=LABELS)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DatasetError, match=r"put t10k-labels-idx1-ubyte.gz \(or"):
        load_dataset("mnist", directory=tmp_path, download=False)


def published(server):
    images = np.zeros((len(LABELS), 28, 28), dtype=np.uint8)
    contents = [idx_bytes(images), idx_bytes(np.array(LABELS, dtype=np.uint8))] * 2
    files = tuple(
        server.publish(file.name, gzip.compress(content)) for file, content in zip(MNIST.files, contents, strict=True)
    )
    return replace(MNIST, base=server.base, files=files)


def test_missing_files_are_downloaded_once(server, tmp_path):
    source, request = published(server), Request(directory=tmp_path)
    first = load_idx_dataset(source, request)
    assert len(server.asked) == 4
    again = load_idx_dataset(source, request)
    assert len(server.asked) == 4
    assert torch.equal(first.train.targets, again.train.targets)
    assert sorted(path.name for path in (tmp_path / "mnist").iterdir()) == sorted(f.name for f in source.files)


def test_a_mirror_is_asked_instead_of_the_source(server, tmp_path):
    source = replace(published(server), base="http://127.0.0.1:9/")
    assert len(load_idx_dataset(source, Request(directory=tmp_path, mirror=server.base)).train) == len(LABELS)


def test_a_failed_download_says_why_and_what_to_do(server, tmp_path):
    source = published(server)
    server.bodies["/train-labels-idx1-ubyte.gz"] = bytes(source.files[1].payload_bytes)
    with pytest.raises(DatasetError) as caught:
        load_idx_dataset(source, Request(directory=tmp_path))
    message = str(caught.value)
    assert message.startswith(f"mnist is not in {tmp_path} and cannot be fetched")
    assert source.files[1].md5 in message
    assert hashlib.md5(server.bodies["/train-labels-idx1-ubyte.gz"]).hexdigest() in message
    assert "put train-images" in message
    assert [path.name for path in (tmp_path / "mnist").iterdir()] == ["train-images-idx3-ubyte.gz"]


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        (
            "train-images-idx3-ubyte",
            np.zeros((12, 27, 28), np.uint8),
            "28 x 28 pixels \\(they are 27 x 28\\)",
        ),
        ("train-labels-idx1-ubyte", np.zeros(11, np.uint8), "images=12, labels=11"),
        ("t10k-labels-idx1-ubyte", np.full(12, 10, np.uint8), "between 0 and 9.*largest=10"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(tmp_path, name, values, says):
    write_idx_dataset(tmp_path, labels=LABELS)
    (tmp_path / name).write_bytes(idx_bytes(values))
    with pytest.raises(DatasetError, match=says):
        load_dataset("mnist", directory=tmp_path, download=False)


def test_a_system_wide_copy_is_used_only_when_no_directory_was_named(tmp_path):
    write_idx_dataset(tmp_path / "system", labels=LABELS)
    source = replace(FASHION_MNIST, elsewhere=(str(tmp_path / "system"),))
    assert len(load_idx_dataset(source, Request(download=False)).train) == len(LABELS)
    with pytest.raises(DatasetError, match="fashion-mnist is not in"):
        load_idx_dataset(source, Request(directory=tmp_path / "other", download=False))
