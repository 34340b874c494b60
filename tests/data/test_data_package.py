"""The package as a whole: its table, its quick import, the sets that need no files, and its page."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paceline.data
from paceline.data import DATASETS, Dataset, Samples, load_dataset


def test_importing_the_package_loads_neither_torch_nor_sklearn():
    code = "import sys, paceline.data; print([n for n in ('torch', 'sklearn', 'numpy') if n in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_the_table_and_the_public_names_are_all_there():
    for name, entry in DATASETS.items():
        assert callable(entry.loader()), name
        assert entry.description
        assert "\n" not in entry.description
    for name in paceline.data.__all__:
        assert getattr(paceline.data, name).__doc__
    with pytest.raises(AttributeError, match="nonsense"):
        _ = paceline.data.nonsense


def test_unknown_names_list_the_choices():
    with pytest.raises(ValueError, match="unknown data set 'cifar'; did you mean 'cifar10'"):
        load_dataset("cifar")


def test_digits_split_is_fixed_stratified_and_normalised():
    one, other = load_dataset("digits"), load_dataset("digits", seed=7)
    assert torch.equal(one.train.inputs, other.train.inputs)
    assert (len(one.train), len(one.test), one.classes, one.input_shape) == (1500, 297, 10, (1, 8, 8))
    assert int(one.test.targets.bincount().min()) >= 28
    assert int(one.test.targets.bincount().max()) <= 31
    assert abs(float(one.train.inputs.mean())) < 1e-6
    assert float(one.train.inputs.std(correction=0)) == pytest.approx(1, abs=1e-6)


def nearest_mean_accuracy(data: Dataset) -> float:
    flat = data.train.inputs.flatten(1)
    means = torch.stack([flat[data.train.targets == label].mean(0) for label in range(data.classes)])
    guesses = torch.cdist(data.test.inputs.flatten(1), means).argmin(1)
    return float((guesses == data.test.targets).double().mean())


@pytest.mark.parametrize(("channels", "size", "classes"), [(1, 1, 2), (1, 8, 10), (3, 16, 10), (2, 5, 3)])
def test_synthetic_images_can_be_learned_at_any_size(channels, size, classes):
    data = load_dataset("synthetic", samples=1000, channels=channels, size=size, classes=classes)
    assert data.input_shape == (channels, size, size)
    assert (len(data.train), len(data.test)) == (1000, 250)
    assert int(data.train.targets.bincount().max() - data.train.targets.bincount().min()) <= 1
    assert nearest_mean_accuracy(data) > (0.9 if size > 1 else 0.5)
    for channel in range(channels):
        assert abs(float(data.train.inputs[:, channel].mean())) < 1e-5
        assert float(data.train.inputs[:, channel].std()) == pytest.approx(1, abs=1e-2)


def test_synthetic_images_follow_the_seed_and_nothing_else():
    torch.manual_seed(1)
    first = load_dataset("synthetic", samples=50, seed=3)
    torch.manual_seed(2)
    again, other = (load_dataset("synthetic", samples=50, seed=seed) for seed in (3, 4))
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert not torch.equal(first.train.inputs, other.train.inputs)
    assert not torch.equal(first.train.inputs[: len(first.test)], first.test.inputs)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"classes": 1}, "classes=1"),
        ({"channels": 0}, "channels=0"),
        ({"size": 0}, "size=0"),
        ({"samples": 5}, "samples=5, classes=10"),
        ({"samples": 10**9, "size": 1000}, "at most 1073741824"),
    ],
)
def test_synthetic_settings_are_checked(options, says):
    with pytest.raises(ValueError, match=says):
        load_dataset("synthetic", **options)


def test_samples_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="a target for each input"):
        Samples(inputs=torch.zeros(2, 1, 2, 2), targets=torch.zeros(3).long())


def test_the_page_names_every_data_set_and_split():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    for name in (*DATASETS, *importlib.import_module("paceline.data.splits").SPLITS):
        assert f"`{name}`" in page
