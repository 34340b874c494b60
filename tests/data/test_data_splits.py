"""The law of every split: each sample to exactly one worker, no worker without, or an error that says why."""

import time

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.data import SPLITS, split
from paceline.data.splits import holders_per_class

SETTINGS = {"iid": {}, "non-iid": {"classes_per_worker": 2}, "dirichlet": {"alpha": 0.3}}


def check_law(shards: list[torch.Tensor], samples: int, workers: int) -> None:
    assert len(shards) == workers
    assert all(len(shard) > 0 and shard.dtype == torch.int64 for shard in shards)
    assert torch.cat(shards).sort().values.tolist() == list(range(samples))
    assert all(bool((shard.diff() > 0).all()) for shard in shards)


# Bytes, which hypothesis draws all at once: numbers in a list take it several times as long.
_drawn = st.binary(min_size=1, max_size=40) | st.binary(min_size=40, max_size=120)
targets_of_any_balance = _drawn.map(lambda drawn: torch.tensor([each % 7 for each in drawn]))


@st.composite
def any_split(draw):
    kind = draw(st.sampled_from(sorted(SPLITS)))
    options = {}
    if kind == "non-iid":
        options["classes_per_worker"] = draw(st.integers(1, 7))
    if kind == "dirichlet":
        options["alpha"] = draw(st.sampled_from([1e-6, 0.01, 0.5, 1.0, 100.0, 1e6]))
    return {"kind": kind, "seed": draw(st.integers(0, 2**40)), **options}


@settings(deadline=None, max_examples=400)
@given(targets_of_any_balance, st.integers(1, 40), any_split())
def test_every_sample_has_one_worker_and_every_worker_a_sample(targets, workers, options):
    try:
        shards = split(targets, workers, **options)
    except ValueError:
        shards = None
    if shards is not None:
        check_law(shards, len(targets), workers)
    elif options["kind"] != "non-iid":  # when that is impossible has a test of its own
        assert workers > len(targets), "refused what can be done"


@settings(deadline=None, max_examples=60)
@given(targets_of_any_balance, st.integers(1, 40), st.integers(0, 99))
def test_iid_sizes_differ_by_at_most_one(targets, workers, seed):
    assume(workers <= len(targets))
    sizes = [len(shard) for shard in split(targets, workers, seed=seed)]
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None, max_examples=300)
@given(targets_of_any_balance, st.integers(1, 20), st.integers(1, 7), st.integers(0, 99))
def test_non_iid_workers_hold_exactly_so_many_classes_and_is_refused_only_if_impossible(
    targets, workers, classes_per_worker, seed
):
    sizes = targets.unique(return_counts=True)[1]
    places = workers * classes_per_worker
    possible = classes_per_worker <= len(sizes) <= places <= int(sizes.clamp(max=workers).sum()) and workers <= len(
        targets
    )
    options = {"kind": "non-iid", "classes_per_worker": classes_per_worker, "seed": seed}
    if not possible:
        with pytest.raises(ValueError):
            split(targets, workers, **options)
        return
    shards = split(targets, workers, **options)
    assert [len(targets[shard].unique()) for shard in shards] == [classes_per_worker] * workers
    for label in targets.unique():  # a class's samples are dealt evenly among those who hold it
        counts = [int((targets[shard] == label).sum()) for shard in shards]
        held = [count for count in counts if count > 0]
        assert max(held) - min(held) <= 1


