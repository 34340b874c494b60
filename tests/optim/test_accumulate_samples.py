"""How many samples a part has: counted where there is no doubt, and else asked for."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from paceline.optim.accumulate import Accumulate
from paceline.optim.sample_counts import count_samples

PACKED = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
IMAGE, LARGER = torch.zeros(3, 4, 4), torch.zeros(3, 6, 5)
BATCH, LABELS = torch.zeros(8, 3, 4, 4), torch.zeros(8, dtype=torch.long)
BOXES = {"boxes": torch.zeros(3, 4), "labels": torch.zeros(3, dtype=torch.long)}  # as many as an image has channels
Step = namedtuple("Step", ["state", "action", "next_state"])

COLUMNS = [
    BATCH,
    np.zeros((8, 2)),
    (BATCH, LABELS),
    [BATCH, LABELS],
    [BATCH],  # what a DataLoader makes of a TensorDataset of one
    [torch.zeros(8, 1), torch.zeros(8, 1)],
    [torch.zeros(8, 5), LABELS, torch.zeros(8, 5)],
    {"ids": torch.zeros(8, 20), "mask": torch.zeros(8, 20), "labels": torch.zeros(8, 20)},
    [{"name": "a", "epoch": torch.tensor(7), "x": torch.zeros(8, 1)}],
    ({"x": torch.zeros(8, 2)}, {"y": torch.zeros(8, 2)}),
    Step(torch.zeros(8, 2), torch.zeros(8, 2), torch.zeros(8, 2)),
    ([BATCH, BATCH, BATCH], LABELS),  # three views of each
    (BATCH, [BOXES] * 7 + [{}]),
    ([IMAGE, LARGER] * 4, LABELS),
    (BATCH, [[IMAGE], []] * 4),
    (BATCH, ["name"] * 5),
    (PACKED, LABELS),
]
DOUBTFUL = [
    [IMAGE] * 4,
    [IMAGE, LARGER, IMAGE, LARGER],
    ((IMAGE, IMAGE), (BOXES, BOXES)),
    ([IMAGE] * 4, [BOXES] * 4),
    ([IMAGE] * 4, [BOXES] * 3 + [{"boxes": torch.zeros(3, 4)}]),
    ([IMAGE] * 4, ["a", "b", "c", "d"]),
    [(IMAGE, 1)] * 4,
    [(IMAGE, 1), (LARGER, 0)],
    [BOXES] * 2,
    {"images": [IMAGE] * 4, "targets": [BOXES] * 4},
    [torch.zeros(8, 5)] * 3,
    (torch.zeros(20, 8, 5), LABELS),  # time first
    (BATCH, torch.zeros(5)),
    ([IMAGE] * 4, LABELS),
    (),
    "words",
    {"length": 5},
    torch.tensor(5),
    [torch.tensor(5), torch.tensor(6)],
    PACKED,
]


@pytest.mark.parametrize("part", COLUMNS)
def test_the_length_that_all_columns_have_is_the_number_of_samples(part):
    assert count_samples(part) == 8


@pytest.mark.parametrize("part", DOUBTFUL)
def test_what_may_be_a_list_of_samples_is_not_counted(part):
    assert count_samples(part) is None


def test_no_samples_are_counted_as_none_of_them():
    assert count_samples(torch.zeros(0, 2)) == 0


@pytest.mark.parametrize("told", [[None, 3], [3, None], [3, 3, None], [None, None, 3]])
def test_samples_are_told_for_all_parts_of_a_group_or_for_none(told):
    model = nn.Linear(1, 1)
    accumulate = Accumulate(model, 3)
    for samples, _ in zip(told, accumulate([torch.ones(2, 1)] * 3), strict=False):
        loss = model(torch.ones(2, 1)).mean()
        if accumulate.part < len(told):
            accumulate.backward(loss, samples=samples)
            continue
        before = "given for part" if told[0] else "not given for part"
        with pytest.raises(ValueError, match=f"samples was {before}.* for part {len(told)}: give it for all parts"):
            accumulate.backward(loss, samples=samples)
        accumulate.backward(loss, samples=told[0])
    assert not torch.isnan(model.weight.grad).any()


def test_another_group_may_be_told_otherwise():
    model = nn.Linear(1, 1)
    accumulate = Accumulate(model, 2)
    for number, part in enumerate(accumulate([torch.ones(2, 1)] * 4)):
        accumulate.backward(model(part).mean(), samples=5 if number < 2 else None)
        if accumulate.ready:
            assert model.weight.grad.item() == pytest.approx(1)
            model.zero_grad()
