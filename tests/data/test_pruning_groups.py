"""What fine-pruning takes from each group of samples: too much is warned of, and it may be bound to a share."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset

from paceline import FinePruning, InfoBatch
from paceline.data.pruning.groups import Groups, find_groups, targets_of

EVERY_EPOCH = {"window": 50, "starting_point": 0, "attenuation": 1, "block": 1, "count": 1}
COMMON, RARE = 900, 100


class Images:
    """A data set with targets, as torchvision's have them: nothing loads a sample."""

    def __init__(self, targets):
        self.targets = targets

    def __len__(self):
        return len(self.targets)


def imbalanced():
    return Images([0] * COMMON + [1] * RARE)


def pruned(sampler, losses, epochs=3):
    """Train so many epochs; return who sat out of the last."""
    for _ in range(epochs):
        met = set()
        for batch in sampler:
            met.update(batch)
            sampler.observe(torch.tensor([losses[index] for index in batch]))
    return np.array([index not in met for index in range(len(losses))])


def hard_where(targets, value):
    return np.where(np.asarray(targets) == value, 5.0, 1.0).astype(np.float32)


def test_a_class_that_loses_more_than_twice_its_share_is_warned_of_once_with_what_to_do():
    data = imbalanced()
    with pytest.warns(UserWarning, match=r"\d+ of 100 of class 1 sit out, and 30% of all samples") as told:
        out = pruned(FinePruning(data, batch_size=50, prune=0.3, **EVERY_EPOCH), hard_where(data.targets, 1), epochs=5)
    assert out[COMMON:].mean() > 0.6
    assert len(told) == 1
    assert 'protect="classes"' in str(told[0].message)
    assert told[0].filename == __file__


def test_a_tail_of_a_target_that_loses_more_than_twice_its_share_is_warned_of():
    targets = torch.linspace(0, 1, 1000)
    data = TensorDataset(torch.zeros(1000, 1), targets)
    losses = np.where(targets.numpy() > 0.85, 5.0, 1.0).astype(np.float32)
    with pytest.warns(UserWarning, match=r"of the targets above 0\.9 sit out.*protect=\.\.\., a function"):
        pruned(FinePruning(data, batch_size=50, prune=0.3, **EVERY_EPOCH), losses)


@pytest.mark.parametrize("balanced", ["losses of no class", "a small class by chance", "no targets", "InfoBatch"])
def test_nothing_is_warned_of_where_no_group_loses_by_its_nature(balanced):
    data, dice = imbalanced(), np.random.default_rng(7)
    losses = dice.random(COMMON + RARE, np.float32)
    if balanced == "a small class by chance":
        data = Images([0] * 996 + [1] * 4)
        losses[996:] = 5.0  # all four sit out, and by chance four of four would once in a hundred runs
    given_ = range(1000) if balanced == "no targets" else data
    if balanced == "no targets":
        losses = hard_where(imbalanced().targets, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if balanced == "InfoBatch":
            pruned(InfoBatch(data, batch_size=50, epochs=8), hard_where(data.targets, 1))
        else:
            pruned(FinePruning(given_, batch_size=50, prune=0.3, **EVERY_EPOCH), losses)


@pytest.mark.parametrize("protect", ["classes", lambda index: "rare" if index >= COMMON else "common"])
def test_a_protected_class_loses_its_share_and_its_hardest(protect):
    data = imbalanced()
    losses = hard_where(data.targets, 1)
    losses[:450] = 2.0  # above the mean of batches in which nobody is of the rare class
    losses[COMMON + 80 :] = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = pruned(FinePruning(data, batch_size=50, prune=0.3, protect=protect, **EVERY_EPOCH), losses)
    assert (out[:COMMON].sum(), out[COMMON:].sum()) == (270, 30)
    assert not out[COMMON + 80 :].any()  # those that are easy in their class stay


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.floats(0, 0.99))
def test_quotas_are_the_shares_of_the_groups_and_the_rest_is_the_largest_groups(sizes, share):
    """Together they are as many as without groups; each is its share, rounded down, or one more in the largest."""
    groups = Groups(np.repeat(np.arange(len(sizes)), sizes), tuple(map(str, sizes)), "")
    number = int(share * sum(sizes))
    quotas = groups.quotas(number)
    assert quotas.sum() == number
    for quota, size in zip(quotas, sizes, strict=True):
        fair = size * number / sum(sizes)
        assert 0 <= quota - np.floor(fair) <= 1
        assert quota <= size
    larger = [
        quota - size * number // sum(sizes)
        for quota, size in sorted(zip(quotas, sizes, strict=True), key=lambda each: -each[1])
    ]
    assert larger == sorted(larger, reverse=True)


