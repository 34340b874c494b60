"""A simulated run that is over lets go of its data at once: many runs in one process need the memory of one."""

from __future__ import annotations

import gc
import weakref

import numpy
import pytest
import torch

from paceline.recipes import Recipe
from paceline.runs import simulate
from paceline.strategies import STRATEGIES
from paceline.strategies.averaging import AVERAGING


@pytest.fixture
def no_collector():
    """Free only what nothing holds: a collector may come late, and data sets are large."""
    simulate(Recipe(rounds=1))  # what torch imports with the first training keeps the frames that it was called from
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.filterwarnings("ignore::paceline.errors.PacelineWarning")
@pytest.mark.parametrize("pruning", ["none", "info-batch"])
@pytest.mark.parametrize("late_work", ["complete", "partial"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, *AVERAGING])
def test_a_run_that_is_over_holds_no_data(no_collector, strategy, late_work, pruning):
    values = numpy.random.default_rng(0).normal(size=(120, 6)).astype(numpy.float32)
    held = [weakref.ref(values)]  # the memory of the data itself: a run has tensors of its own on it

    def model():
        made = torch.nn.Linear(6, 3)
        held.append(weakref.ref(made))
        return made

    inputs, targets = torch.from_numpy(values), torch.arange(120) % 3
    recipe = Recipe(rounds=4, evaluate_every=2).with_settings(
        cluster={"workers": 4, "late_work": late_work},
        strategy={"name": strategy, "k": None},
        data={"split": "iid"},
        pruning={"name": pruning},
    )
    result = simulate(recipe, data=((inputs, targets), (inputs, targets)), model=model)
    assert len(held) >= 2
    assert result.rounds >= 4
    del values, inputs, targets
    assert [each() for each in held] == [None] * len(held)