@pytest.mark.parametrize(("workers", "classes_per_worker"), [(10, 1), (10, 2), (5, 4), (20, 10), (100, 3)])
def test_balanced_classes_give_balanced_shards(workers, classes_per_worker):
    targets = torch.arange(3000) % 10
    shards = split(targets, workers, kind="non-iid", classes_per_worker=classes_per_worker)
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 2
    holders = [sum(bool((targets[shard] == label).any()) for shard in shards) for label in range(10)]
    assert set(holders) == {workers * classes_per_worker // 10}


def test_a_large_class_gets_more_holders():
    targets = torch.tensor([0] * 800 + [1] * 100 + [2] * 100)
    shards = split(targets, 10, kind="non-iid", classes_per_worker=1)
    assert [len(shard) for shard in shards] == [100] * 10


def test_workers_hold_many_different_pairs_of_classes():
    """Dealing in turn alone gave 100 workers only five different pairs."""
    targets = torch.arange(10_000) % 10
    shards = split(targets, 100, kind="non-iid", classes_per_worker=2)
    assert len({tuple(targets[shard].unique().tolist()) for shard in shards}) > 20


def test_a_smaller_alpha_is_more_unequal():
    targets = torch.arange(10_000) % 10
    spread = {}
    for alpha in (0.05, 1.0, 1000.0):
        shards = split(targets, 10, kind="dirichlet", alpha=alpha)
        counts = torch.stack([targets[shard].bincount(minlength=10) for shard in shards]).double()
        spread[alpha] = float(counts.std())
    assert spread[0.05] > 1.3 * spread[1.0] > 1.3 * spread[1000.0]
    assert spread[1000.0] < 10


def test_dirichlet_proportions_are_those_of_the_distribution():
    """The mean share is 1 / workers and its variance (workers - 1) / (workers^2 (workers alpha + 1))."""
    workers, alpha, seeds = 4, 0.5, 300
    targets = torch.zeros(2000, dtype=torch.int64)
    shares = torch.tensor(
        [[len(s) / 2000 for s in split(targets, workers, kind="dirichlet", alpha=alpha, seed=n)] for n in range(seeds)]
    )
    variance = (workers - 1) / (workers**2 * (workers * alpha + 1))
    assert shares.mean(0).sub(1 / workers).abs().max() < 4 * (variance / seeds) ** 0.5
    assert float(shares.var()) == pytest.approx(variance, rel=0.15)


@pytest.mark.parametrize("kind", sorted(SPLITS))
def test_the_seed_decides_and_the_global_generator_does_not(kind):
    targets = torch.arange(300) % 10
    torch.manual_seed(1)
    first = split(targets, 10, kind=kind, seed=5, **SETTINGS[kind])
    state = torch.get_rng_state()
    torch.manual_seed(2)
    again = split(targets, 10, kind=kind, seed=5, **SETTINGS[kind])
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)
    other = split(targets, 10, kind=kind, seed=6, **SETTINGS[kind])
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("workers", "options", "says"),
    [
        (0, {}, r"workers must be between 1 and samples.*workers=0, samples=100"),
        (101, {}, r"workers=101, samples=100"),
        (101, {"kind": "dirichlet", "alpha": 1.0}, r"workers=101, samples=100"),
        (
            5,
            {"kind": "iidd"},
            r"unknown split 'iidd'; did you mean 'iid'\? choose from iid, non-iid, dirichlet",
        ),
        (5, {"kind": "non-iid"}, r"non-iid splits need classes_per_worker"),
        (5, {"kind": "dirichlet"}, r"dirichlet splits need alpha"),
        (5, {"alpha": 1.0}, r"iid splits take no alpha \(alpha=1.0\)"),
        (5, {"kind": "dirichlet", "alpha": 0.0}, r"alpha must be between 1e-6 and 1e6 \(alpha=0.0\)"),
        (5, {"kind": "dirichlet", "alpha": float("nan")}, r"alpha=nan"),
        (5, {"kind": "dirichlet", "alpha": float("inf")}, r"alpha=inf"),
        (
            5,
            {"kind": "non-iid", "classes_per_worker": 11},
            r"classes_per_worker must be between 1 and classes \(classes_per_worker=11, classes=10\)",
        ),
        (5, {"kind": "non-iid", "classes_per_worker": 0}, r"classes_per_worker=0, classes=10"),
        (3, {"kind": "non-iid", "classes_per_worker": 2}, r"at least 4 classes per worker, 5 workers"),
        (50, {"kind": "non-iid", "classes_per_worker": 3}, r"150 holders.*samples for 100.*smallest has 10"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_numbers(workers, options, says):
    with pytest.raises(ValueError, match=says) as caught:
        split(torch.arange(100) % 10, workers, **options)
    assert "\n" not in str(caught.value)


def test_the_advice_of_the_error_works():
    targets = torch.arange(100) % 10
    for workers, classes in ((3, 4), (5, 2)):
        shards = split(targets, workers, kind="non-iid", classes_per_worker=classes)
        assert sum(map(len, shards)) == 100


@pytest.mark.parametrize("targets", [torch.zeros(3, 2, dtype=torch.int64), torch.zeros(5), torch.zeros(0).long()])
def test_targets_that_are_no_labels_are_refused(targets):
    with pytest.raises(ValueError):
        split(targets, 2)


def test_holders_follow_sizes():
    import numpy as np

    assert holders_per_class(np.array([1, 1000]), workers=10, classes_per_worker=1) == [1, 9]
    assert holders_per_class(np.array([3, 1000]), workers=3, classes_per_worker=2) == [3, 3]


def test_fifty_thousand_samples_and_a_thousand_workers_take_no_time():
    targets = torch.arange(50_000) % 10
    for kind in SPLITS:
        began = time.process_time()
        check_law(split(targets, 1000, kind=kind, **SETTINGS[kind]), 50_000, 1000)
        assert time.process_time() - began < 3