def test_protected_pruning_takes_as_many_goes_on_from_its_state_and_says_that_it_was_protected():
    data = imbalanced()
    losses = np.random.default_rng(3).random(1000).astype(np.float32) + hard_where(data.targets, 1)
    settings = {"batch_size": 50, "prune": 0.3, **EVERY_EPOCH}
    first = FinePruning(data, protect="classes", **settings)
    pruned(first, losses, epochs=2)
    second = FinePruning(data, protect="classes", **settings)
    second.load_state_dict(first.state_dict())
    assert [list(batch) for batch in first] == [list(batch) for batch in second]
    with pytest.warns(UserWarning, match="protect=2 groups [0-9a-f]{8}, here none"):
        FinePruning(data, **settings).load_state_dict(first.state_dict())


def test_targets_are_found_where_data_sets_have_them():
    labels = torch.tensor([3, 1, 2])
    tensors = TensorDataset(torch.zeros(3, 2), labels)
    for data in (tensors, Images(labels), Images([3, 1, 2]), Subset(Images([9, 1, 2, 3]), [3, 1, 2])):
        assert targets_of(data).tolist() == [3, 1, 2]
    columns = type("Table", (dict,), {"column_names": ["text", "label"]})(label=[3, 1, 2])
    assert targets_of(columns).tolist() == [3, 1, 2]
    for data in (range(3), TensorDataset(labels), Images([[1], [2, 3]])):
        assert find_groups(data, 3, None) is None
    assert find_groups(Images(np.zeros((3, 2))), 3, None) is None  # two targets each


@pytest.mark.parametrize(
    "targets",
    [
        torch.arange(1000).ge(COMMON).long(),
        torch.arange(1000).ge(COMMON).float(),  # as binary_cross_entropy_with_logits takes them
        torch.arange(1000).ge(COMMON).float().reshape(1000, 1),
        torch.arange(1000).ge(COMMON).float().requires_grad_(),
    ],
    ids=["integers", "floats", "a column", "with gradients"],
)
def test_binary_targets_are_classes_in_every_form(targets):
    data = TensorDataset(torch.zeros(1000, 1), targets)
    groups = find_groups(data, 1000, "classes")
    assert groups.quotas(300).tolist() == [270, 30]
    assert find_groups(data, 1000, None).digest == groups.digest


@pytest.mark.parametrize("targets", [[float("nan")] * 10, [float("inf")] * 10, property(lambda self: 1 / 0)])
def test_targets_that_cannot_be_looked_at_are_no_error_where_nobody_asked(targets):
    kind = type("Odd", (), {"labels": targets, "__len__": lambda self: 10})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FinePruning(kind(), batch_size=2).epoch == 1


@pytest.mark.parametrize(
    ("protect", "data", "said"),
    [
        ("classes", 10, "protect='classes' needs the class of each sample, and int has no targets: give a function"),
        ("classes", Images(list(np.linspace(0, 1, 50))), "Images has targets that are no classes: give a function"),
        ("class", Images([1] * 10), "protect must be 'classes', or a function"),
        (3, Images([1] * 10), "protect must be 'classes', or a function"),
    ],
)
def test_what_cannot_be_protected_is_refused(protect, data, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        FinePruning(data, batch_size=2, protect=protect)
