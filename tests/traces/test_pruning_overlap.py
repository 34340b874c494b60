"""The overlap of what two runs prune: bounds, symmetry, chance, ties."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli import main
from paceline.traces.pruning_overlap import overlap_of

times = st.lists(st.integers(0, 6), min_size=1, max_size=60)
SMALL = ["--data", "synthetic", "--data.samples", "80", "--data.size", "4", "--data.channels", "1", "--data.split",
         "iid", "--workers", "2", "--k", "2", "--worker.batch-size", "8", "--rounds", "20", "--pruning",
         "fine-pruning", "--pruning.window", "4", "--pruning.starting-point", "1", "--pruning.block", "1",
         "--pruning.count", "1"]  # fmt: skip


@given(first=times, data=st.data(), share=st.floats(0.05, 1))
def test_an_overlap_is_a_share_and_the_same_both_ways(first, data, share):
    second = data.draw(st.lists(st.integers(0, 6), min_size=len(first), max_size=len(first)))
    found, back = overlap_of(first, second, share=share), overlap_of(second, first, share=share)
    assert 0 <= found.jaccard <= 1 + 1e-9
    assert found.jaccard == pytest.approx(back.jaccard)
    assert found.shared <= min(found.sizes) + 1e-9
    for size, each in zip(found.sizes, (first, second), strict=True):
        assert size == min(max(1, int(share * len(first))), np.count_nonzero(each))


@given(order=st.permutations(range(30)))
def test_a_run_overlaps_wholly_with_itself_where_there_are_no_ties(order):
    found = overlap_of(order, order)
    assert (found.jaccard, found.shared) == (1.0, 3.0)
    assert sorted(found.surely_shared()) == sorted(np.argsort(order)[-3:])


@given(first=times.filter(any), seed=st.integers(0, 1000))
def test_the_numbers_of_samples_do_not_matter(first, seed):
    """Ties are not broken by index: samples in any other order have the same overlap."""
    chance = np.random.default_rng(seed)
    second, order = chance.integers(0, 4, len(first)), chance.permutation(len(first))
    shuffled = overlap_of(np.array(first)[order], second[order])
    assert overlap_of(first, second).jaccard == pytest.approx(shuffled.jaccard)


def test_random_runs_overlap_as_chance_says():
    chance = np.random.default_rng(3)
    found = [overlap_of(chance.permutation(500) + 1, chance.permutation(500) + 1) for _ in range(400)]
    assert found[0].chance == pytest.approx(0.01 / 0.19)
    assert np.mean([each.shared for each in found]) == pytest.approx(found[0].chance_shared, rel=0.1)


def test_runs_with_nobody_in_common_and_runs_that_pruned_nothing():
    assert overlap_of([9, 0, 0, 0, 0], [0, 9, 0, 0, 0]).jaccard == 0
    nothing = overlap_of([0, 0], [0, 0])
    assert (nothing.jaccard, nothing.chance, nothing.sizes) == (0, 0, (0, 0))


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    folders = [tmp_path_factory.mktemp(f"run{seed}") for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        assert main(["simulate", *SMALL, "--seed", str(seed), "--out", str(folder)]) == 0
    return folders


def test_the_command_tells_of_two_runs(two_runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    first, second = map(str, two_runs)
    assert main(["inspect", "pruning", first, second]) == 2, "synthetic labels follow from the seed: other data"
    assert "other labels" in capsys.readouterr().err
    assert main(["inspect", "pruning", first, first]) == 0
    told = capsys.readouterr()
    assert max(len(line.rstrip()) for line in told.out.splitlines() if "/" not in line) <= 80
    assert "by chance" in told.out
    page = (two_runs[0] / "overlap.html").read_text(encoding="utf-8")
    assert "Class by class" in page


def test_the_command_as_json_and_on_other_data(two_runs, capsys, tmp_path):
    first = str(two_runs[0])
    same = shutil.copytree(first, tmp_path / "same")
    assert main(["inspect", "pruning", first, str(same), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 80
    assert found["most_pruned"] == [8, 8]
    assert found["overlap"] > found["overlap_by_chance"]
    other = tmp_path / "other"
    assert main(["simulate", *SMALL, "--data.samples", "90", "--out", str(other)]) == 0
    assert main(["inspect", "pruning", first, str(other)]) == 2
    assert "the runs are of 80 and of 90 samples: they are not on the same data" in capsys.readouterr().err
